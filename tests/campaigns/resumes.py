"""Random runs that begin in one layout and go on in another, with another number of ranks, against one process that was never interrupted.

Samples, records and the names and shapes of what a checkpoint holds are the same. Weights, moments and running means are compared by kind: a layout rounds
elsewhere, but what was lost, mixed up or sharded wrongly differs by about its own size.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from campaign import REFUSED, Case
from layout_parity import configuration, layout_of, without_places
from ranks import pool
from running import run_main, state_of

from pretrain.observe.metrics import read_metrics

NAME = "resumes"
ABOUT = "a run that goes on in another layout is the run that was never interrupted"

STEPS, STOP = 4, 2
MOST_RANKS = 8
LOSS_LIMIT = 5e-3
STATE_LIMIT = 0.05
NEGLIGIBLE = 1e-3  # of the norm of all weights, or all first moments: the sign of a gradient that is mere rounding moves a weight of 0 by the rate


def case(random: Random, folder: Path) -> Case:
    config, first = configuration(random, folder)
    second = other_layout(random, config, first)
    random_state(random, config, first)
    text = json.dumps({"first": [first["world"], first["overrides"]], "second": [second["world"], second["overrides"]], **without_places(config)})
    return Case(text, lambda: compare(config, first, second, folder))


def other_layout(random: Random, config: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """A layout with some of the first one's axes, which the model fits; the steps of both have as many samples."""
    sizes = {axis: size for axis, size in first["sizes"].items() if axis != "expert" and random.random() < 0.5}
    shared = math.prod(sizes.values())
    second = layout_of(random, config["model"]["family"], shared * random.choice([n for n in (1, 2, 2, 3) if n * shared <= MOST_RANKS]), sizes)
    overrides = second["overrides"]
    if second["world"] == 1:
        overrides = second["overrides"] = {"parallel.strategy": "single"}
    if "pipeline" in sizes:  # the schedule decides how many layers there have to be
        overrides["parallel.pipeline_schedule"] = first["overrides"]["parallel.pipeline_schedule"]
        overrides["parallel.grad_sync"] = "auto"
    if config["model"]["attention_dropout"] and "context" in sizes:
        overrides["parallel.context_method"] = "allgather"
    micro = overrides["batch.micro_sequences"] = random.choice((1, 1, 2))
    batch, old = config["batch"], config["batch"]["sequences"]
    batch["sequences"] = math.lcm(old, micro * second["data_size"] * 2 * sizes.get("pipeline", 1))
    for stage in batch.get("lengths", ()):
        stage["until_tokens"] *= batch["sequences"] // old
    return second


def random_state(random: Random, config: dict[str, Any], first: dict[str, Any]) -> None:
    """What an optimizer keeps beside the weights, and when it is saved."""
    optim = config["optim"]
    optim["lr"] = random.choice((1e-4, 1e-3))
    if optim["name"] != "schedule_free_adamw" and random.random() < 0.5:
        optim["ema_decay"] = 0.8
    if optim["name"] in ("adamw", "lion", "muon") and random.random() < 0.3:
        config["precision"]["moments"] = "bf16" if optim["name"] != "adamw" else random.choice(("bf16", "8bit"))
    if config["precision"]["compute"] == "bf16" and optim["name"] != "schedule_free_adamw" and random.random() < 0.3:
        config["precision"]["master"] = "bf16"
        first["overrides"].pop("precision.keep_casts", None)
    config["checkpoint"] |= {"every_steps": STOP, "asynchronous": random.random() < 0.3, "keep_last": 0}
    config["log"]["gradients_at"] = []
    config["model"]["dropout"] = random.choice((0, 0.1))


def compare(config: dict[str, Any], first: dict[str, Any], second: dict[str, Any], folder: Path) -> str | None:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    straight = {"world": 1, "overrides": {"parallel.strategy": "single"}}
    for name, layout, steps in (("straight", straight, STEPS), ("resumed", first, STOP), ("resumed", second, STEPS)):
        overrides = [f"{key}={str(value).lower()}" for key, value in layout["overrides"].items()]
        for code, printed in pool().launch(layout["world"], run_main, str(path), f"run.name={name}", f"run.steps={steps}", *overrides):
            if code == 2 and printed.splitlines()[-1].startswith("error: ") and "Traceback" not in printed:
                return f"{REFUSED}{name} to step {steps}: {printed.splitlines()[-1]}"
            if code != 0:
                return f"{name} to step {steps}: exit code {code}: {printed[-500:]}"
    return different(folder / "runs" / "resumed", folder / "runs" / "straight")


def different(run: Path, reference: Path) -> str | None:
    ours, theirs = read_metrics(run), read_metrics(reference)
    for field in ("step", "batch", "tokens", "samples", "lr"):
        if [record.get(field) for record in ours] != [record.get(field) for record in theirs]:
            return f"other values of {field}"
    for one, other in zip(ours, theirs, strict=True):
        off = abs(one["loss"] - other["loss"]) / abs(other["loss"])
        if not off <= LOSS_LIMIT:
            return f"loss of step {other['step']} off by {off:.1e}"
    return next(filter(None, (different_state(state_of(run, step), state_of(reference, step), step) for step in (STOP, STEPS))), None)


def different_state(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], step: int) -> str | None:
    shapes = ({name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} for state in (ours, theirs))
    if next(shapes) != next(shapes):
        return f"step {step}: other tensors: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    squares: dict[tuple[str, str], list[float]] = {}
    for name, tensor in theirs.items():
        state = "model" if name.startswith("model.") else ".".join(name.split(".")[:2])
        sums = squares.setdefault((state, name.split(".")[-1]), [0.0, 0.0])
        sums[0] += float((ours[name].double() - tensor.double()).square().sum())
        sums[1] += float(tensor.double().square().sum())
    for state in {state for state, _ in squares}:
        least = NEGLIGIBLE**2 * sum(whole for (other, _), (_, whole) in squares.items() if other == state)
        for (other, kind), (difference, whole) in squares.items():
            off = (difference / (max(whole, least) or 1.0)) ** 0.5
            if other == state and not off <= STATE_LIMIT:
                return f"step {step}: {state} of {kind} off by {off:.1e}"
    return None
