"""The mean of checkpoints: its values, what can be done with it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
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
    return Payload(checkpoint).whole("model.")


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


@given(st.lists(st.tuples(st.floats(1e-300, 1e300), st.integers(0, 99)), min_size=2, max_size=5), st.randoms())
@settings(max_examples=15, deadline=None)
def test_the_order_of_checkpoints_does_not_matter_and_equal_ones_are_their_mean(tmp_path_factory, parts, random):
    folder = tmp_path_factory.mktemp("mean")
    paths = [
        checkpoint(folder / str(n), {"mixed": torch.rand(3, 5, generator=torch.Generator().manual_seed(seed)), "same": torch.tensor([0.1, -torch.inf])})
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
    paths = [checkpoint(tmp_path / str(dtype), {"w": torch.tensor([1.0, 1.5], dtype=dtype)}) for dtype in (torch.bfloat16, torch.float32)]
    for number, order in enumerate((paths, paths[::-1])):
        average_checkpoints(order, tmp_path / str(number))
        mean = weights(tmp_path / str(number))["model.w"]
        assert mean.dtype == torch.float32 and mean.tolist() == [1.0, 1.5]


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
    assert f"{paths[2]} is named twice" in refusal(capsys, run, paths[2], *output)
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
        "it is torch.int64, and not the same in all": checkpoint(tmp_path / "count", tensors | {"count": torch.tensor([8])}),
        f"{tmp_path / 'nan'}: model.w holds numbers that are not finite": checkpoint(tmp_path / "nan", tensors | {"w": torch.full((2, 3), torch.nan)}),
    }
    for words, other in cases.items():
        assert words in refusal(capsys, one, other, "--output", tmp_path / "mean")
    assert refusal(capsys, one, tmp_path / "nan", "--output", tmp_path / "mean").startswith(f"error: {tmp_path / 'nan'}: model.w")
    for n in (1, 2):
        folder = tmp_path / f"tokens{n}"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(str(n))
        state = json.loads((one / "state.json").read_text())
        write_checkpoint(tmp_path / f"t{n}", {"model.w": torch.ones(n)[:1]}, state, {"tokenizer": folder}, ALONE)
    error = refusal(capsys, tmp_path / "t1", tmp_path / "t2", "--output", tmp_path / "mean")
    assert "tokenizer/tokenizer.json is another file; take checkpoints of one model and one tokenizer" in error
    assert not (tmp_path / "mean").exists()
