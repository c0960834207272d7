"""Random models, data and batches in random layouts, against one process with the same micro-batches.

Both go on from weights that were trained for two steps at a high rate. At initial weights all norms are 1, which every number format holds:
a layout that rounds them would not be seen (T-D1).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any, get_args, get_type_hints

import torch
import yaml
from campaign import REFUSED, Case
from random_models import PAIRED, model_section, random_family
from ranks import corpus, pool
from running import gradients, run_main

from pretrain.config.parallel_schema import Parallel
from pretrain.observe.metrics import read_metrics
from pretrain.parallel.pipeline_order import DEFERRING

NAME = "layout_parity"
ABOUT = "gradients of a step in any layout are those of one process"

GRADIENT_LIMIT, METRIC_LIMIT, UPDATED_LIMIT = 5e-6, 2e-6, 1e-3
NEGLIGIBLE = 1e-5  # a gradient below this share of the whole one's norm is held against that share
# That share where ranks share matrices or positions, which round elsewhere (docs/equivalence.md): once in forward and once in backward.
TWO_ROUNDINGS = 2 * 2**-24 / GRADIENT_LIMIT
# The gradients of one process with linear attention in fp32 are up to 5e-6 from those in fp64; ranks that share heads round elsewhere.
LINEAR_LIMIT = 3 * GRADIENT_LIMIT
SHARED_AXES = ("context", "tensor", "pipeline")
OPTIMIZERS = ("adamw", "adamw", "muon", "lion", "adafactor", "schedule_free_adamw")


def case(random: Random, folder: Path) -> Case:
    config, layout = configuration(random, folder)
    text = json.dumps({"world": layout["world"], **layout["overrides"], **without_places(config)})
    return Case(text, lambda: compare(config, layout, folder))


def without_places(config: dict[str, Any]) -> dict[str, Any]:
    return {name: section for name, section in config.items() if name not in ("run", "log", "checkpoint")}


def configuration(random: Random, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A random run, and the layout that it is compared in."""
    family = random_family(random)
    layout = layout_of(random, family, random.choice((2, 2, 2, 3, 4, 4, 8)))
    asked, ranks = layout["overrides"], layout["sizes"].get("pipeline", 1)
    schedule = asked.get("parallel.pipeline_schedule", "1f1b")
    stages = ranks if schedule in ("1f1b", "gpipe", "zero_bubble") else 2 * ranks
    model = model_section(random, family, layout["sizes"], stages, ring=asked.get("parallel.context_method") == "ring")
    share_experts(random, model, layout)
    micro, micro_steps = random.choice((1, 2, 3)), random.choice((1, 1, 2, 4))
    micro_steps = max(micro_steps, stages if schedule == "dualpipev" else ranks)
    sequences = layout["data_size"] * micro * micro_steps
    precision = {"compute": "fp32" if rounds_elsewhere(model, layout["sizes"]) else random.choice(("fp32", "bf16"))}
    if precision["compute"] == "bf16" and asked["parallel.strategy"] == "ddp" and random.random() < 0.5:
        asked["precision.keep_casts"] = random.random() < 0.5
    data = data_section(random, family)
    config = {
        "run": {"dir": str(folder / "runs"), "steps": 2, "seed": random.randrange(1000)},
        "model": model,
        "data": data,
        "batch": batch_section(random, sequences, micro, data["sequence_length"]),
        "loss": loss_section(random, model),
        "schedule": {"name": "constant", "warmup_steps": 0},
        "optim": {"name": random.choice(OPTIMIZERS), "lr": random.choice((1e-4, 1e-3, 1e-2)), "clip": random.choice((0, 0.1, 1))},
        "precision": precision,
        "parallel": {"timeout_seconds": 60},
        "checkpoint": {"export_check": False},
        "log": {"every_steps": 1, "tensorboard": False, "gradients_at": [1]},
    }
    if random.random() < 0.3:
        config["validation"] = {"every_steps": 1, "sequences": random.choice((3, 5, 8))}
        data["validation"] = [{"path": str(corpus(7)), "name": "held out"}]
    return config, layout


def data_section(random: Random, family: str) -> dict[str, Any]:
    data: dict[str, Any] = {
        "sequence_length": random.choice((8, 16, 24, 33)),
        "sources": [{"path": str(corpus(i)), "name": str(i)} for i in range(random.choice((1, 1, 2)))],
        "workers": random.choice((0, 1, 3)),
    }
    if len(data["sources"]) > 1 and random.random() < 0.3:
        data["sources"][-1]["loss_weight"] = 0.4
    if family in PAIRED:
        return data | {"objective": "span_corruption", "span_corruption": {"mean_span_length": 2.0, "sentinels": 12}}
    data["packing"] = random.choice(("concatenate", "concatenate", "best_fit", "padded"))
    if data["packing"] != "padded":
        data |= {"document_mask": random.random() < 0.5, "boundary_loss": random.random() < 0.7}
    return data


def batch_section(random: Random, sequences: int, micro: int, length: int) -> dict[str, Any]:
    """Step 1 may belong to a stage of shorter rows, as many tokens of them."""
    batch: dict[str, Any] = {"sequences": sequences, "micro_sequences": micro}
    if length % 2 == 0 and random.random() < 0.15:
        batch["lengths"] = [{"until_tokens": sequences * length, "length": length // 2}]
    return batch


def loss_section(random: Random, model: dict[str, Any]) -> dict[str, Any]:
    loss = {"z_loss": random.choice((0, 1e-3)), "label_smoothing": random.choice((0, 0.1))}
    if "predict_ahead" in model:
        loss["predict_ahead_weight"] = random.choice((0.3, 1.0))
    return loss


def layout_of(random: Random, family: str, world: int, sizes: dict[str, int] | None = None) -> dict[str, Any]:
    """The overrides of a random layout, the sizes of its axes above 1 (or those given), and how many ranks see different samples."""
    strategy = "fsdp" if sizes else random.choice(("ddp", "fsdp", "fsdp", "fsdp"))
    if sizes is None:
        sizes = shared_axes(random, world) if strategy == "fsdp" else {}
    data_size = world // math.prod(sizes.values())
    overrides: dict[str, Any] = {"parallel.strategy": strategy, "parallel.grad_sync": random.choice(("auto", "last", "every"))}
    if strategy == "fsdp":
        overrides |= fsdp_options(random, family, sizes, data_size)
    elif random.random() < 0.3:
        overrides |= {"parallel.ddp.bucket_mb": 0.01, "parallel.ddp.gradient_as_bucket_view": random.random() < 0.5}
    if random.random() < 0.4:
        overrides["parallel.activation_checkpointing"] = random.choice(("full", "selective"))
        overrides["parallel.checkpoint_every_block"] = random.choice((1, 1, 2))
    if random.random() < 0.2:
        overrides["parallel.activation_offload"] = True
    return {"world": world, "overrides": overrides, "sizes": sizes, "data_size": data_size}


def fsdp_options(random: Random, family: str, sizes: dict[str, int], data_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {f"parallel.{axis}": size for axis, size in sizes.items()}
    options["parallel.reshard_after_forward"] = random.choice(("always", "always", "never", "last_block_kept"))
    options["parallel.prefetch"] = random.choice((0, 0, 1, 2))
    if random.random() < 0.15:
        options["parallel.offload"] = True
    if "context" in sizes:
        options["parallel.context_method"] = "allgather" if family in PAIRED else random.choice(("allgather", "ring"))
    if "pipeline" in sizes:
        schedule = options["parallel.pipeline_schedule"] = random.choice(get_args(get_type_hints(Parallel)["pipeline_schedule"]))
        if schedule in DEFERRING:
            options["parallel.grad_sync"] = random.choice(("auto", "last"))
    if data_size == 1 or data_size % 2 == 0 and random.random() < 0.6:
        replicate = min(2, data_size)
        options |= {"parallel.replicate": replicate, "parallel.shard": data_size // replicate}
        if data_size // replicate == 4 and random.random() < 0.3:
            options["parallel.reshard_after_forward"] = 2
    return options


def share_experts(random: Random, model: dict[str, Any], layout: dict[str, Any]) -> None:
    """Give each of two ranks half of the experts, where the layout has such ranks."""
    overrides, sizes = layout["overrides"], layout["sizes"]
    parts = overrides.get("parallel.shard", layout["data_size"]) * sizes.get("context", 1)
    even = parts % 2 == 0 and model.get("experts", {}).get("count", 1) % 2 == 0
    if overrides["parallel.strategy"] == "fsdp" and even and random.random() < 0.7:
        overrides["parallel.expert"] = sizes["expert"] = 2


def rounds_elsewhere(model: dict[str, Any], sizes: dict[str, int]) -> bool:
    """Whether a layout rounds elsewhere by whole steps of bf16. tests/parallel compares such layouts in fp64.

    All layers of a t5 add to the gradient of one bias, and the trunk and the tokens further ahead to that of an embedded token: stages of a
    pipeline round each part for itself. The rows of several ranks enter one product with the weight of an expert.
    """
    shared_by_stages = model["family"] == "t5" or "predict_ahead" in model
    return bool({"context", "tensor", "expert"} & sizes.keys()) or (shared_by_stages and "pipeline" in sizes)


def shared_axes(random: Random, world: int) -> dict[str, int]:
    """Factors of the world for some of the axes whose ranks see the same samples."""
    sizes: dict[str, int] = {}
    for axis in random.sample(SHARED_AXES, 3):
        left = world // math.prod(sizes.values())
        factors = [n for n in range(2, left + 1) if left % n == 0]
        if factors and random.random() < 0.4:
            sizes[axis] = random.choice(factors)
    return sizes


def compare(config: dict[str, Any], layout: dict[str, Any], folder: Path) -> str | None:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    overrides = [f"{key}={str(value).lower()}" for key, value in layout["overrides"].items()]
    runs, single = {}, "parallel.strategy=single"
    trained = f"run.init_from={folder / 'runs' / 'trained'}"
    for name, world, extra in (
        ("trained", 1, [single, "optim.lr=3e-2"]),
        ("single", 1, [single, trained]),
        ("other", layout["world"], [*overrides, trained]),
    ):
        for code, printed in pool().launch(world, run_main, str(path), f"run.name={name}", *extra):
            if code == 2 and printed.splitlines()[-1].startswith("error: ") and "Traceback" not in printed:
                return REFUSED + printed.splitlines()[-1]
            if code != 0:
                return f"{name}: exit code {code}: {printed[-300:]}"
        runs[name] = folder / "runs" / name
    elsewhere = rounds_elsewhere(config["model"], layout["sizes"])
    limit = LINEAR_LIMIT if elsewhere and "linear_attention" in config["model"] else GRADIENT_LIMIT
    return different(runs["other"], runs["single"], TWO_ROUNDINGS if elsewhere else NEGLIGIBLE, limit)


def different(run: Path, reference: Path, negligible: float = NEGLIGIBLE, limit: float = GRADIENT_LIMIT) -> str | None:
    """The first thing that two runs computed differently. A gradient counts as no smaller than the share `negligible` of the whole one."""
    ours, theirs = read_metrics(run), read_metrics(reference)
    if [record["batch"] for record in ours] != [record["batch"] for record in theirs]:
        return "other samples"
    problem = different_gradient(gradients(run, 1), gradients(reference, 1), negligible, limit)
    if problem:
        return f"step 1: {problem}"
    loss = abs(ours[0]["loss"] - theirs[0]["loss"]) / abs(theirs[0]["loss"])
    if loss > METRIC_LIMIT:
        return f"loss of step 1 off by {loss:.1e}"
    if ours[0].get("experts") != theirs[0].get("experts"):
        return "other loads of experts"
    for field, ours_at, theirs_at in updated_losses(ours, theirs):
        if not abs(ours_at - theirs_at) <= UPDATED_LIMIT * abs(theirs_at):
            return f"{field} of the updated weights off by {abs(ours_at - theirs_at) / abs(theirs_at):.1e}"
    return None


def updated_losses(ours: list[dict], theirs: list[dict]) -> list[tuple[str, float, float]]:
    """Losses after the first update. Optimizers magnify what differs in tiny gradients, but these weigh little in a loss."""
    found = [("loss", ours[1]["loss"], theirs[1]["loss"])]
    for step in (0, 1):
        for name, loss in theirs[step].get("validation", {}).items():
            found.append((f"validation {name} after step {step + 1}", ours[step]["validation"][name], loss))
    return found


def different_gradient(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], negligible: float, limit: float) -> str | None:
    if ours.keys() != theirs.keys():
        return "other parameters"
    least = negligible * math.sqrt(sum(float(g.double().square().sum()) for g in theirs.values()))
    for name, gradient in theirs.items():
        off = float((ours[name].double() - gradient.double()).norm()) / max(float(gradient.double().norm()), least)
        if not off <= limit:
            return f"gradient of {name} off by {off:.1e}"
    return None
