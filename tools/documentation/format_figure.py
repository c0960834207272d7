"""Draw docs/images/formats.png: the quickstart's model trained in each number format, in one process. Takes about 15 minutes on two cores.

It needs the data of `bash launch/quickstart.sh`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["--config", "configs/quickstart.yaml", "parallel.strategy=single", "run.resume=never", "log.every_steps=1", "log.tensorboard=false",
           "checkpoint.export_check=false"]  # fmt: skip
BF16 = "precision.compute=bf16"
FORMATS = {
    "fp32": (),
    "bf16, stored in fp32": (BF16,),
    "bf16, moments too": (BF16, "precision.moments=bf16"),
    "bf16, weights and moments too": (BF16, "precision.moments=bf16", "precision.master=bf16"),
    "fp8 tensorwise": (BF16, "precision.fp8=tensorwise"),
    "fp8 rowwise": (BF16, "precision.fp8=rowwise"),
}
WINDOW = 10  # steps whose mean a point of a curve is


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "formats.png", metavar="PNG")
    parser.add_argument("--steps", type=int, default=300, metavar="N")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(2) as two:
        records = dict(zip(FORMATS, two.map(lambda name: run(name, arguments.steps), FORMATS)))
    for name, lines in records.items():
        seconds = sorted(line["step_seconds"] for line in lines)[len(lines) // 2]
        print(f"| {name} | {lines[-1]['validation']['stdlib']:.4f} | {lines[-1]['loss']:.4f} | {seconds:.3f} s |")
    draw({name: [line["loss"] for line in lines] for name, lines in records.items()}, arguments.output)
    print(arguments.output)
    return 0


def run(name: str, steps: int) -> list[dict]:
    folder = "formats-" + name.replace(", ", "-").replace(" ", "-")
    shutil.rmtree(ROOT / "runs" / folder, ignore_errors=True)
    command = [sys.executable, "pretrain/run.py", *OPTIONS, f"run.name={folder}", f"run.steps={steps}", *FORMATS[name]]
    print(" ".join(command), flush=True)
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (ROOT / "runs" / folder / "metrics.jsonl").read_text().splitlines()]


def draw(losses: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 5.5), sharex=True, height_ratios=(2, 1), layout="constrained")
    reference = smooth(losses["fp32"])
    steps = [WINDOW * (i + 1) for i in range(len(reference))]
    for name, values in losses.items():
        width, color = (5, "0.75") if name == "fp32" else (1.5, None)
        above.plot(steps, smooth(values), linewidth=width, color=color, label=name)
        if name != "fp32":
            below.plot(steps, [a - b for a, b in zip(smooth(values), reference)], linewidth=1.5)
        else:
            below.plot(steps, [0] * len(steps), linewidth=width, color=color)
    above.set(ylabel="training loss (nats per token)", title="One model in six number formats")
    below.set(xlabel="step", ylabel="less that of fp32")
    above.legend(frameon=False)
    figure.savefig(path, dpi=110)


def smooth(values: list[float]) -> list[float]:
    """Means of successive windows."""
    return [sum(values[i : i + WINDOW]) / WINDOW for i in range(0, len(values) - WINDOW + 1, WINDOW)]


if __name__ == "__main__":
    raise SystemExit(main())
