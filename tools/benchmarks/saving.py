"""How long a save holds training up, and how fast checkpoints are written, read and verified, beside plain files."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.measure import Options, Row, Turns, in_turns, require, require_device
from benchmarks.models import resolved_model
from safetensors.torch import load_file, save_file

from pretrain.checkpoint import files
from pretrain.checkpoint.host_copies import HostCopies
from pretrain.checkpoint.payload import Payload, first_nonfinite, model_tensors, optimizer_tensors
from pretrain.checkpoint.retention import retire
from pretrain.checkpoint.save import Saving, write_checkpoint
from pretrain.config.load import load_config
from pretrain.distributed.ranks import Ranks
from pretrain.models import network_without_values
from pretrain.optim.optimizer import OptimizerSet
from pretrain.parallel.initialise import initialise
from pretrain.storage import flush


def run_state(model: Path, device: str, options: Options) -> dict[str, torch.Tensor]:
    """Weights and AdamW's state of a model configuration, on this device. A scale below 1 takes layers and vocabulary away."""
    whole = resolved_model(model).model
    smaller = [f"model.layers={options.scaled(whole.layers)}", f"model.vocab_size={options.scaled(whole.vocab_size, 64)}"]
    config = resolved_model(model, smaller if options.scale < 1 else [])
    network = network_without_values(config).to_empty(device=device)
    initialise(network, 0)
    return model_tensors(network) | optimizer_tensors(OptimizerSet(network, config.optim))


def saving(model: Path, device: str, parts: Sequence[str], options: Options) -> list[Row]:
    """Rows of `stall`, how long a save in the background holds training up, and of `files`, which are written, read and verified."""
    require_device(device)
    own = torch.device(device, 0) if device == "cuda" else torch.device(device)
    tensors, ranks = run_state(model, device, options), Ranks(0, 0, 1, own)
    stalls = _stalls_beside(options.work / "beside", tensors, ranks, options.turns) if "stall" in parts else None
    plain, rows = _files(model, tensors, ranks, options) if "files" in parts else (None, [])
    if stalls is not None:
        rows.append(_row("stall of a save in the background", stalls, plain, None, "checkpoint.asynchronous: a copy in memory"))
    rows.append(Row("checkpoint", "bytes of tensors", _bytes(tensors) / 1e6, "MB", better="lower", note=f"{len(tensors)} tensors"))
    return rows


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _files(model: Path, tensors: dict[str, torch.Tensor], ranks: Ranks, options: Options) -> tuple[Turns, list[Row]]:
    """The turns of torch.save, and rows. Every file is on the disk before its clock stops. What is read comes from the page cache."""
    size = _bytes(tensors)
    policy, numbers = load_config(model, ["checkpoint.keep_last=1"])[0].checkpoint, itertools.count(1)
    folder, plain, flat = options.work / "checkpoints", options.work / "plain.pt", options.work / "flat.safetensors"
    newest: list[Path] = []

    def save() -> None:
        require(first_nonfinite(tensors) is None, "a value is not finite")
        newest[:] = [folder / files.step_name(next(numbers))]
        write_checkpoint(newest[0], tensors, {}, {}, ranks)
        retire(newest[0], policy).join()

    def save_plainly() -> None:
        torch.save(tensors, plain)
        flush(plain)

    def save_flat() -> None:
        save_file(tensors, flat)
        flush(flat)

    ways = {"ours": save, "torch.save": save_plainly, "safetensors": save_flat}
    saves = in_turns(ways, options, time.perf_counter)
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    kept: dict[str, dict[str, torch.Tensor]] = {}
    ways = {
        "ours": lambda: Payload(newest[0]).load(read, ranks),
        "torch.save": lambda: kept.update({"torch.load": torch.load(plain, map_location="cpu", weights_only=True)}),
        "safetensors": lambda: kept.update({"safetensors": _copied(flat)}),
        "verification": lambda: files.verify(newest[0]),
    }
    loads = in_turns(ways, options, time.perf_counter)
    for what, loaded in {"ours": read, **kept}.items():
        require(
            all(torch.equal(tensors[name], loaded[name].to(ranks.device)) for name in tensors),
            f"{what} reads other values than were saved",
        )
    rows = [
        _row("stall of a save", saves["ours"], saves["torch.save"], None, "training waits for all of it; baseline: torch.save"),
    ]
    for name in ("ours", "torch.save", "safetensors"):
        rows.append(_row(f"write: {name}", saves[name], saves["torch.save"], size))
    for name in ("ours", "torch.save", "safetensors"):
        rows.append(_row(f"load: {name}", loads[name], loads["torch.save"], size))
    rows.append(_row("verification: sha256 of every file", loads["verification"], None, size))
    payload = sum(path.stat().st_size for path in newest[0].rglob("*") if path.is_file())
    rows.append(
        Row("checkpoint", "bytes on the disk: ours", payload / 1e6, "MB", better="lower", baseline=plain.stat().st_size / 1e6)
    )
    shutil.rmtree(folder)
    return saves["torch.save"], rows


def _stalls_beside(target: Path, tensors: dict[str, torch.Tensor], ranks: Ranks, turns: int) -> Turns:
    """How long training stands still for saves that are written beside it. The first one makes the buffers, and is not measured."""
    copies, seconds = HostCopies(), []
    for _ in range(turns + 1):
        start = time.perf_counter()
        require(first_nonfinite(tensors) is None, "a value is not finite")
        beside = Saving(target, tensors, {}, {}, ranks)
        beside.begin()
        beside.hold(copies)
        beside.write_beside()
        seconds.append(time.perf_counter() - start)
        beside.finish()
        shutil.rmtree(target)
    return Turns(tuple(seconds[1:]))


def _copied(path: Path) -> dict[str, torch.Tensor]:
    """The library maps a file; copies read it, as loading into a model does."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _row(name: str, turns: Turns, beside: Turns | None, size: int | None, note: str = "") -> Row:
    if size is None:
        return Row("checkpoint", name, turns.best, "s", "wall", turns.median, better="lower", baseline=beside and beside.best, note=note)
    best, median = turns.rate(size / 1e6)
    return Row("checkpoint", name, best, "MB/s", "wall", median, baseline=beside and beside.rate(size / 1e6)[0], note=note)
