"""What tests run on ranks: the entry point itself, and ways to look at what it left."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from pretrain.checkpoint.payload import Payload
from pretrain.config.model_schema import Model
from pretrain.equivalence.comparison import NEGLIGIBLE
from pretrain.models import build_network
from pretrain.observe.metrics import read_metrics
from pretrain.run import main


def run_main(config_file: str, *overrides: str) -> tuple[int, str]:
    """Exit code and printed lines of `pretrain/run.py --config CONFIG_FILE OVERRIDES`, in this process."""
    import pretrain.distributed.ranks
    import pretrain.errors

    pretrain.errors.OTHERS_WAIT_SECONDS = 0.0  # nobody ends the other ranks here
    pretrain.distributed.ranks.EXIT_PAUSE_SECONDS = 0.0  # nor does this process exit
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["--config", config_file, *overrides])
    return code, printed.getvalue()


def traced(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run that compiles. What it compiles is traced and differentiated by the compiler, and then run operator by operator."""
    from pretrain.models import loss_chunks
    from pretrain.models.compiling import compile_strictly

    def trace(function, **options):
        return compile_strictly(function, **{**options, "backend": "aot_eager"})

    torch._dynamo.reset()
    loss_chunks.compiled_once.cache_clear()
    try:
        with patch("pretrain.parallel.blocks.compile_strictly", trace), patch.object(loss_chunks, "compile_strictly", trace):
            return run_main(config_file, *overrides)
    finally:
        loss_chunks.compiled_once.cache_clear()  # a later run of this process compiles its loss by inductor


def on_meta(model: Model) -> nn.Module:
    """The network of a complete section, without values."""
    with torch.device("meta"):
        return build_network(model)


def train(pool, world_size: int, config_file: Path, *overrides: str) -> Path:
    """Run to the end on `world_size` ranks; the run directory."""
    for rank, (code, printed) in enumerate(pool.launch(world_size, run_main, str(config_file), *overrides)):
        assert code == 0, f"rank {rank}: {printed}"
    return run_directory(config_file, *overrides)


def run_directory(config_file: Path, *overrides: str) -> Path:
    """Where a run of `write_config`'s configuration is."""
    names = [o.removeprefix("run.name=") for o in overrides if o.startswith("run.name=")]
    return config_file.parent / "runs" / (names[-1] if names else "run")


def cut_after(run: Path, step: int) -> Path:
    """The run `parts` beside another one, of which it has the checkpoint of this step and nothing else."""
    name = f"step-{step:08d}"
    parts = run.parent / "parts"
    shutil.copytree(run / "checkpoints" / name, parts / "checkpoints" / name)
    return parts


def run_changed(changes: dict[int, dict[str, str | None]], config_file: str, *overrides: str) -> int:
    """A short run of a process of its own, in which some ranks differ: `changes` by RANK.

    They are environment variables, and besides: `--`: more overrides; `sleep`: seconds before the start; `cd`: a folder; `PATCH a.b.c`: what the
    function c of the module a.b returns.
    """
    for module, name, value in (
        ("pretrain.distributed.joining", "FIRST_WORD_SECONDS", 0.5),
        ("pretrain.distributed.joining", "TELL_SECONDS", 5.0),
    ):
        with contextlib.suppress(ImportError):  # on a commit before it
            setattr(importlib.import_module(module), name, value)
    own = dict(changes.get(int(os.environ["RANK"]), {}))
    time.sleep(float(own.pop("sleep", 0)))
    os.chdir(own.pop("cd", "."))
    more = own.pop("--", "").split()
    for name, value in own.items():
        if name.startswith("PATCH "):
            module, _, function = name.removeprefix("PATCH ").rpartition(".")
            setattr(importlib.import_module(module), function, lambda *arguments, value=value: value)
            continue
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    short = ("parallel.strategy=ddp", "run.steps=2", "schedule.warmup_steps=1", "batch.sequences=12", "batch.micro_sequences=2")
    return main(["--config", config_file, *short, *overrides, *more])


def some_slow(values: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Parameters of a test, of which those in `slow` are left to `bash tests/run.sh --slow`."""
    return [pytest.param(value, marks=pytest.mark.slow) if value in slow else value for value in values]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run)]


def largest_relative_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) / abs(b) for a, b in zip(one, other))


def state_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state that a run saved at a step."""
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    return Payload(checkpoint).read_all("model.") | Payload(checkpoint).read_all("optim.")


def gradients(run: Path, step: int = 1) -> dict[str, torch.Tensor]:
    return load_file(run / "gradients" / f"step-{step:08d}.safetensors")


def largest_gradient_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of a parameter's gradient, in 2-norm. One that is mere rounding is divided by what is negligible."""
    assert one.keys() == other.keys()
    least = NEGLIGIBLE * float(torch.stack([g.norm() for g in other.values()]).norm())
    return max(float((one[name] - g).norm()) / max(float(g.norm()), least) for name, g in other.items())


def write_prepared(path: Path, tokenizer: Path, seed: int, documents: int) -> Path:
    """A prepared directory of `documents` documents of 200 tokens, each closed by the end-of-document token."""
    from pretrain.data.shards.writer import ShardWriter
    from pretrain.data.tokenizers.tokenizer import load_tokenizer

    random = np.random.default_rng(seed)
    loaded = load_tokenizer(tokenizer)
    with ShardWriter.create(path, loaded, 25_000) as writer:
        for _ in range(documents):
            letters = np.minimum(random.geometric(0.2, 199), 26) + 96
            writer.add(np.append(letters, loaded.eod_id), np.array([200]))
    return path


def write_config(folder: Path, prepared: Path) -> Path:
    """config.yaml in a folder: 2 layers of 32, 16 samples of 32 tokens per step in micro-batches of 4, runs in `runs` beside it."""
    config = {
        "run": {"name": "run", "dir": str(folder / "runs"), "steps": 20, "seed": 7},
        "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64},
        "data": {"sequence_length": 32, "sources": [{"path": str(prepared)}]},
        "batch": {"sequences": 16, "micro_sequences": 4},
        "optim": {"lr": 3e-3},
        "schedule": {"warmup_steps": 5},
        "parallel": {"timeout_seconds": 60},
        "checkpoint": {
            "export_check": False
        },  # seconds of transformers' imports, and tests/huggingface/test_export_check.py is about it
        "log": {"every_steps": 1, "tensorboard": False},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@functools.cache
def tool(name: str) -> ModuleType:
    """The module of tools/NAME.py, whose `main` a test calls in this process."""
    path = Path(__file__).resolve().parents[1] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"tool_{name}", path)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def run_main_with(owner: object, name: str, replacement: object, config_file: str, *overrides: str) -> tuple[int, str]:
    """`run_main` while `owner.name` is `replacement`."""
    with patch.object(owner, name, replacement):
        return run_main(config_file, *overrides)
