"""The mean of checkpoints: its values, what can be done with it, and what is refused."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running import tool
from torch.optim.swa_utils import AveragedModel

from pretrain.checkpoint import files
from pretrain.checkpoint.averaging import average_checkpoints
from pretrain.checkpoint.payload import Payload
from pretrain.checkpoint.save import write_checkpoint
from pretrain.config.model_schema import Model
from pretrain.distributed.ranks import ALONE
from pretrain.huggingface.open_model import open_model, read_checkpoint
from pretrain.huggingface.verification import build
from pretrain.models.families import complete
from pretrain.run import main as run_py

PERIODIC = ("run.steps=15", "checkpoint.every_steps=5", "checkpoint.keep_last=0", "optim.lr=0.01")
MODEL = complete(Model(dim=16, layers=1, heads=2, vocab_size=32), 16)


@pytest.fixture
def run(trained_run, config_file) -> Path:
    return trained_run(1, config_file, *PERIODIC)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return Payload(checkpoint).read_all("model.")


def averaging(*arguments: object) -> int:
    return tool("average_checkpoints").main([str(argument) for argument in arguments])


def refusal(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert averaging(*arguments) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def checkpoint(path: Path, tensors: dict[str, torch.Tensor], model: Model = MODEL) -> Path:
    state = {"step": 1, "samples": 1, "tokens": 1, "world_size": 1, "layout": "single", "model": dataclasses.asdict(model)}
    write_checkpoint(path, {f"model.{name}": tensor for name, tensor in tensors.items()}, state, {}, ALONE)
    return path


# ---- the mean ---------------------------------------------------------------------------------------------------------


def test_the_mean_is_that_of_torchs_averaged_model(run, tmp_path, capsys):
    assert averaging(run, "--last", 3, "--output", tmp_path / "mean") == 0
    printed = capsys.readouterr().out
    assert printed.count(" 33.3%   ") == 3 and "averaged 3 checkpoints" in printed
    checkpoints = files.complete_checkpoints(run / "checkpoints")
    networks = [build(*read_checkpoint(path)[:2]) for path in checkpoints]
    expected = AveragedModel(networks[0])
    for network in networks:
        expected.update_parameters(network)
    mean = build(*read_checkpoint(tmp_path / "mean")[:2])
    for (name, ours), theirs, last in zip(mean.named_parameters(), expected.module.parameters(), networks[-1].parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8, msg=name)
        assert not torch.equal(ours, last), name


def test_shares_are_in_proportion_and_in_the_order_of_the_paths(run, tmp_path):
    first, _, last = (weights(path) for path in files.complete_checkpoints(run / "checkpoints"))
    paths = files.complete_checkpoints(run / "checkpoints")[::2]
    assert averaging(*paths, "--shares", 1, 3, "--output", tmp_path / "mean") == 0
    for name, mean in weights(tmp_path / "mean").items():
        expected = (first[name].double() / 4 + last[name].double() * 3 / 4).float()
        torch.testing.assert_close(mean, expected, rtol=1e-7, atol=0, msg=name)
    state = files.load_state(tmp_path / "mean")
    assert [(part["share"], part["step"]) for part in state["averaged"]] == [(0.25, 5), (0.75, 15)]
    assert [part["manifest"] for part in state["averaged"]] == [files.manifest_hash(path) for path in paths]


@given(st.lists(st.tuples(st.floats(1e-100, 1e100), st.integers(0, 99)), min_size=2, max_size=5), st.randoms())
@settings(max_examples=15, deadline=None)
def test_the_order_of_checkpoints_does_not_matter_and_equal_ones_are_their_mean(tmp_path_factory, parts, random):
    folder = tmp_path_factory.mktemp("mean")
    paths = [
        checkpoint(folder / str(n), {"number": torch.tensor(float(n)), "mixed": torch.rand(3, 5, generator=torch.Generator().manual_seed(seed)), "same": torch.tensor([0.1, -torch.inf])})
        for n, (_, seed) in enumerate(parts)
    ]
    shuffled = list(enumerate(parts))
    random.shuffle(shuffled)
    average_checkpoints(paths, folder / "mean", [share for share, _ in parts])
    average_checkpoints([paths[n] for n, _ in shuffled], folder / "again", [share for _, (share, _) in shuffled])
    mean, again = weights(folder / "mean"), weights(folder / "again")
    torch.testing.assert_close(mean["model.mixed"], again["model.mixed"], rtol=1e-7, atol=0)
    assert torch.equal(mean["model.same"], torch.tensor([0.1, -torch.inf]))
    if len({seed for _, seed in parts}) == 1:
        assert torch.equal(mean["model.mixed"], weights(paths[0])["model.mixed"])
    shutil.rmtree(folder)


def test_a_mean_of_weights_in_bf16_is_kept_in_fp32_and_whole_numbers_stay(tmp_path):
    one, two = (torch.tensor([1.0, value], dtype=torch.bfloat16) for value in (1.0, 1.0078125))  # neighbours
    whole = {"count": torch.tensor([7]), "mask": torch.tensor([True, False])}
    paths = [checkpoint(tmp_path / str(n), {"w": w, **whole}) for n, w in enumerate((one, two))]
    average_checkpoints(paths, tmp_path / "mean")
    mean = weights(tmp_path / "mean")
    assert torch.equal(mean["model.w"], torch.tensor([1.0, 1.00390625]))
    assert all(torch.equal(mean[f"model.{name}"], value) for name, value in whole.items())


def test_a_run_that_kept_its_weights_in_bf16_and_one_in_fp32_have_a_mean(tmp_path):
    finer = {torch.bfloat16: [1.0, 1.5], torch.float32: [1.001, 1.5]}  # rounded to bf16 they are equal
    paths = [checkpoint(tmp_path / str(dtype), {"w": torch.tensor(value, dtype=dtype)}) for dtype, value in finer.items()]
    for number, order in enumerate((paths, paths[::-1])):
        average_checkpoints(order, tmp_path / str(number))
        mean = weights(tmp_path / str(number))["model.w"]
        assert mean.dtype == torch.float32 and mean.tolist() == pytest.approx([1.0005, 1.5], rel=1e-7)


def test_numbers_of_64_bits_have_a_mean_of_64_bits(tmp_path):
    values = ([1e300, 1.0], [3e300, 1.0 + 1e-12])
    paths = [checkpoint(tmp_path / str(n), {"w": torch.tensor(value, dtype=torch.float64)}) for n, value in enumerate(values)]
    average_checkpoints(paths, tmp_path / "mean")
    assert weights(tmp_path / "mean")["model.w"].tolist() == pytest.approx([2e300, 1.0 + 5e-13], rel=1e-15)


# ---- what can be done with it -----------------------------------------------------------------------------------------


def test_a_mean_is_verified_starts_runs_and_leaves_for_transformers_but_is_not_resumed(run, config_file, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    mean = tmp_path / "mean"
    assert averaging(run, "--last", 2, "--output", mean) == 0
    assert tool("verify_checkpoint").main([str(mean)]) == 0
    convert = ["to-hf", "--checkpoint", str(mean), "--output", str(tmp_path / "hf"), "--verify"]
    assert tool("convert_checkpoint").main(convert) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True, trust_remote_code=False).eval()
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, open_model(mean).network(ids), rtol=1e-4, atol=1e-5)
    arguments = ["--config", str(config_file), "run.name=from_mean", "run.steps=2"]
    assert run_py([*arguments, f"run.init_from={mean}"]) == 0
    assert str(mean) in capsys.readouterr().out
    assert run_py([*arguments, "run.name=resumed", f"run.resume={mean}"]) == 1
    assert "has weights only and cannot be resumed; use run.init_from" in capsys.readouterr().err


# ---- what is refused --------------------------------------------------------------------------------------------------


def test_numbers_of_checkpoints_and_shares_that_make_no_mean_are_refused(run, tmp_path, capsys):
    output, paths = ("--output", tmp_path / "mean"), files.complete_checkpoints(run / "checkpoints")
    assert "one checkpoint has no mean; name several" in refusal(capsys, run, *output)
    assert f"{run}: has 3 checkpoints, not the 4 of --last=4" in refusal(capsys, run, "--last", 4, *output)
    assert "--last=2 is for one run, and 2 paths are given" in refusal(capsys, run, run, "--last", 2, *output)
    assert f"{paths[2]} is named twice; give" in refusal(capsys, run, paths[2], *output)
    copy = shutil.copytree(paths[0], tmp_path / "copy")
    assert f"{paths[0]} is named twice, also as {copy}; give it a larger share" in refusal(capsys, paths[0], copy, *output)
    assert "a share of 1e-320 is nothing beside 1e+308" in refusal(capsys, *paths[:2], *output, "--shares", "1e-320", "1e308")
    assert "3 shares for 2 checkpoints" in refusal(capsys, *paths[:2], *output, "--shares", 1, 1, 1)
    for share in ("0", "-1", "nan", "inf"):
        assert f"a share of {float(share)}: " in refusal(capsys, *paths[:2], *output, "--shares", 1, share)
    assert "does not exist" in refusal(capsys, run, tmp_path / "nothing", *output)
    with pytest.raises(SystemExit):
        averaging(run, "--last", 1, *output)
    assert not list(tmp_path.glob("*mean*"))


def test_nothing_is_left_where_a_file_is_damaged_or_the_output_exists(run, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    assert f"{taken}: already exists" in refusal(capsys, run, "--last", 2, "--output", taken)
    own = run / "checkpoints" / "step-00000099"
    assert f"{own}: a run would take it for a checkpoint of its own" in refusal(capsys, run, "--last", 2, "--output", own)
    assert f"{taken / 'file'}: File exists" in refusal(capsys, run, "--last", 2, "--output", taken / "file" / "mean")
    copy = shutil.copytree(run, tmp_path / "copy")
    payload = files.complete_checkpoints(copy / "checkpoints")[1] / "__0_0.distcp"
    content = bytearray(payload.read_bytes())
    content[len(content) // 2] ^= 1
    payload.write_bytes(content)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert f"{payload}: its content does not match" in refusal(capsys, copy, "--last", 3, "--output", tmp_path / "mean")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_other_models_tokenizers_and_numbers_are_refused_by_name(tmp_path, capsys):
    tensors = {"w": torch.ones(2, 3), "count": torch.tensor([7])}
    one = checkpoint(tmp_path / "one", tensors)
    other_model = dataclasses.replace(MODEL, rope=dataclasses.replace(MODEL.rope, theta=5.0))
    cases = {
        "model.rope.theta is 10000.0 here and 5.0 there": checkpoint(tmp_path / "theta", tensors, other_model),
        "model.extra is not there with the same shape": checkpoint(tmp_path / "extra", tensors | {"extra": torch.ones(1)}),
        "model.w is not there with the same shape": checkpoint(tmp_path / "shape", tensors | {"w": torch.ones(3, 2)}),
        f"{tmp_path / 'one'}: model.count is torch.int64, and not the same in all checkpoints": checkpoint(tmp_path / "count", tensors | {"count": torch.tensor([8])}),
        "model.count has no mean: it is torch.int64": checkpoint(tmp_path / "kind", tensors | {"count": torch.tensor([7.0])}),
        "model.w has no mean: it is torch.complex64": checkpoint(tmp_path / "complex", tensors | {"w": torch.ones(2, 3, dtype=torch.complex64)}),
        f"{tmp_path / 'inf'}: model.w holds numbers that are not finite": checkpoint(tmp_path / "inf", tensors | {"w": torch.full((2, 3), torch.inf)}),
        f"{tmp_path / 'nan'}: model.w holds numbers that are not finite": checkpoint(tmp_path / "nan", tensors | {"w": torch.full((2, 3), torch.nan)}),
    }
    for words, other in cases.items():
        assert words in refusal(capsys, one, other, "--output", tmp_path / "mean")
    assert refusal(capsys, one, tmp_path / "nan", "--output", tmp_path / "mean").startswith(f"error: {tmp_path / 'nan'}: model.w")
    assert not (tmp_path / "mean").exists()


def test_other_tokenizers_are_refused_but_not_other_notes_on_one(tmp_path, capsys):
    kinds = {
        "one": {"tokenizer.json": "1", "tokenizer_config.json": "{}"},
        "noted": {"tokenizer.json": "1", "tokenizer_config.json": '{"bos_token": "x"}'},
        "other": {"tokenizer.json": "2"},
        "pieces": {"tokenizer.model": "1"},
        "added": {"tokenizer.json": "1", "added_tokens.json": "[]"},
        "none": {},
    }
    for number, (name, texts) in enumerate(kinds.items()):
        folder = tmp_path / f"tokens of {name}"
        folder.mkdir()
        for file, text in texts.items():
            (folder / file).write_text(text)
        state = {"step": 1, "samples": 1, "tokens": 1, "world_size": 1, "layout": "single", "model": dataclasses.asdict(MODEL)}
        write_checkpoint(tmp_path / name, {"model.w": torch.full((1,), float(number))}, state, {"tokenizer": folder} if texts else {}, ALONE)
    for name, said in (
        ("other", "tokenizer/tokenizer.json is another file"),
        ("pieces", "tokenizer/tokenizer.json is in one of them only"),
        ("added", "tokenizer/added_tokens.json is in one of them only"),
        ("none", "tokenizer/tokenizer.json is in one of them only"),
    ):
        for order in (("one", name), (name, "one")):
            error = refusal(capsys, *(tmp_path / part for part in order), "--output", tmp_path / "mean")
            assert f"{said}; take checkpoints of one model and one tokenizer" in error
    assert averaging(tmp_path / "one", tmp_path / "noted", "--output", tmp_path / "mean") == 0
    assert (tmp_path / "mean" / "tokenizer" / "tokenizer_config.json").read_text() == '{"bos_token": "x"}'  # of the last one


def test_only_what_was_verified_is_copied(tmp_path):
    folder = tmp_path / "tokens"
    (folder / "merges").mkdir(parents=True)
    (folder / "merges" / "en.txt").write_text("a b")
    state = {"step": 1, "samples": 1, "tokens": 1, "world_size": 1, "layout": "single", "model": dataclasses.asdict(MODEL)}
    for n in range(2):
        write_checkpoint(tmp_path / str(n), {"model.w": torch.full((1,), float(n))}, state, {"tokenizer": folder, "note.txt": "text"}, ALONE)
    (tmp_path / "1" / "tokenizer" / "foreign.json").write_text("{}")
    average_checkpoints([tmp_path / "0", tmp_path / "1"], tmp_path / "mean")
    files.verify(tmp_path / "mean")
    found = {str(path.relative_to(tmp_path / "mean")) for path in (tmp_path / "mean").rglob("*") if path.is_file()}
    assert found - {"__0_0.distcp", ".metadata", "state.json", "manifest.json"} == {"tokenizer/merges/en.txt", "note.txt"}
