"""`accelerate launch` passes its own training settings through the environment. Here the YAML file is the only place for them.

So a setting that differs is an error that prints both values. accelerate writes `no`, `false` or size 1 when nobody chose anything: these
contradict nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args, get_type_hints

from pretrain.config.parallel_schema import Precision
from pretrain.config.schema import Config
from pretrain.errors import LaunchError

_TRUE = {"1", "true", "yes", "on"}

Problem = tuple[str, object, str] | None
"""The key that a setting contradicts, its value, and the remedy; None if there is no contradiction."""
Rule = Callable[[Config, str], Problem]


def _on(value: str) -> bool:
    return value.lower() in _TRUE


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _value(config: Config, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _precision(config: Config, value: str) -> Problem:
    if value.lower() in ("no", config.precision.compute):
        return None
    legal = value.lower() in get_args(get_type_hints(Precision)["compute"])
    ours = f"set precision.compute={value} or " if legal else ""
    return "precision.compute", config.precision.compute, f"{ours}launch with --mixed_precision no"


def _refuse(flag: str, key: str = "parallel.strategy", unset: str | None = None) -> Rule:
    """Refuse a setting without a counterpart here. `unset` are the values that accelerate writes if nobody chose one (by default: false)."""

    def rule(config: Config, value: str) -> Problem:
        chosen = _on(value) if unset is None else value.lower() != unset.lower()
        return (key, _value(config, key), f"launch without {flag}") if chosen else None

    return rule


def _use_fsdp(config: Config, value: str) -> Problem:
    # `auto` may choose ddp, so it is not enough.
    if not _on(value) or config.parallel.strategy == "fsdp":
        return None
    return "parallel.strategy", config.parallel.strategy, "set parallel.strategy=fsdp or launch without --use_fsdp"


def _fsdp_version(config: Config, value: str) -> Problem:
    return None if value == "2" else ("parallel.strategy", "fsdp (FSDP2)", "launch with --fsdp_version 2")


def _flag(key: str, default: bool = False, off: object = False, on: object = True) -> Rule:
    """A setting that accelerate writes as `default` when nobody chose it. `off` and `on`: what it is called here."""

    def rule(config: Config, value: str) -> Problem:
        ours = _value(config, key)
        if _on(value) in (default, ours != off):
            return None
        return (
            key,
            ours,
            f"set {key}={_text(on if ours == off else off)} or leave the setting out of accelerate's configuration",
        )

    return rule


def _use_cpu(config: Config, value: str) -> Problem:
    import torch

    on_gpu = config.run.device == "cuda" or (config.run.device == "auto" and torch.cuda.is_available())
    return ("run.device", config.run.device, "set run.device=cpu or launch without --cpu") if _on(value) and on_gpu else None


def _dynamo(config: Config, value: str) -> Problem:
    ours, inductor = config.parallel.compile, value.lower() == "inductor"
    if value.lower() == "no" or (inductor and ours != "none"):
        return None
    set_ours = "set parallel.compile=blocks or " if inductor else ""
    return "parallel.compile", ours if ours == "none" else f"{ours} (inductor)", f"{set_ours}launch with --dynamo_backend no"


def _accumulation(config: Config, value: str) -> Problem:
    if value == "1":
        return None
    sizes = f"{config.batch.sequences}/{config.batch.micro_sequences}"
    return "batch.sequences/batch.micro_sequences", sizes, "accumulation is derived from the batch section; leave it at 1"


def _size(axis: str) -> Rule:
    def rule(config: Config, value: str) -> Problem:
        ours = getattr(config.parallel, axis)
        if value in ("1", str(ours)):
            return None
        return f"parallel.{axis}", ours, f"set parallel.{axis}={value} or leave it out of accelerate's configuration"

    return rule


# The order matters: a setting is checked after the one that gives it its meaning.
_RULES: dict[str, Rule] = {
    "ACCELERATE_MIXED_PRECISION": _precision,
    "ACCELERATE_USE_CPU": _use_cpu,
    "ACCELERATE_USE_DEEPSPEED": _refuse("--use_deepspeed"),
    "ACCELERATE_USE_MEGATRON_LM": _refuse("--use_megatron_lm"),
    "ACCELERATE_USE_FSDP": _use_fsdp,
    "FSDP_VERSION": _fsdp_version,
    "FSDP_SHARDING_STRATEGY": _refuse("--fsdp_sharding_strategy", "parallel.strategy", unset="FULL_SHARD"),
    "FSDP_RESHARD_AFTER_FORWARD": _flag("parallel.reshard_after_forward", default=True, off="never", on="always"),
    "FSDP_OFFLOAD_PARAMS": _flag("parallel.offload"),
    "FSDP_ACTIVATION_CHECKPOINTING": _flag("parallel.activation_checkpointing", off="none", on="full"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": _flag("parallel.activation_offload"),
    "ACCELERATE_DYNAMO_BACKEND": _dynamo,
    "ACCELERATE_DYNAMO_MODE": _refuse("--dynamo_mode", "parallel.compile", unset="default"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": _refuse("--dynamo_use_fullgraph", "parallel.compile"),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": _refuse("--dynamo_use_dynamic", "parallel.compile"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": _accumulation,
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": _size("replicate"),
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": _size("shard"),
    "PARALLELISM_CONFIG_TP_SIZE": _size("tensor"),
    "PARALLELISM_CONFIG_CP_SIZE": _size("context"),
    "PARALLELISM_CONFIG_SP_SIZE": _size("context"),
}


def refuse_contradictions(config: Config, environ: Mapping[str, str]) -> None:
    """Raise LaunchError for the first of accelerate's settings that contradicts the configuration."""
    for name, rule in _RULES.items():
        value = environ.get(name, "").strip()
        problem = rule(config, value) if value else None
        if problem:
            key, ours, remedy = problem
            raise LaunchError(f"accelerate's {name}={value} contradicts {key}={_text(ours)} of the configuration; {remedy}")
