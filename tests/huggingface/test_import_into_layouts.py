"""What any layout saved is exported, and what was imported starts a run under any layout, every bit equal, each rank reading its part."""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from converting import SMALL, automatic, write
from launch_pool import LaunchPool
from running import run_main, run_main_with, tool, train

from pretrain.checkpoint import planners
from pretrain.checkpoint.payload import Payload
from pretrain.huggingface.export_model import export
from pretrain.huggingface.import_model import import_model
from pretrain.huggingface.open_model import read_hf

LAYOUTS = {
    "single": (1,),
    "ddp": (2, "parallel.strategy=ddp"),
    "fsdp": (2, "parallel.strategy=fsdp"),
    "fsdp 3": (3, "parallel.strategy=fsdp", "batch.sequences=12"),
    "hsdp": (4, "parallel.strategy=fsdp", "parallel.replicate=2", "parallel.shard=2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_any_layout_saved_is_exported(pool, config_file, tmp_path, layout):
    world, *options = LAYOUTS[layout]
    run = train(pool, world, config_file, "run.steps=2", "schedule.warmup_steps=0", *options)
    export(run, tmp_path / "out")
    weights = Payload(run / "checkpoints" / "step-00000002").read_all("model.")
    _, exported = read_hf(tmp_path / "out")
    assert {f"model.{name}" for name in exported} == weights.keys()
    assert all(torch.equal(weights[f"model.{name}"], tensor) for name, tensor in exported.items())
    theirs = automatic(tmp_path / "out").state_dict()
    assert torch.equal(theirs["model.layers.1.mlp.down_proj.weight"], weights["model.layers.1.mlp.down.weight"])


def keep_what_was_loaded(config_file: str, output: str, *overrides: str) -> tuple[int, str, int, int]:
    """A run that stops before its first step: exit code, lines, bytes that this rank read of payloads, and its peak memory.

    The main rank writes the weights that it would train from to `output`.
    """
    from pretrain.train import trainer

    read, load = [0], torch.load

    def counting(*arguments, **options):
        tensor = load(*arguments, **options)
        read[0] += tensor.nbytes
        return tensor

    def instead(self, *arguments) -> str:
        if output:
            parameters = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in self.model.named_parameters()}
            if self.ranks.is_main:
                torch.save({name: p.detach() for name, p in parameters.items()}, output)
        return "finished"

    with patch.object(torch, "load", counting):
        code, printed = run_main_with(trainer.Trainer, "fit", instead, config_file, *overrides)
    return code, printed, read[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(scope="module")
def imported(tmp_path_factory, byte_tokenizer) -> Path:
    """A bf16 model of Hugging Face's, imported in small pieces."""
    folder = tmp_path_factory.mktemp("imported")
    model = dataclasses.replace(SMALL, ffn_dim=64)
    export(write(folder / "checkpoint", byte_tokenizer, model), folder / "hf", "bf16")
    with patch.object(planners, "PIECE_BYTES", 512):
        import_model(folder / "hf", folder / "imported")
    return folder / "imported"


@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp", "hsdp"])
def test_an_imported_model_starts_a_run_under_any_layout_bit_equal(pool, config_file, imported, tmp_path, layout):
    world, *options = LAYOUTS[layout]
    start = [f"run.init_from={imported}", *options]
    results = pool.launch(world, keep_what_was_loaded, str(config_file), str(tmp_path / "loaded.pt"), *start)
    assert all(code == 0 for code, *_ in results), results[0][1]
    loaded, weights = torch.load(tmp_path / "loaded.pt"), Payload(imported).read_all("model.")
    assert {f"model.{name}" for name in loaded} == weights.keys()
    assert all(torch.equal(weights[f"model.{name}"], tensor) for name, tensor in loaded.items())
    whole, read = sum(tensor.nbytes for tensor in weights.values()), [size for *_, size, _ in results]
    shards = 2 if "sdp" in layout else 1
    assert not any(read[shards:])  # one replica reads for the others
    if shards == 2:
        assert whole <= sum(read) and max(read) < whole / 2 * 1.25
    else:
        assert read[0] == whole


def test_an_imported_model_is_intact_and_trains(pool, config_file, imported, capsys):
    assert tool("verify_checkpoint").main([str(imported)]) == 0
    assert capsys.readouterr().out.startswith(f"good     {imported}: ")
    run = train(
        pool, 2, config_file, f"run.init_from={imported}", "parallel.strategy=fsdp", "run.steps=2", "schedule.warmup_steps=0"
    )
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert "imported" in json.loads((imported / "state.json").read_text())


def test_a_hugging_face_directory_as_a_start_is_refused_with_the_command_that_converts_it(
    pool, config_file, imported, tmp_path
):
    directory = imported.parent / "hf"
    for key in ("run.init_from", "run.resume"):
        [(code, printed)] = pool.launch(1, run_main, str(config_file), f"{key}={directory}")
        assert code == 1
        assert f"python tools/convert_checkpoint.py from-hf --model {directory} --output DIR" in printed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_rank_holds_the_whole_model(config_file, byte_tokenizer, tmp_path):
    """python -m pytest tests/huggingface/test_import_into_layouts.py -m slow -s

    1.2 GB on two ranks, each of which stays below that with everything it holds, torch included.
    """
    shape = {"dim": 1024, "layers": 24, "heads": 16, "kv_heads": 16, "ffn_dim": 2816}
    export(write(tmp_path / "checkpoint", byte_tokenizer, dataclasses.replace(SMALL, **shape)), tmp_path / "hf", "bf16")
    imported = import_model(tmp_path / "hf", tmp_path / "imported")
    overrides = [f"model.{name}={value}" for name, value in shape.items()]
    fresh = LaunchPool()
    try:
        start = (f"run.init_from={tmp_path / 'imported'}", "parallel.strategy=fsdp", "parallel.timeout_seconds=600")
        results = fresh.launch(2, keep_what_was_loaded, str(config_file), "", *overrides, *start)
    finally:
        fresh.close()
    assert [code for code, *_ in results] == [0, 0], results[0][1]
    whole = 4 * imported.parameters
    print(f"model {whole / 1e6:.0f} MB; read {[r[2] // 10**6 for r in results]}, peak {[r[3] // 10**6 for r in results]} MB")
    assert whole > 1.1e9
    assert max(read for *_, read, _ in results) < 0.6 * whole
    assert max(peak for *_, peak in results) < whole
