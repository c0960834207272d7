"""Draw docs/images/formats.png: the quickstart's model trained in each number format, in one process. Takes about 25 minutes on two cores.

It needs the data of `bash launch/quickstart.sh`. It prints a table: bytes per parameter (weight, gradient and moments), the loss on validation text,
the mean training loss of the last 50 steps, and the median time of a step.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["--config", "configs/quickstart.yaml", "parallel.strategy=single", "run.resume=never", "log.every_steps=1", "log.tensorboard=false",
           "checkpoint.export_check=false"]  # fmt: skip
BF16 = "precision.compute=bf16"
MASTER, MOMENTS, EIGHT = "precision.master=bf16", "precision.moments=bf16", "precision.moments=8bit"
FORMATS = {
    "fp32": (),
    "bf16, stored in fp32": (BF16,),
    "bf16, moments too": (BF16, MOMENTS),
    "bf16, weights too": (BF16, MASTER),
    "bf16, weights and moments too": (BF16, MASTER, MOMENTS),
    "bf16, weights and moments too, gradients in fp32": (BF16, MASTER, MOMENTS, "precision.gradients=fp32"),
    "bf16, moments in 8 bits": (BF16, EIGHT),
    "bf16, weights too, moments in 8 bits": (BF16, MASTER, EIGHT),
    "fp8 tensorwise": (BF16, "precision.fp8=tensorwise"),
    "fp8 rowwise": (BF16, "precision.fp8=rowwise"),
    "fp8 mxfp8": (BF16, "precision.fp8=mxfp8"),
}
WINDOW, LAST = 10, 50  # steps whose mean a point of a curve is, and the last number of the table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "formats.png", metavar="PNG")
    parser.add_argument("--steps", type=int, default=300, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(2) as two:
        done = dict(zip(FORMATS, two.map(lambda name: run(name, arguments.steps, arguments.seed), FORMATS)))
    bytes_of, records = ({name: result[part] for name, result in done.items()} for part in (0, 1))
    for name, lines in records.items():
        seconds = statistics.median(line["step_seconds"] for line in lines)
        loss = statistics.fmean(line["loss"] for line in lines[-LAST:])
        print(f"| {name} | {bytes_of[name]} | {lines[-1]['validation']['stdlib']:.3f} | {loss:.3f} | {seconds:.2f} |")
    draw({name: [line["loss"] for line in lines] for name, lines in records.items()}, arguments.output)
    print(arguments.output)
    return 0


def run(name: str, steps: int, seed: int) -> tuple[str, list[dict]]:
    """The bytes per parameter that a run says it takes, and its records."""
    folder = f"formats-{seed}-" + name.replace(", ", "-").replace(" ", "-")
    shutil.rmtree(ROOT / "runs" / folder, ignore_errors=True)
    command = [sys.executable, "pretrain/run.py", *OPTIONS, f"run.name={folder}", f"run.steps={steps}", f"run.seed={seed}", *FORMATS[name]]
    print(" ".join(command), flush=True)
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, cwd=ROOT, env=threads, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    return re.search(r"\((\d+) bytes per parameter", printed).group(1), [json.loads(line) for line in (ROOT / "runs" / folder / "metrics.jsonl").read_text().splitlines()]


def draw(losses: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2), layout="constrained")
    reference = smooth(losses["fp32"])
    steps = [WINDOW * (i + 1) for i in range(len(reference))]
    for number, (name, values) in enumerate(losses.items()):
        look = {"linewidth": 5, "color": "0.75"} if name == "fp32" else {"linewidth": 1.4, "color": f"C{number - 1}"}
        look["linestyle"] = "--" if "fp8" in name else "-"
        above.plot(steps, smooth(values), label=name, **look)
        below.plot(steps, [a - b for a, b in zip(smooth(values), reference)], **look)
    above.set(ylabel="training loss (nats per token)", title=f"One model in {len(losses)} number formats")
    below.set(xlabel="step", ylabel="less that of fp32")
    above.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=110)


def smooth(values: list[float]) -> list[float]:
    """Means of successive windows."""
    return [sum(values[i : i + WINDOW]) / WINDOW for i in range(0, len(values) - WINDOW + 1, WINDOW)]


if __name__ == "__main__":
    raise SystemExit(main())
