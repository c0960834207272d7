"""`accelerate launch` passes its own training settings through the environment. Here the YAML file is the only place for them.

So a setting that differs is an error that prints both values. accelerate writes `no`, `false` or size 1 when nobody chose anything: these
contradict nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pretrain.config.schema import Config
from pretrain.errors import LaunchError

_TRUE = {"1", "true", "yes", "on"}


class _Setting(NamedTuple):
    """A setting of accelerate, in small letters. `unset`: its value when nobody chose one. `means`: for another value, those of our key that agree with
    it, the best one first; a value that is missing has no counterpart here. None: our key has the same number.
    """

    key: str
    unset: str
    means: dict[str, tuple[object, ...]] | None
    remedy: str = "leave the setting out of accelerate's configuration"


def _refused(flag: str, key: str = "parallel.strategy", unset: str = "false") -> _Setting:
    return _Setting(key, unset, {}, f"launch without {flag}")


# The order matters: a setting is checked after the one that gives it its meaning.
_SETTINGS = {
    "ACCELERATE_MIXED_PRECISION": _Setting(
        "precision.compute", "no", {"bf16": ("bf16",), "fp32": ("fp32",), "auto": ("auto",)}, "launch with --mixed_precision no"
    ),
    "ACCELERATE_USE_CPU": _Setting("run.device", "false", {"true": ("cpu",)}, "launch without --cpu"),
    "ACCELERATE_USE_DEEPSPEED": _refused("--use_deepspeed"),
    "ACCELERATE_USE_MEGATRON_LM": _refused("--use_megatron_lm"),
    # `auto` may choose ddp, so it is not enough.
    "ACCELERATE_USE_FSDP": _Setting("parallel.strategy", "false", {"true": ("fsdp",)}, "launch without --use_fsdp"),
    "FSDP_VERSION": _Setting("parallel.strategy", "2", {}, "it is FSDP2: launch with --fsdp_version 2"),
    "FSDP_SHARDING_STRATEGY": _refused("--fsdp_sharding_strategy", unset="full_shard"),
    "FSDP_RESHARD_AFTER_FORWARD": _Setting("parallel.reshard_after_forward", "true", {"false": ("never",)}),
    "FSDP_OFFLOAD_PARAMS": _Setting("parallel.offload", "false", {"true": (True,)}),
    "FSDP_ACTIVATION_CHECKPOINTING": _Setting("parallel.activation_checkpointing", "false", {"true": ("full", "selective")}),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": _Setting("parallel.activation_offload", "false", {"true": (True,)}),
    "ACCELERATE_DYNAMO_BACKEND": _Setting(
        "parallel.compile", "no", {"inductor": ("blocks", "model")}, "launch with --dynamo_backend no"
    ),
    "ACCELERATE_DYNAMO_MODE": _refused("--dynamo_mode", "parallel.compile", unset="default"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": _refused("--dynamo_use_fullgraph", "parallel.compile"),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": _refused("--dynamo_use_dynamic", "parallel.compile"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": _Setting(
        "batch.micro_sequences", "1", {}, "leave it at 1: accumulation is derived from the batch section"
    ),
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": _Setting("parallel.replicate", "1", None),
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": _Setting("parallel.shard", "1", None),
    "PARALLELISM_CONFIG_TP_SIZE": _Setting("parallel.tensor", "1", None),
    "PARALLELISM_CONFIG_CP_SIZE": _Setting("parallel.context", "1", None),
    "PARALLELISM_CONFIG_SP_SIZE": _Setting("parallel.context", "1", None),
}


def refuse_contradictions(config: Config, environ: Mapping[str, str]) -> None:
    """Raise LaunchError for the first of accelerate's settings that contradicts the configuration."""
    for name, (key, unset, means, remedy) in _SETTINGS.items():
        if not (written := environ.get(name, "").strip()):
            continue
        value = str(written.lower() in _TRUE).lower() if unset in ("true", "false") else written.lower()
        section, field = key.split(".")
        ours = getattr(getattr(config, section), field)
        agreed = means.get(value, ()) if means is not None else (int(value),) if value.removeprefix("-").isdecimal() else ()
        if value == unset or ours in agreed or (key == "run.device" and ours == "auto" and not _has_gpu()):
            continue
        change = f"set {key}={_text(agreed[0])} or " if agreed else ""
        raise LaunchError(
            f"accelerate's {name}={written} contradicts {key}={_text(ours)} of the configuration; {change}{remedy}"
        )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
