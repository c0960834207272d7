"""Weak scaling: how fast layouts train when the batch grows with the number of ranks. One thread per rank; ranks beyond the cores share them."""

from __future__ import annotations

import sys

from benchmarks.corpora import byte_tokenizer, write_tokens
from benchmarks.measure import ROOT, Options, Row, require, run_program

from pretrain.observe.metrics import read_metrics

LAYOUTS = {
    "single": (1, ()),
    "DDP on 2": (2, ("strategy=ddp",)),
    "DDP on 4": (4, ("strategy=ddp",)),
    "FSDP2 on 2": (2, ("strategy=fsdp",)),
    "FSDP2 on 4": (4, ("strategy=fsdp",)),
    "HSDP 2x2": (4, ("strategy=fsdp", "replicate=2", "shard=2")),
    "tensor parallel on 2": (2, ("strategy=fsdp", "tensor=2")),
    "context parallel on 2": (2, ("strategy=fsdp", "context=2")),
    "pipeline on 2": (2, ("strategy=fsdp", "pipeline=2")),
    "pipeline on 2 by zero_bubble": (2, ("strategy=fsdp", "pipeline=2", "pipeline_schedule=zero_bubble")),
    "pipeline on 2 by zero_bubble_v": (2, ("strategy=fsdp", "pipeline=2", "pipeline_schedule=zero_bubble_v")),
}
_SEQUENCES, _MICRO_SEQUENCES = 8, 2
"""How many a rank has in a step, and in a micro-step."""


def weak_scaling(options: Options) -> list[Row]:
    """Tokens per second in steps of each layout, beside those of a single process, in turns."""
    data = options.work / "tokens"
    write_tokens(data, byte_tokenizer(options.work), options.scaled(1 << 20, 1 << 16), 1 << 20)
    found: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for turn in range(options.turns):
        for name in LAYOUTS:
            options.say(f"turn {turn + 1} of {options.turns}: {name}")
            found[name].append(_tokens_per_second(name, turn, options))
    single = max(found["single"])
    return [
        Row(
            "weak scaling", name, max(speeds), "tokens/s", "wall", sorted(speeds)[len(speeds) // 2], baseline=single,
            note=f"{max(speeds) / single:.2f} x single, on {LAYOUTS[name][0]} ranks and {options.cores} cores",
        )
        for name, speeds in found.items()
    ]  # fmt: skip


def _tokens_per_second(name: str, turn: int, options: Options) -> float:
    """Target tokens per second in the median step but the first two, which warm up."""
    ranks, layout = LAYOUTS[name]
    run = options.work / "runs" / f"{name.replace(' ', '-')}-{turn}"
    values = [
        f"run={{dir: {run.parent}, name: {run.name}, steps: {options.scaled(10, 4)}, resume: never, device: cpu}}",
        f"data={{sources: [{{path: {options.work / 'tokens'}}}], sequence_length: {options.scaled(256, 32)}}}",
        "model={dim: 256, layers: 4, heads: 4, kv_heads: 2, ffn_dim: 768}",
        f"batch={{sequences: {_SEQUENCES * ranks}, micro_sequences: {_MICRO_SEQUENCES}}}",
        "schedule.warmup_steps=2",
        "log={every_steps: 1, tensorboard: false}",
        "checkpoint={every_steps: 0, export_check: false}",
        *(f"parallel.{part}" for part in layout),
    ]
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    config = options.work / "scaling.yaml"
    config.write_text("{}\n")
    typed = [*start, str(ROOT / "pretrain" / "run.py"), "--config", str(config), *values]
    done = run_program(typed)
    require(done.returncode == 0, f"{name} fails: {' '.join(done.stderr.splitlines()[-1:])}")
    speeds = sorted(record["step_tokens_per_second"] for record in read_metrics(run)[2:])
    return speeds[len(speeds) // 2]
