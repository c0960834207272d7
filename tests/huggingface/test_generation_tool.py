"""tools/generate.py on checkpoints and exports (M-D14): several prompts and samples, BOS and end tokens as the model's files ask, number
formats, and models that transformers alone knows.
"""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import sentencepiece
import torch
from converting import PROMPT, SMALL, automatic, edit_config, write
from hf_configs import write_config
from running import tool

from pretrain.checkpoint import files
from pretrain.checkpoint.save import write_checkpoint
from pretrain.config.model_schema import Model
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.distributed.ranks import ALONE
from pretrain.huggingface.export_model import export
from pretrain.huggingface.import_model import import_model
from pretrain.huggingface.open_model import open_model, read_checkpoint
from pretrain.models import build_network
from pretrain.models.families import complete
from pretrain.models.generate import generate
from pretrain.parallel.initialise import initialise


def answers(capsys, *arguments: object, code: int = 0) -> tuple[list[dict], str]:
    """The objects that tools/generate.py prints with --json, and what it says beside."""
    assert tool("generate").main([str(a) for a in (*arguments, "--json")]) == code
    said = capsys.readouterr()
    return [json.loads(line) for line in said.out.splitlines()], said.err


def test_several_prompts_and_samples_are_what_each_is_alone(run, tmp_path, capsys):
    common = ["--model", run, "--max-tokens", "12", "--seed", "5"]
    prompts = ["", "a", "def main():", "a"]
    alone = []
    for prompt in prompts:
        for seed in (5, 6, 7):
            [line], _ = answers(capsys, "--model", run, "--max-tokens", "12", "--seed", seed, "--prompt", prompt)
            alone.append(line | {"sample": seed - 5})
    given = [item for prompt in prompts for item in ("--prompt", prompt)]
    for size in (1, 5, 16):
        assert answers(capsys, *common, *given, "--num-samples", 3, "--batch-size", size)[0] == alone
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "id": 1}) + "\n" for p in prompts))
    for name in ("prompts.txt", "prompts.jsonl"):
        assert answers(capsys, *common, "--prompt-file", tmp_path / name, "--num-samples", 3)[0] == alone
    assert len({tuple(line["tokens"]) for line in alone}) > 6


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_prompt_may_hold_any_separator_but_the_end_of_a_line(run, tmp_path, capsys, name):
    """A prompt with U+2028 or a form feed became two."""
    prompts = ["a\u2028b", "c\x0cd", "e"]
    rows = prompts if name == "p.txt" else [json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts]
    (tmp_path / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    lines, _ = answers(capsys, "--model", run, "--prompt-file", tmp_path / name, "--max-tokens", "1")
    assert [line["prompt"] for line in lines] == prompts
    (tmp_path / name).write_text("\n".join(rows) + "\n", encoding="utf-8-sig")
    assert answers(capsys, "--model", run, "--prompt-file", tmp_path / name, "--max-tokens", "1")[0] == lines, "a byte order mark"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--stop-id", "-3"], 2, "--stop-id=-3 is no token of the vocabulary, which has 0 to 256"),
        (["--stop-id", "257"], 2, "--stop-id=257 is no token"),
        (["--greedy", "--top-k", "5"], 2, "no effect with --greedy"),
        (["--greedy", "--temperature", "0.8"], 2, "no effect with --greedy"),
        (["--temperature", "0"], 2, "must be positive"),
        (["--temperature", "inf", "--top-k", "5"], 2, "must be positive"),
        (["--seed", str(10**23)], 2, "is not in 0.."),
        (["--family", "hf"], 2, "--family hf has no effect on"),
    ],
)
def test_options_without_effect_are_refused(run, capsys, options, code, said):
    command = ["--model", str(run), "--prompt", "a", "--max-tokens", "1", *options]
    try:
        assert tool("generate").main(command) == code
    except SystemExit as ended:  # of argparse
        assert ended.code == code
    assert said in capsys.readouterr().err


def test_text_of_several_samples_is_told_apart(run, capsys):
    assert tool("generate").main(["--model", str(run), "--prompt", "a", "--max-tokens", "3", "--num-samples", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("a") and printed.count("\n---------------\n") == 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", "", "p.txt: has no prompt in it"),
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', 'p.jsonl:2: no object {"prompt": TEXT}'),
        ("p.jsonl", "[1]\n", "p.jsonl:1: no object"),
        ("none.txt", None, "none.txt: cannot be read"),
    ],
)
def test_a_file_without_prompts_is_named(run, tmp_path, capsys, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert tool("generate").main(["--model", str(run), "--prompt-file", str(tmp_path / name), "--max-tokens", "3"]) == 1
    assert said in capsys.readouterr().err


def test_more_tokens_than_the_context_are_sampled_and_said(run, capsys):
    """M-D14: 97 tokens were refused where the model knows 96 positions; nanoGPT crops."""
    [line], said = answers(capsys, "--model", run, "--prompt", "ab", "--max-tokens", "100", "--greedy")
    assert (
        "the model knows 96 positions, but prompt and continuation may have 102: beyond, each token follows from the last 96"
        in said
    )
    assert len(line["tokens"]) == 100 or 256 not in line["tokens"]


# ---- tokens around a text ---------------------------------------------------------------------------------------------


def with_beginning(directory, kind: str | None) -> int:
    """Give the byte tokenizer of an export a BOS token of its own; its id."""
    content = json.loads((directory / "tokenizer.json").read_text())
    bos = 1 + max(content["model"]["vocab"].values()) - 1  # the row of a letter that no test writes
    text = next(token for token, number in content["model"]["vocab"].items() if number == bos)
    if text not in [item["content"] for item in content["added_tokens"]]:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": bos, "content": text, "special": True, **flags})
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [bos], "tokens": [text]}},
    }
    inner = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    content["post_processor"] = {
        "template": template, "sequence": {"type": "Sequence", "processors": [inner, template]}, None: None
    }[kind]  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": text}))
    return bos


@pytest.mark.parametrize("kind", ["template", "sequence"])
def test_a_prompt_begins_as_the_tokenizer_asks(copied, tmp_path, capsys, kind):
    """M-D14: Llama 3's and Gemma's tokenizers ask for a BOS; nothing was ever added."""
    from transformers import AutoTokenizer

    bos = with_beginning(copied, kind)
    expected = AutoTokenizer.from_pretrained(copied)(PROMPT)["input_ids"]
    assert expected[0] == bos and len(expected) > 2
    import_model(copied, tmp_path / "imported")
    for place in (copied, tmp_path / "imported"):
        [line], said = answers(capsys, "--model", place, "--prompt", PROMPT, "--max-tokens", "3", "--greedy")
        assert line["prompt_tokens"] == expected
        assert f"before each prompt: token {bos}, as the tokenizer asks (--no-bos: nothing)" in said
        [line], said = answers(capsys, "--model", place, "--prompt", "", "--max-tokens", "3")
        assert line["prompt_tokens"] == [bos]
        [line], said = answers(capsys, "--model", place, "--prompt", PROMPT, "--max-tokens", "3", "--no-bos")
        assert line["prompt_tokens"] == expected[1:] and "before each prompt" not in said


def test_a_prompt_of_a_run_begins_as_its_training_data_did(run, copied, tmp_path, capsys):
    """Training puts nothing before a document, whatever its tokenizer asks for: a BOS there was a token that no step had seen."""
    bos = with_beginning(copied, "template")
    weights = {f"model.{name}": tensor for name, tensor in read_checkpoint(run)[1].items()}
    tokens, [*_, place] = tmp_path / "tokenizer", files.checkpoints_at(run)
    state = files.read_json(place / files.STATE)
    tokens.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(copied / name, tokens / name)
    write_checkpoint(tmp_path / "checkpoint", weights, state, {"tokenizer": tokens}, ALONE)
    [line], said = answers(capsys, "--model", tmp_path / "checkpoint", "--prompt", PROMPT, "--max-tokens", "3", "--greedy")
    assert line["prompt_tokens"] == load_tokenizer(tokens).encode(PROMPT) and "before each prompt" not in said
    assert f"the tokenizer asks for token {bos} before a text; training had none there, and so has this" in said
    [line], said = answers(capsys, "--model", tmp_path / "checkpoint", "--prompt", "", "--max-tokens", "3")
    assert line["prompt_tokens"] == [load_tokenizer(tokens).eod_id]


@pytest.mark.parametrize("flag", [True, False, None])
def test_add_bos_token_is_obeyed_where_nothing_else_says_it(copied, capsys, flag):
    """M-D14: a tokenizer.json without a template, as older files have it, with add_bos_token beside."""
    bos = with_beginning(copied, None)
    path = copied / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ({} if flag is None else {"add_bos_token": flag})))
    [line], _ = answers(capsys, "--model", copied, "--prompt", "a", "--max-tokens", "1")
    assert (line["prompt_tokens"][0] == bos) == (flag is True)


@pytest.mark.parametrize(
    ("config", "begins"),
    [
        (None, False),
        ({"tokenizer_class": "LlamaTokenizer"}, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False),
        ({"add_bos_token": True, "bos_token": {"content": "<s>"}}, True),
        ({"tokenizer_class": "T5Tokenizer"}, False),
    ],
)
def test_a_sentencepiece_model_begins_as_its_class_does(tied, tmp_path, capsys, config, begins):
    """M-D14: Llama 2 and Gemma, whose directories may have no tokenizer.json."""
    export(tied, tmp_path / "out")
    for path in (tmp_path / "out").glob("*tokenizer*"):
        path.unlink()
    for path in (tmp_path / "out").glob("s*.model"):
        path.unlink()
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(500)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "out" / "tokenizer"),
        vocab_size=60,
        bos_id=1,
        eos_id=2,
        minloglevel=2,
    )
    (tmp_path / "out" / "tokenizer.vocab").unlink()
    if config is not None:
        (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps(config))
    import_model(tmp_path / "out", tmp_path / "imported")
    for place in (tmp_path / "out", tmp_path / "imported"):
        [line], _ = answers(capsys, "--model", place, "--prompt", "a text", "--max-tokens", "1")
        assert (line["prompt_tokens"][0] == 1) == begins


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_every_end_token_ends_a_text(copied, tmp_path, capsys, file):
    """M-D14: chat models name several in generation_config.json, and only the tokenizer's was known."""
    [free], _ = answers(capsys, "--model", copied, "--prompt", PROMPT, "--max-tokens", "20", "--greedy")
    end = free["tokens"][5]
    content = json.loads((copied / file).read_text())
    (copied / file).write_text(json.dumps(content | {"eos_token_id": [256, end]}))
    places = [copied]
    if file == "generation_config.json":
        import_model(copied, tmp_path / "imported")
        places.append(tmp_path / "imported")
    for place in places:
        [line], _ = answers(capsys, "--model", place, "--prompt", PROMPT, "--max-tokens", "20", "--greedy")
        assert line["tokens"] == free["tokens"][: free["tokens"].index(end)]
    (copied / file).write_text(json.dumps(content | {"eos_token_id": "all"}))
    assert tool("generate").main(["--model", str(copied), "--prompt", "a", "--max-tokens", "1"]) == 1
    assert f"{file}: eos_token_id='all' is no token, nor a list of them" in capsys.readouterr().err


def test_a_token_that_the_model_has_no_row_for_is_named_with_its_prompt(copied, capsys):
    """An IndexError; a token beyond the rows that no prompt has is no error."""
    content = json.loads((copied / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": 257, "content": "zebra", **flags})
    (copied / "tokenizer.json").write_text(json.dumps(content))
    asked = ["--model", str(copied), "--prompt", "a horse", "--max-tokens", "2"]
    assert len(answers(capsys, *asked)[0]) == 1
    _, said = answers(capsys, *asked, "--prompt", "a zebra", code=1)
    assert said.startswith("error: prompt 2: has token 257 of the tokenizer, but the model's vocabulary has 257 rows;")
    assert said.count("\n") == 1


# ---- number formats and other models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_number_format_computes_what_training_in_it_computes(run, tmp_path, dtype):
    """M-D14: matrices are held in the format that they are cast to anyway, so no bit differs from a forward pass of training."""
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    model, weights, _ = read_checkpoint(run)
    network = build_network(model)
    network.load_state_dict(weights)
    for module in network.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = wanted
    export(run, tmp_path / "out")
    for place in (run, tmp_path / "out"):
        opened = open_model(place, "cpu", dtype).network
        assert {p.dtype for p in opened.parameters() if p.dim() > 1} == {wanted}
        assert {p.dtype for p in opened.parameters() if p.dim() == 1} == {torch.float32}
        ids = torch.randint(257, (2, 40), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            logits = opened(ids)
            assert logits.dtype == wanted and torch.equal(logits, network(ids))
        assert len(generate(opened, [1, 2, 3], 8)) == 8


@pytest.mark.parametrize("kind", ["mpt", "kimi_linear", "lfm2_moe"])
def test_an_export_of_a_model_that_transformers_alone_knows_needs_no_flag(tmp_path, capsys, byte_tokenizer, kind):
    """M-D14, newcomer 6: a run of family hf could generate, and its export could not."""
    model = complete(Model(family="hf", hf_config=str(write_config(tmp_path / kind, kind))), 32)
    with torch.device("meta"):
        network = build_network(model)
    network.to_empty(device="cpu")
    initialise(network, 1)
    for parameter in network.parameters():
        if parameter.is_floating_point() and parameter.dim() > 1:
            parameter.data *= 8  # so that no two logits are nearly the same
    state = {"step": 1, "samples": 1, "tokens": 1, "world_size": 1, "layout": "single", "model": dataclasses.asdict(model)}
    tensors = {f"model.{n}": p.detach() for n, p in network.named_parameters()}
    write_checkpoint(tmp_path / "run", tensors, state, {"tokenizer": byte_tokenizer}, ALONE)
    export(tmp_path / "run", tmp_path / "out")
    lines = []
    for place in (tmp_path / "run", tmp_path / "out"):
        [line], said = answers(capsys, "--model", place, "--prompt", "abc", "--max-tokens", "12", "--greedy")
        assert ("read as model.family=hf, which transformers builds" in said) == (place.name == "out")
        lines.append(line)
    ids = torch.tensor([lines[0]["prompt_tokens"]])
    with torch.no_grad():
        expected = automatic(tmp_path / "out").generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, 3:].tolist()  # fmt: skip
    assert lines[0] == lines[1]
    end = load_tokenizer(byte_tokenizer).eod_id
    assert lines[0]["tokens"] == expected[: expected.index(end)] if end in expected else expected


def test_a_directory_can_be_read_as_transformers_own_on_request(exported, capsys):
    asked = ("--model", exported, "--prompt", PROMPT, "--max-tokens", "12", "--greedy")
    [ours], _ = answers(capsys, *asked)
    [theirs], said = answers(capsys, *asked, "--family", "hf")
    assert ours == theirs and "without a cache: model.family=hf has none here" in said


def test_a_field_that_our_family_refuses_is_still_said(copied, capsys):
    edit_config(copied, hidden_act="gelu")
    assert tool("generate").main(["--model", str(copied), "--prompt", "a", "--max-tokens", "1"]) == 2
    assert "hidden_act='gelu' is not supported for llama" in capsys.readouterr().err


def test_nothing_is_put_before_a_prompt_by_models_that_were_trained_here(byte_tokenizer, tmp_path, capsys):
    [line], said = answers(
        capsys, "--model", write(tmp_path / "c", byte_tokenizer, SMALL), "--prompt", "a", "--max-tokens", "1"
    )
    assert line["prompt_tokens"] == load_tokenizer(byte_tokenizer).encode("a") and "before each prompt" not in said
