"""Random models, data and batches in random layouts, against one process with the same micro-batches.

Both go on from weights that were trained for two steps at a high rate. At initial weights all norms are 1, which every number format holds:
a layout that rounds them would not be seen (T-D1).
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
from ranks import corpus, pool
from running import gradients, run_main

from pretrain.observe.metrics import read_metrics
from pretrain.parallel.pipeline_order import DEFERRING

NAME = "layout_parity"
ABOUT = "gradients of a step in any layout are those of one process"

GRADIENT_LIMIT, METRIC_LIMIT = 5e-6, 2e-6
NEGLIGIBLE = 1e-5  # a gradient below this share of the whole one's norm is held against that share
# That share where ranks share matrices or positions, which round elsewhere (docs/equivalence.md): once in forward and once in backward.
TWO_ROUNDINGS = 2 * 2**-24 / GRADIENT_LIMIT
SHARED_AXES = ("context", "tensor", "pipeline")
FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "olmo2", "olmo3", "phi3", "gpt2", "gpt_neox", "smollm3",
    "deepseek_v3", "gpt_oss", "glm4", "glm4_moe", "granite", "starcoder2", "olmoe", "minimax_m2", "ernie4_5", "ernie4_5_moe", "custom", "custom", "custom",
    "transformer", "t5",
)  # fmt: skip

CORRECTED = ("deepseek_v3", "glm4_moe", "ernie4_5_moe")
SPARSE = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe", "minimax_m2", *CORRECTED)


def case(random: Random, folder: Path) -> Case:
    config, layout = configuration(random, folder)
    text = json.dumps({"world": layout["world"], **layout["overrides"], **without_places(config)})
    return Case(text, lambda: compare(config, layout, folder))


def without_places(config: dict[str, Any]) -> dict[str, Any]:
    return {name: section for name, section in config.items() if name not in ("run", "log", "checkpoint")}


def configuration(random: Random, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A random run, and the layout that it is compared in."""
    family = random.choice(FAMILIES)
    layout = layout_of(random, random.choice((2, 2, 2, 3, 4, 4, 8)))
    model = model_section(random, family, layout["sizes"])
    share_experts(random, model, layout)
    micro, micro_steps = random.choice((1, 2, 3)), random.choice((1, 1, 2, 4))
    micro_steps = max(micro_steps, layout["sizes"].get("pipeline", 1))
    sequences = layout["data_size"] * micro * micro_steps
    data: dict[str, Any] = {
        "sequence_length": random.choice((8, 16, 24, 33)),
        "sources": [{"path": str(corpus(i)), "name": str(i)} for i in range(random.choice((1, 1, 2)))],
        "workers": random.choice((0, 1, 3)),
    }
    if family in ("transformer", "t5"):
        data |= {"objective": "span_corruption", "span_corruption": {"mean_span_length": 2.0, "sentinels": 12}}
    else:
        data |= {
            "packing": random.choice(("concatenate", "concatenate", "best_fit", "padded")),
            "document_mask": random.random() < 0.5,
            "boundary_loss": random.random() < 0.7,
        }
        if data["packing"] == "padded":
            del data["document_mask"], data["boundary_loss"]
    config = {
        "run": {"dir": str(folder / "runs"), "steps": 2, "seed": random.randrange(1000)},
        "model": model,
        "data": data,
        "batch": {"sequences": sequences, "micro_sequences": micro},
        "loss": {"z_loss": random.choice((0, 1e-3)), "label_smoothing": random.choice((0, 0.1))},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "optim": {"lr": random.choice((1e-4, 1e-3, 1e-2)), "clip": random.choice((0, 0.1, 1))},
        "precision": {"compute": "fp32" if rounds_elsewhere(model, layout["sizes"]) else random.choice(("fp32", "bf16"))},
        "parallel": {"timeout_seconds": 60},
        "checkpoint": {"export_check": False},
        "log": {"every_steps": 1, "tensorboard": False, "gradients_at": [1]},
    }
    return config, layout


def layout_of(random: Random, world: int) -> dict[str, Any]:
    """The overrides of a random layout, the sizes of its axes above 1, and how many ranks see different samples."""
    strategy = random.choice(("ddp", "fsdp", "fsdp", "fsdp"))
    sizes = shared_axes(random, world) if strategy == "fsdp" else {}
    data_size = world // math.prod(sizes.values())
    overrides: dict[str, Any] = {"parallel.strategy": strategy, "parallel.grad_sync": random.choice(("auto", "last", "every"))}
    if strategy == "fsdp":
        overrides["parallel.reshard_after_forward"] = random.choice(("always", "always", "never", "last_block_kept"))
        overrides["parallel.prefetch"] = random.choice((0, 0, 1, 2))
        overrides |= {f"parallel.{axis}": size for axis, size in sizes.items()}
        if "pipeline" in sizes:
            overrides["parallel.pipeline_schedule"] = random.choice(("1f1b", "gpipe", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipev"))
            if overrides["parallel.pipeline_schedule"] in DEFERRING:
                overrides["parallel.grad_sync"] = random.choice(("auto", "last"))
        if data_size == 1 or data_size % 2 == 0 and random.random() < 0.6:
            replicate = min(2, data_size)
            overrides |= {"parallel.replicate": replicate, "parallel.shard": data_size // replicate}
    elif random.random() < 0.3:
        overrides["parallel.ddp.bucket_mb"] = 0.01
    if random.random() < 0.4:
        overrides["parallel.activation_checkpointing"] = random.choice(("full", "selective"))
        overrides["parallel.checkpoint_every_block"] = random.choice((1, 1, 2))
    if random.random() < 0.2:
        overrides["parallel.activation_offload"] = True
    return {"world": world, "overrides": overrides, "sizes": sizes, "data_size": data_size}


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


def model_section(random: Random, family: str, sizes: dict[str, int]) -> dict[str, Any]:
    tensor, stages = sizes.get("tensor", 1), sizes.get("pipeline", 1)
    heads = tensor * random.choice((1, 2, 3, 4)[: 4 // min(tensor, 4)])
    layers = stages * random.choice((1, 2)) + random.choice((0, 1)) if stages > 1 else random.choice((1, 2, 3))
    model: dict[str, Any] = {"family": family, "dim": heads * random.choice((4, 8, 10)), "layers": layers, "heads": heads,
                             "ffn_dim": tensor * random.choice((5, 16, 33))}  # fmt: skip
    if random.random() < 0.4:
        model["tie_embeddings"] = random.random() < 0.5
    model["dropout"] = random.choice((0, 0.1))
    model["attention_dropout"] = random.choice((0, 0, 0.2))
    if family in ("transformer", "t5"):
        return model | {"encoder": {"layers": random.choice((1, 2)), "share_embedding": True}}
    if random.random() < 0.2:
        model["predict_ahead"] = random.choice((1, 2))
    if family in SPARSE or family == "custom" and random.random() < 0.3:
        model["experts"] = experts_section(random, family, tensor)
    if family == "deepseek_v3":
        model["latent"] = {"kv_rank": 6, "query_rank": random.choice((0, 5)), "rope_dim": 4, "plain_dim": 6, "value_dim": 5}
        return model
    if random.random() < 0.5:
        model["kv_heads"] = random.choice([n for n in range(1, heads + 1) if heads % n == 0])
    if family == "custom":
        model |= custom_switches(random)
    return model


def experts_section(random: Random, family: str, tensor: int) -> dict[str, Any]:
    count = random.choice((2, 3, 4, 6))
    section: dict[str, Any] = {"count": count, "active": random.randint(2 if family == "ernie4_5_moe" else 1, count), "ffn_dim": tensor * random.choice((4, 9))}
    if section["active"] == 1:
        section["normalise"] = False
    if family in ("custom", *CORRECTED):
        section |= {"correction": True, "correction_rate": 0.01} if random.random() < 0.5 else {}
    if not section.get("correction"):
        section["balance_loss"] = 0.02
    if random.random() < 0.3:
        section["router_z_loss"] = 0.01
    if family in ("deepseek_v3", "glm4_moe"):
        section |= {"groups": 1, "active_groups": 1}
    return section


def custom_switches(random: Random) -> dict[str, Any]:
    window = random.choice((0, 0, 3, 7))
    attention: dict[str, Any] = {
        "bias": random.sample(["query", "key", "value", "output"], random.randint(0, 4)),
        "soft_cap": random.choice((0, 0, 2.0)),
        "sinks": random.random() < 0.3,
        "window": window,
    }
    if window:
        attention["window_pattern"] = random.choice(([True], [True, False]))
    section: dict[str, Any] = {
        "norm": {
            "kind": random.choice(("rms", "rms_offset", "layer", "layer_plain")),
            "placement": random.choice(("pre", "post", "reordered", "sandwich")),
            "qk": random.choice(("none", "head", "full")),
        },
        "attention": attention,
        "positions": random.choice(("rope", "rope", "learned", "none")),
        "mlp": {
            "activation": random.choice(("silu", "gelu", "relu2")),
            "gated": random.random() < 0.6,
            "bias": random.random() < 0.3,
        },
        "logit_soft_cap": random.choice((0, 5.0)),
        "embedding_multiplier": random.choice((1.0, 4.0)),
        "residual_multiplier": random.choice((1.0, 0.5)),
        "parallel_residual": random.random() < 0.2,
    }
    return section if section["norm"]["placement"] != "post" else section | {"parallel_residual": False}


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
                return REFUSED
            if code != 0:
                return f"{name}: exit code {code}: {printed[-300:]}"
        runs[name] = folder / "runs" / name
    share = TWO_ROUNDINGS if rounds_elsewhere(config["model"], layout["sizes"]) else NEGLIGIBLE
    return different(runs["other"], runs["single"], share)


def different(run: Path, reference: Path, negligible: float = NEGLIGIBLE) -> str | None:
    """The first thing that two runs computed differently. A gradient counts as no smaller than the share `negligible` of the whole one."""
    ours, theirs = read_metrics(run), read_metrics(reference)
    if [record["batch"] for record in ours] != [record["batch"] for record in theirs]:
        return "other samples"
    problem = different_gradient(gradients(run, 1), gradients(reference, 1), negligible)
    if problem:
        return f"step 1: {problem}"
    loss = abs(ours[0]["loss"] - theirs[0]["loss"]) / abs(theirs[0]["loss"])
    if loss > METRIC_LIMIT:
        return f"loss of step 1 off by {loss:.1e}"
    if ours[0].get("experts") != theirs[0].get("experts"):
        return "other loads of experts"
    return None


def different_gradient(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], negligible: float) -> str | None:
    if ours.keys() != theirs.keys():
        return "other parameters"
    least = negligible * math.sqrt(sum(float(g.double().square().sum()) for g in theirs.values()))
    for name, gradient in theirs.items():
        off = float((ours[name].double() - gradient.double()).norm()) / max(float(gradient.double().norm()), least)
        if not off <= GRADIENT_LIMIT:
            return f"gradient of {name} off by {off:.1e}"
    return None
