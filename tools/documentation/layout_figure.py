"""Draw docs/images/layouts.png: one run that moves through many layouts, against one process that is never interrupted. Takes about 4 minutes."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["--config", "configs/equivalence.yaml", "batch.micro_sequences=4", "schedule.name=constant", "log.every_steps=1", "optim.lr=1e-3",
           "log.tensorboard=false"]  # fmt: skip
LEGS = {
    "DDP on 2": (2, "parallel.strategy=ddp"),
    "FSDP2 2 x tensor 2": (4, "parallel.strategy=fsdp", "parallel.tensor=2"),
    "HSDP 2 x 2": (4, "parallel.strategy=fsdp", "parallel.replicate=2", "parallel.shard=2"),
    "FSDP2 2 x context 2": (4, "parallel.strategy=fsdp", "parallel.context=2"),
    "tensor 2 x pipeline 2": (4, "parallel.strategy=fsdp", "parallel.tensor=2", "parallel.pipeline=2"),
    "one process": (1, "parallel.strategy=single"),
}
STEPS = 10  # of a layout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "layouts.png", metavar="PNG")
    arguments = parser.parse_args()
    for name in ("moved", "one_process"):
        shutil.rmtree(ROOT / "runs" / name, ignore_errors=True)
    run("one_process", len(LEGS) * STEPS, 1, "parallel.strategy=single")
    for leg, (processes, *layout) in enumerate(LEGS.values(), start=1):
        run("moved", leg * STEPS, processes, *layout)
    draw(*(losses(ROOT / "runs" / name) for name in ("one_process", "moved")), arguments.output)
    print(arguments.output)
    return 0


def run(name: str, steps: int, processes: int, *layout: str) -> None:
    launcher = [] if processes == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher, "pretrain/run.py", *OPTIONS, f"run.name={name}", f"run.steps={steps}", *layout]
    print(" ".join(command), flush=True)
    subprocess.run(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ}, check=True, stdout=subprocess.DEVNULL)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def draw(alone: list[float], moved: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 5.5), sharex=True, height_ratios=(3, 1), layout="constrained")
    steps = range(1, len(alone) + 1)
    above.plot(steps, alone, color="0.75", linewidth=6, label="one process, never interrupted")
    for leg, name in enumerate(LEGS):
        first = leg * STEPS
        above.plot(steps[first : first + STEPS], moved[first : first + STEPS], linewidth=2, label=name)
        for axes in (above, below):
            axes.axvline(first + 0.5, color="0.85", linewidth=0.8, zorder=0)
    below.semilogy(steps, [max(abs(a - b) / a, 1e-9) for a, b in zip(alone, moved)], ".", color="0.3")
    below.axhline(2e-6, color="tab:red", linewidth=0.8)
    below.text(1, 2.4e-6, "limit of the tests", color="tab:red", fontsize=8)
    below.set(xlabel="step", ylabel="relative difference", ylim=(5e-10, 2e-5))
    above.set(ylabel="training loss (nats per token)", title="One run in six layouts")
    above.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
