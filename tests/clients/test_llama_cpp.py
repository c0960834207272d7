"""llama.cpp's own converter and library, built from source: what to-gguf converts is computed and read as we do; the rest is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hard_texts import HARD, SPECIAL, real_texts
from other_programs import Exported, LlamaCpp, child_environment, exported
from parity import ALL, FAMILIES, cases
from running import tool

from pretrain.config.attention_schema import AttentionConfig, Latent, Rope
from pretrain.config.model_schema import ExpertsConfig, MlpConfig, Model
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.huggingface import gguf
from pretrain.huggingface.gguf import plan_gguf
from pretrain.huggingface.open_model import open_model
from pretrain.models.families import complete, family_of
from pretrain.models.families.declare.other_readers import llama_cpp_problem
from pretrain.models.generate import generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
READER = Path(__file__).with_name("read_with_llama_cpp.py")
GELU = 2e-2  # llama.cpp looks GELU up in a table of fp16
PROMPTS = ("def main", "To be, or not to be", "  two spaces", "A man in", "\n")

# Heads of 64, as real models have them: of the narrow heads of the families' tests, yarn blends too few frequencies to tell.
WIDE = {"dim": 128, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn_dim": 96, "vocab_size": 61}
YARN = {"scaling": "yarn", "factor": 8.0, "original_length": 32}
LLAMA3 = {"scaling": "llama3", "factor": 8.0, "original_length": 32, "low_frequency": 1.0, "high_frequency": 4.0}
LINEAR = {"scaling": "linear", "factor": 4.0}
SPARSE = ExpertsConfig(count=4, active=2)
MLA = {"head_dim": None, "kv_heads": None, "latent": Latent(kv_rank=12, query_rank=20, rope_dim=64, plain_dim=10, value_dim=6)}
MLA |= {"experts": ExpertsConfig(count=8, active=3, ffn_dim=20, dense_layers=[0], groups=4, active_groups=2, scale=2.5)}
NO_WINDOW = AttentionConfig(window=0)


def wide(family: str, **switches) -> Model:
    return complete(Model(family=family, **{**WIDE, **switches}), 256)


SCALED = [
    *(wide("llama", rope=Rope(**scaling)) for scaling in (YARN, LLAMA3, LINEAR)),
    *(
        wide("llama", rope=Rope(**YARN, **more))
        for more in ({"truncate": False}, {"attention_factor": 1.3}, {"beta_fast": 16.0})
    ),
    *(wide("mistral", rope=Rope(**scaling), attention=NO_WINDOW) for scaling in (YARN, LLAMA3, LINEAR)),
    *(wide("mixtral", rope=Rope(**scaling), experts=SPARSE) for scaling in (YARN, LLAMA3, LINEAR)),
    *(wide(family, rope=Rope(**scaling)) for family in ("qwen2", "qwen3") for scaling in (YARN, LINEAR)),
    *(wide(family, rope=Rope(**YARN)) for family in ("smollm3", "olmo2", "olmo3", "gemma3")),
    *(wide(family, rope=Rope(**LINEAR)) for family in ("olmo2", "gemma3")),
    wide("qwen3_moe", rope=Rope(**YARN), experts=ExpertsConfig(count=4, active=2, normalise=True)),
    *(wide("gpt_oss", rope=Rope(**YARN, truncate=flag), experts=SPARSE) for flag in (True, False)),
    wide("gpt_oss", experts=SPARSE),
    *(wide(family, rope=Rope(**scaling)) for family in ("granite", "glm4", "ernie4_5") for scaling in (YARN, LINEAR)),
    *(wide("starcoder2", rope=Rope(**scaling), attention=NO_WINDOW) for scaling in (YARN, LINEAR)),
    *(wide("olmoe", kv_heads=2, rope=Rope(**scaling), experts=SPARSE) for scaling in (YARN, LINEAR)),
    *(wide("minimax_m2", rope=Rope(**scaling), experts=SPARSE) for scaling in (YARN, LINEAR)),
    *(wide("glm4_moe", rope=Rope(**scaling), experts=replace(SPARSE, ffn_dim=48, shared=1)) for scaling in (YARN, LINEAR)),
    wide("granite", attention=AttentionConfig(bias=["query", "key", "value", "output"]), tie_embeddings=False),
    wide("starcoder2", attention=NO_WINDOW, tie_embeddings=False),
    wide("ernie4_5", tie_embeddings=False),
    wide("phi3", rope=Rope(fraction=0.75), tie_embeddings=True),
    wide("gpt_neox", rope=Rope(fraction=0.5), kv_heads=2),
    wide("deepseek_v3", rope=Rope(**YARN, mscale=0.7, mscale_all_dim=0.7), **MLA),
    wide(
        "llama",
        mlp=MlpConfig(bias=True),
        attention=AttentionConfig(bias=["query", "key", "value", "output"]),
        tie_embeddings=True,
    ),
]


def answers(llama_cpp: LlamaCpp, tasks: list[dict]) -> list[dict]:
    asked = {"sources": llama_cpp.sources, "bindings": llama_cpp.bindings, "library": llama_cpp.library}
    asked["driver"] = Path(gguf.__file__).with_name("gguf_driver.py")
    done = subprocess.run(
        [sys.executable, READER],
        input=json.dumps({name: str(path) for name, path in asked.items()} | {"tasks": tasks}),
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == len(tasks)
    return said


def task_of(made: Exported, **more) -> dict:
    task = plan_gguf(made.directory, "other").task | {"output": f"{made.directory}.gguf", "format": "f32"}
    return {"gguf": task, "logits": f"{made.directory}.pt", **more}


def test_every_configuration_is_computed_as_we_do_or_refused(llama_cpp, tokenizers, tmp_path):
    """CL-1f, CL-1g, CL-1i, CL-1j, CL-1k: whatever to-gguf takes has our logits at every position, windows and scalings included."""
    models = [cases(family)[name] for family, name in ALL if family_of(family).llama_cpp is not None] + SCALED
    taken = [model for model in models if llama_cpp_problem(family_of(model.family), model) is None]
    assert len(models) - 80 < len(taken) < len(models) - 50
    made = [exported(tmp_path / f"{n}", model, tokenizers["byte_bpe"], n) for n, model in enumerate(taken)]
    tasks = [task_of(mine, ids=mine.ids) for mine in made]
    wrong = []
    for mine, task, answer in zip(made, tasks, answers(llama_cpp, tasks)):
        limit = GELU if mine.model.mlp.activation.startswith("gelu") else 1e-4
        off = float("inf") if "error" in answer else float((torch.load(task["logits"]) - mine.logits).abs().max())
        if not off <= limit * max(1.0, float(mine.logits.std())):
            wrong.append((mine.model, answer.get("error"), off))
    assert wrong == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tokenizers) -> dict[tuple[str, str], Exported]:
    """Every family with both tokenizers that llama.cpp has."""
    folder, made = tmp_path_factory.mktemp("plain"), {}
    for family in FAMILIES:
        model = next(iter(cases(family).values()))
        for kind in ("bpe", "byte_bpe"):
            if family_of(family).llama_cpp is not None:
                made[family, kind] = exported(folder / f"{family}-{kind}", model, tokenizers[kind])
    return made


def test_every_family_reads_texts_as_we_do(llama_cpp, tokenizers, plain):
    """CL-1a to CL-1g: ids of 27 hard strings and some hundred real texts equal ours, and transformers' with special tokens read as such."""
    from transformers import AutoTokenizer

    texts = [*HARD, *real_texts()]
    said = answers(llama_cpp, [task_of(mine, texts=texts) for mine in plain.values()])
    for ((family, kind), mine), answer in zip(plain.items(), said):
        assert "error" not in answer, (family, kind, answer)
        ours, theirs = load_tokenizer(tokenizers[kind]), AutoTokenizer.from_pretrained(mine.directory)
        assert answer["bos"] == answer["eos"] == ours.eod_id, (family, kind)
        for text, ids, special, decoded in zip(texts, answer["plain"], answer["special"], answer["decoded"]):
            assert ids == ours.encode(text), (family, kind, text)
            assert special == theirs(text, verbose=False)["input_ids"], (family, kind, text)
            assert decoded == text, (family, kind, text)
    assert ours.encode(SPECIAL) != theirs(SPECIAL)["input_ids"]


def test_the_converter_alone_reads_an_export_with_sentencepiece_as_we_do(llama_cpp, tokenizers, plain):
    """CL-1a to CL-1c: also called by hand, for the families whose converter class reads what stands in tokenizer_config.json."""
    texts = [*HARD, *real_texts()[:50]]
    asked = [task_of(plain[family, "bpe"], texts=texts, alone=True) for family in ("llama", "mistral", "mixtral", "gemma3")]
    for answer in answers(llama_cpp, asked):
        assert "error" not in answer, answer
        ours = load_tokenizer(tokenizers["bpe"])
        assert answer["plain"] == [ours.encode(text) for text in texts]
        assert answer["bos"] == answer["eos"] == ours.eod_id


def test_a_text_is_continued_as_we_continue_it(llama_cpp, plain):
    """CL-1m: 40 greedy tokens after five prompts that llama.cpp itself encodes."""
    for kind in ("bpe", "byte_bpe"):
        mine = plain["llama", kind]
        [answer] = answers(llama_cpp, [task_of(mine, prompts=PROMPTS, count=40)])
        opened = open_model(mine.directory)
        for prompt, got in zip(PROMPTS, answer["continued"]):
            assert got == generate(opened.network, opened.tokenizer.encode(prompt), 40), prompt


def test_the_tool_converts_in_one_command(llama_cpp, plain, tmp_path, capsys):
    """CL-1f: `convert_checkpoint.py to-gguf` with a llama.cpp that the user names, in every number format."""
    sizes = {}
    for dtype in ("fp32", "bf16", "q8_0"):
        output = tmp_path / f"{dtype}.gguf"
        command = ["to-gguf", "--model", str(plain["llama", "byte_bpe"].directory), "--output", str(output), "--dtype", dtype]
        assert tool("convert_checkpoint").main([*command, "--llama-cpp", str(llama_cpp.sources)]) == 0, capsys.readouterr()
        sizes[dtype] = output.stat().st_size
    assert sizes["fp32"] > sizes["bf16"] > sizes["q8_0"]
