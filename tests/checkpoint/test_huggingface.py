"""Checkpoints leave as directories that transformers loads, come back bit-equal, and what does not fit is refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from running import tool
from safetensors.torch import load_file, save_file

from pretrain.checkpoint import huggingface
from pretrain.checkpoint.huggingface import ALONE, build, export, import_model, read_checkpoint, read_hf
from pretrain.checkpoint.open_model import open_model
from pretrain.checkpoint.save import write_checkpoint
from pretrain.config.schema import Model
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.data.tokenizers.training import train_tokenizer
from pretrain.errors import CheckpointError, ConfigError, DataError, UserError
from pretrain.models.decoder import Decoder
from pretrain.models.shape import complete
from pretrain.parallel.initialise import initialise

ROOT = Path(__file__).resolve().parents[2]
SMALL = Model(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, init_std=0.2)
PROMPT = "def main():\n    return"


def write(target: Path, tokenizer: Path | None, model: Model = SMALL, **changes) -> Path:
    """A checkpoint with random weights, as a run writes it; `changes` replace tensors by name, None removes one."""
    if model.vocab_size is None:
        model = dataclasses.replace(model, vocab_size=load_tokenizer(tokenizer).vocab_size)
    model = complete(model, 96)
    decoder = Decoder(model)
    initialise(decoder, 5)
    weights = {f"model.{name}": p.detach() for name, p in decoder.named_parameters()} | changes
    state = {
        "step": 10,
        "samples": 160,
        "tokens": 5120,
        "world_size": 1,
        "layout": "single",
        "model": dataclasses.asdict(model),
    }
    attachments = {"tokenizer": tokenizer} if tokenizer else {}
    write_checkpoint(target, {n: t for n, t in weights.items() if t is not None}, state, attachments, ALONE)
    return target


@pytest.fixture(scope="module")
def run(tmp_path_factory, byte_tokenizer) -> Path:
    """A run directory with one checkpoint, untied."""
    folder = tmp_path_factory.mktemp("run")
    write(folder / "checkpoints" / "step-00000010", byte_tokenizer)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    """A checkpoint with tied embeddings and a SentencePiece tokenizer, in a vocabulary with unused rows."""
    folder = tmp_path_factory.mktemp("tied")
    lines = [f"def f{i}(x):\n    return x + {i * i}  # the sum of things\n" for i in range(300)]
    (folder / "text.txt").write_text("".join(lines))
    train_tokenizer([str(folder / "text.txt")], folder / "tokenizer", "bpe", 320)
    return write(folder / "checkpoint", folder / "tokenizer", dataclasses.replace(SMALL, tie_embeddings=True, vocab_size=480))


@pytest.fixture(scope="module")
def exported(tmp_path_factory, run) -> Path:
    output = tmp_path_factory.mktemp("exported") / "model"
    export(run, output, "fp32", verify=False)
    return output


@pytest.fixture
def copied(exported, tmp_path) -> Path:
    """An export to spoil."""
    return Path(shutil.copytree(exported, tmp_path / "theirs"))


def automatic(path: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, trust_remote_code=False).eval()


def files_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def edit_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "remove"}))


def edit_weights(path: Path, change) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


# ---- export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["run", "tied"])
def test_transformers_loads_an_export_and_computes_our_logits(request, tmp_path, which):
    from transformers import AutoTokenizer

    source = request.getfixturevalue(which)
    done = export(source, tmp_path / "out", "fp32", verify=True)
    decoder, tokenizer = open_model(source)
    theirs = automatic(tmp_path / "out")
    ids = torch.randint(tokenizer.vocab_size, (3, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = theirs(ids).logits
        assert logits.std() > 0.1
        assert (logits - decoder(ids)).abs().max() <= 1e-4
    assert 0 <= done["difference"] <= 1e-4
    assert done["parameters"] == theirs.num_parameters()
    assert theirs.config.tie_word_embeddings == (which == "tied")
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == tokenizer.eod_id
    assert theirs.config.max_position_embeddings == 96
    their_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert their_tokenizer.encode(PROMPT, add_special_tokens=False) == tokenizer.encode(PROMPT)
    assert their_tokenizer.eos_token_id == tokenizer.eod_id


def test_an_export_holds_weights_and_json_and_nothing_that_runs_code(exported):
    assert sorted(files_of(exported)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((exported / "config.json").read_text())
    assert not {"auto_map", "trust_remote_code", "custom_pipelines"} & config.keys()


def test_a_tied_head_is_written_once(tied, tmp_path):
    export(tied, tmp_path / "out", "fp32", verify=False)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("dtype, torch_dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_half_precision_export_holds_the_rounded_weights_and_says_so(run, exported, tmp_path, dtype, torch_dtype):
    done = export(run, tmp_path / "out", dtype, verify=True)
    whole, half = load_file(exported / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert whole.keys() == half.keys()
    assert all(torch.equal(half[name], tensor.to(torch_dtype)) for name, tensor in whole.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(torch_dtype).removeprefix("torch.")
    assert automatic(tmp_path / "out").dtype == torch_dtype
    assert done["difference"] <= 1e-4


def test_a_large_export_is_cut_into_shards_with_an_index(run, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)
    export(run, tmp_path / "out", "fp32", verify=False)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    whole = load_file(exported / "model.safetensors")
    assert [p.name for p in shards] == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 3
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    assert index["weight_map"] == {name: p.name for p in shards for name in load_file(p)}
    for shard in shards:
        tensors = load_file(shard)
        assert sum(t.nbytes for t in tensors.values()) <= 20_000 or len(tensors) == 1
    theirs = automatic(tmp_path / "out").state_dict()
    assert theirs.keys() == whole.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in whole.items())
    _, weights = read_hf(tmp_path / "out")
    assert all(torch.equal(weights[name], tensor) for name, tensor in read_hf(exported)[1].items())


# ---- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which, dtype", [("run", "fp32"), ("tied", "fp32"), ("run", "bf16")])
def test_to_hf_from_hf_to_hf_is_bit_equal(request, tmp_path, which, dtype):
    source = request.getfixturevalue(which)
    export(source, tmp_path / "first", dtype, verify=False)
    done = import_model(tmp_path / "first", tmp_path / "imported", verify=True)
    assert done["tokenizer"] == "copied"
    assert done["difference"] <= 1e-4
    export(tmp_path / "imported", tmp_path / "second", dtype, verify=False)
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")
    model, weights, _ = read_checkpoint(source)
    again, imported, _ = read_checkpoint(tmp_path / "imported")
    assert again == model
    if dtype == "fp32":
        assert imported.keys() == weights.keys()
        assert all(torch.equal(imported[name], tensor) for name, tensor in weights.items())


def test_a_model_that_transformers_saved_is_imported(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    done = import_model(tmp_path / "theirs", tmp_path / "imported", verify=True)
    assert done["tokenizer"].startswith("none (")
    model, weights, _ = read_checkpoint(tmp_path / "imported")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert (build(model, weights)(ids) - theirs(ids).logits).abs().max() <= 1e-5
    state = json.loads((tmp_path / "imported" / "state.json").read_text())
    assert (state["step"], state["layout"]) == (0, "imported")


def test_a_tied_head_that_is_written_twice_is_read_once(tied, tmp_path):
    export(tied, tmp_path / "out", "fp32", verify=False)
    edit_weights(tmp_path / "out", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    _, weights = read_hf(tmp_path / "out")
    assert "output.weight" not in weights
    edit_weights(tmp_path / "out", lambda w: w["lm_head.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"lm_head.weight has no place in llama \(0 missing, 1 surplus tensors\)"):
        read_hf(tmp_path / "out")


# ---- refusals ---------------------------------------------------------------------------------------------------------


def refused(kind: type[UserError], directory: Path, tmp_path: Path) -> str:
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(kind) as caught:
        import_model(directory, tmp_path / "imported", verify=False)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before
    return str(caught.value)


def test_a_missing_a_surplus_and_a_misshapen_tensor_are_named(copied, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(copied, lambda w: w.pop(name))
    assert refused(CheckpointError, copied, tmp_path) == f"{copied}: {name} is missing (1 missing, 0 surplus tensors)"
    edit_weights(copied, lambda w: w.update({name: torch.zeros(47, 32)}))
    assert refused(CheckpointError, copied, tmp_path) == f"{copied}: {name} has shape [47, 32], config.json says [48, 32]"
    edit_weights(copied, lambda w: w.update({name: torch.zeros(48, 32), "model.layers.2.extra": torch.zeros(1)}))
    assert "model.layers.2.extra has no place in llama (0 missing, 1 surplus tensors)" in refused(
        CheckpointError, copied, tmp_path
    )


def test_quantised_weights_are_refused(copied, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(copied, lambda w: w.update({name: torch.zeros(48, 32, dtype=torch.int8)}))
    assert refused(CheckpointError, copied, tmp_path).endswith(f"{name} is torch.int8; quantised weights cannot be trained")


@pytest.mark.parametrize("length", [0, 5, 500, -1])
def test_truncated_weights_are_refused(copied, tmp_path, length):
    path = copied / "model.safetensors"
    os.truncate(path, length % path.stat().st_size)
    assert refused(CheckpointError, copied, tmp_path).startswith(f"{path}: damaged: ")


def test_weights_that_are_missing_or_of_another_format_are_refused(copied, tmp_path):
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    assert refused(CheckpointError, copied, tmp_path) == (
        f"{copied / 'model.safetensors'}: missing; only safetensors are read, other formats can execute code"
    )


@pytest.mark.parametrize("index", ["{}", "[]", "3", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "{"])
def test_a_damaged_index_is_refused(copied, tmp_path, index):
    path = copied / "model.safetensors.index.json"
    path.write_text(index)
    assert refused(CheckpointError, copied, tmp_path).startswith(f"{path}: ")


def test_a_shard_that_is_missing_is_named_and_none_outside_the_directory_is_read(copied, tmp_path):
    outside = tmp_path / "outside.safetensors"
    (copied / "model.safetensors").rename(outside)
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(CheckpointError, copied, tmp_path).startswith(f"{copied / 'outside.safetensors'}: missing")


@pytest.mark.parametrize("content", ["[]", "3", "{", "null"])
def test_a_damaged_config_json_is_refused(copied, tmp_path, content):
    (copied / "config.json").write_text(content)
    assert refused(CheckpointError, copied, tmp_path).startswith(f"{copied / 'config.json'}: ")


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures=['GPT2LMHeadModel'] is not supported"),
        ({"attention_bias": 3}, "attention_bias=3 is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "is not supported for llama; only default, linear"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap=30.0 is not known for llama; it may change what is computed"),
        ({"intermediate_size": "remove"}, "intermediate_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size is missing or no whole number"),
    ],
)
def test_a_model_that_we_would_compute_otherwise_is_refused(copied, tmp_path, changes, problem):
    edit_config(copied, **changes)
    assert problem in refused(ConfigError, copied, tmp_path)


def test_a_directory_without_config_json_is_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    assert refused(CheckpointError, tmp_path / "empty", tmp_path).endswith("no config.json; not a Hugging Face model directory")


@pytest.mark.parametrize("missing", [True, False])
def test_a_checkpoint_whose_weights_do_not_fit_its_shape_is_not_exported(tmp_path, byte_tokenizer, missing):
    name = "model.layers.0.mlp.up.weight" if missing else "model.layers.9.mlp.up.weight"
    checkpoint = write(tmp_path / "checkpoint", byte_tokenizer, **{name: None if missing else torch.zeros(3)})
    with pytest.raises(CheckpointError, match=f"{name.removeprefix('model.')} is on one side only of llama's weight map"):
        export(checkpoint, tmp_path / "out", "fp32", verify=False)
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path, byte_tokenizer):
    checkpoint = write(tmp_path / "checkpoint", byte_tokenizer)
    payload = next(checkpoint.glob("__0_*"))
    content = bytearray(payload.read_bytes())
    content[-100] ^= 1
    payload.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{payload.name}: its content does not match its sha256"):
        export(checkpoint, tmp_path / "out", "fp32", verify=False)
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_an_existing_output_is_left_as_it_is(run, exported, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for action in (
        lambda: export(run, tmp_path / "out", "fp32", verify=False),
        lambda: import_model(exported, tmp_path / "out", verify=False),
    ):
        with pytest.raises(DataError, match="already exists"):
            action()
        assert files_of(tmp_path) == {"out/notes.txt": b"mine"}


def test_an_export_that_computes_something_else_is_not_put_in_place(run, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "logit_difference", lambda *arguments: float("nan"))
    with pytest.raises(CheckpointError, match=r"logits differ from ours by nan \(limit 0.0001\); nothing was written"):
        export(run, tmp_path / "out", "fp32", verify=True)
    with pytest.raises(CheckpointError, match="nothing was written"):
        import_model(exported, tmp_path / "out", verify=True)
    assert os.listdir(tmp_path) == []


def test_verification_finds_a_weight_that_went_to_the_wrong_place(run, tmp_path, monkeypatch):
    written = huggingface._write_weights

    def exchanged(directory, weights):
        one, other = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight"
        written(directory, weights | {one: weights[other], other: weights[one]})

    monkeypatch.setattr(huggingface, "_write_weights", exchanged)
    with pytest.raises(CheckpointError, match="logits differ from ours by"):
        export(run, tmp_path / "out", "fp32", verify=True)
    assert os.listdir(tmp_path) == []


# ---- tools ------------------------------------------------------------------------------------------------------------


def test_the_conversion_tool_converts_and_verifies_both_ways(run, tmp_path, capsys):
    main = tool("convert_checkpoint").main
    assert main(["to-hf", "--checkpoint", str(run), "--output", str(tmp_path / "hf"), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "exported" in printed and "step-00000010" in printed and "fp32" in printed
    assert "verified: transformers' logits differ from ours by at most" in printed
    assert main(["from-hf", "--model", str(tmp_path / "hf"), "--output", str(tmp_path / "ours"), "--verify"]) == 0
    assert "tokenizer: copied" in capsys.readouterr().out
    assert tool("verify_checkpoint").main([str(tmp_path / "ours")]) == 0
    assert capsys.readouterr().out.startswith(f"good     {tmp_path / 'ours'}: ")


def test_the_tools_exit_with_1_on_failure_and_2_on_bad_usage(exported, tmp_path, capsys):
    convert, generate, verify = (tool(n).main for n in ("convert_checkpoint", "generate", "verify_checkpoint"))
    failures = [
        (convert, ["to-hf", "--checkpoint", str(tmp_path / "nothing"), "--output", str(tmp_path / "out")], 1),
        (convert, ["from-hf", "--model", str(tmp_path), "--output", str(tmp_path / "out")], 1),
        (generate, ["--model", str(tmp_path / "nothing"), "--prompt", "a", "--max-tokens", "3"], 1),
        (verify, [str(tmp_path / "nothing")], 1),
        (generate, ["--model", str(exported), "--prompt", "a", "--max-tokens", "96"], 2),
    ]
    for main, arguments, code in failures:
        assert main(arguments) == code, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    assert "--max-tokens=96: with a prompt of 1 tokens at most 95; the model knows 96 positions" in error
    for main, arguments in (
        (convert, ["to-hf", "--checkpoint", "x"]),
        (convert, ["to-hf", "--checkpoint", "x", "--output", "y", "--dtype", "int8"]),
        (generate, ["--model", "x", "--prompt", "a", "--max-tokens", "0"]),
        (generate, ["--model", "x", "--prompt", "a", "--max-tokens", "3", "--temperature", "0"]),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("which", ["run", "tied"])
@pytest.mark.parametrize("prompt", [PROMPT, ""])
def test_greedy_generation_is_that_of_transformers_token_for_token(request, tmp_path, capsys, which, prompt):
    source = request.getfixturevalue(which)
    output = tmp_path / "hf"
    export(source, output, "fp32", verify=False)
    printed = []
    for place in (source, output):
        assert (
            tool("generate").main(["--model", str(place), "--prompt", prompt, "--max-tokens", "40", "--greedy", "--json"]) == 0
        )
        printed.append(json.loads(capsys.readouterr().out))
    tokenizer, theirs = load_tokenizer(output), automatic(output)
    ids = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eod_id]])
    with torch.no_grad():
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40)[0, ids.shape[1] :].tolist()
    if tokenizer.eod_id in expected:
        expected = expected[: expected.index(tokenizer.eod_id)]
    assert len(expected) > 3
    for answer in printed:
        assert (answer["prompt"], answer["prompt_tokens"], answer["tokens"]) == (prompt, ids[0].tolist(), expected)
    # transformers makes U+FFFD of a whole run of bytes that is no valid text, SentencePiece of single ones: the rest is equal.
    assert printed[1]["text"] == tokenizer.decode(expected)
    assert printed[0]["text"] == printed[1]["text"] or "\ufffd" in printed[0]["text"]


def test_a_token_that_the_tokenizer_does_not_have_adds_no_text(tied, capsys):
    unused = load_tokenizer(tied / "tokenizer").vocab_size
    arguments = ["--model", str(tied), "--prompt", "def", "--max-tokens", "60", "--temperature", "50", "--json"]
    assert tool("generate").main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert max(answer["tokens"]) >= unused
    assert answer["text"]


def test_sampling_is_repeated_by_its_seed(exported, capsys):
    def text(*options: str) -> str:
        assert tool("generate").main(["--model", str(exported), "--prompt", "a", "--max-tokens", "20", *options]) == 0
        return capsys.readouterr().out

    assert text("--seed", "1") == text("--seed", "1") != text("--seed", "2")
    assert text("--top-k", "1", "--seed", "3") == text("--greedy")
    assert text("--greedy").startswith("a")
