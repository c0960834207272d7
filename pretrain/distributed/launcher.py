"""What a launcher may say about a run: its ranks, and nothing else.

`accelerate launch` passes its own training settings through the environment. The YAML file is the only place for them here, so
a setting that says something else is an error that prints both, and the ones that would act on transformers behind our back
are removed. accelerate's `no` / `false` / size 1 is what it writes when nobody chose anything: it contradicts nothing.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, MutableMapping

from pretrain.config.schema import Config
from pretrain.errors import LaunchError

_TRUE = {"1", "true", "yes", "on"}


def check_launcher(config: Config, environ: MutableMapping[str, str] = os.environ) -> None:
    """Raise LaunchError for the first accelerate setting that contradicts the configuration; drop loader-changing settings."""
    for name, value in sorted(environ.items()):
        rule = _RULES.get(name)
        problem = rule(config, value.strip()) if rule and value.strip() else None
        if problem:
            key, ours, remedy = problem
            raise LaunchError(f"accelerate's {name}={value} contradicts {key}={ours} of the configuration; {remedy}")
    # With both set, transformers leaves weights unloaded on every rank but the first.
    if environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING")
        environ.pop("ACCELERATE_USE_FSDP", None)


def command_for(processes: int) -> str:
    """The command that starts this run with so many processes on one host."""
    arguments = " ".join(shlex.quote(a) for a in sys.argv[1:])
    return f"torchrun --nproc-per-node {processes} {sys.argv[0]} {arguments}".rstrip()


Problem = tuple[str, object, str] | None


def _on(value: str) -> bool:
    return value.lower() in _TRUE


def _precision(config: Config, value: str) -> Problem:
    if value.lower() in ("no", config.precision.compute):
        return None
    return "precision.compute", config.precision.compute, f"set precision.compute={value} or launch with --mixed_precision no"


def _refuse(what: str) -> Callable[[Config, str], Problem]:
    def rule(config: Config, value: str) -> Problem:
        return ("parallel.strategy", config.parallel.strategy, f"launch without {what}") if _on(value) else None

    return rule


def _use_fsdp(config: Config, value: str) -> Problem:
    if not _on(value) or config.parallel.strategy in ("fsdp", "auto"):
        return None
    return "parallel.strategy", config.parallel.strategy, "set parallel.strategy=fsdp or launch without --use_fsdp"


def _fsdp_version(config: Config, value: str) -> Problem:
    return None if value == "2" else ("parallel.strategy", "fsdp (FSDP2)", "launch with --fsdp_version 2")


def _flag(key: str, get: Callable[[Config], bool], default: bool = False) -> Callable[[Config, str], Problem]:
    """A setting that accelerate writes as `default` when nobody chose it."""

    def rule(config: Config, value: str) -> Problem:
        ours = get(config)
        if _on(value) in (default, ours):
            return None
        return (
            key,
            str(ours).lower(),
            f"set {key}={str(not ours).lower()} or leave the setting out of accelerate's configuration",
        )

    return rule


def _use_cpu(config: Config, value: str) -> Problem:
    import torch

    on_gpu = config.run.device == "cuda" or (config.run.device == "auto" and torch.cuda.is_available())
    return ("run.device", config.run.device, "set run.device=cpu or launch without --cpu") if _on(value) and on_gpu else None


def _dynamo(config: Config, value: str) -> Problem:
    if value.lower() == "no" or config.parallel.compile:
        return None
    return "parallel.compile", "false", "set parallel.compile=true or launch with --dynamo_backend no"


def _accumulation(config: Config, value: str) -> Problem:
    if value == "1":
        return None
    sizes = f"{config.batch.sequences}/{config.batch.micro_sequences}"
    return "batch.sequences/batch.micro_sequences", sizes, "accumulation is derived from the batch section; leave it at 1"


def _size(axis: str) -> Callable[[Config, str], Problem]:
    def rule(config: Config, value: str) -> Problem:
        ours = getattr(config.parallel, axis)
        if value in ("1", str(ours)):
            return None
        return f"parallel.{axis}", ours, f"set parallel.{axis}={value} or leave it out of accelerate's configuration"

    return rule


_RULES: dict[str, Callable[[Config, str], Problem]] = {
    "ACCELERATE_MIXED_PRECISION": _precision,
    "ACCELERATE_USE_CPU": _use_cpu,
    "ACCELERATE_USE_DEEPSPEED": _refuse("--use_deepspeed"),
    "ACCELERATE_USE_MEGATRON_LM": _refuse("--use_megatron_lm"),
    "ACCELERATE_USE_FSDP": _use_fsdp,
    "FSDP_VERSION": _fsdp_version,
    "FSDP_RESHARD_AFTER_FORWARD": _flag(
        "parallel.reshard_after_forward", lambda c: c.parallel.reshard_after_forward, default=True
    ),
    "FSDP_OFFLOAD_PARAMS": _flag("parallel.offload", lambda c: c.parallel.offload),
    "FSDP_ACTIVATION_CHECKPOINTING": _flag("parallel.activation_checkpointing", lambda c: c.parallel.activation_checkpointing),
    "ACCELERATE_DYNAMO_BACKEND": _dynamo,
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": _accumulation,
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": _size("replicate"),
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": _size("shard"),
    "PARALLELISM_CONFIG_TP_SIZE": _size("tensor"),
    "PARALLELISM_CONFIG_CP_SIZE": _size("context"),
    "PARALLELISM_CONFIG_SP_SIZE": _size("context"),
}
