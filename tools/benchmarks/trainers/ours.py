"""pretrain on the task."""

import contextlib
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[3])]

from benchmarks.trainers.clock import Clock, Task  # noqa: E402

from pretrain.run import main  # noqa: E402
from pretrain.train.garbage import first_import  # noqa: E402

end = contextlib.ExitStack()
with first_import(until=end):  # as pretrain/run.py does
    from pretrain.train.callbacks import Callback

task = Task.given()
clock = Clock(task.result)


class Stamp(Callback):
    """Stamps the clock on every rank. The run takes a step more than the task, because it saves at its end, which other programs do not."""

    def evaluate(self, run, step):
        if step <= task.steps:
            clock.stamp()
        return {}


config, name = Path(f"{task.result}.yaml"), Path(task.result).name
config.write_text("{}\n")
code = main(
    [
        "--config",
        str(config),
        f"run={{dir: {task.work}/runs, name: {name}, steps: {task.steps + 1}, resume: never, device: cpu}}",
        f"data={{sources: [{{path: {task.work}/tokens}}], sequence_length: {task.length}}}",
        f"model={{family: gpt2, dim: {task.dim}, layers: {task.layers}, heads: {task.heads}, vocab_size: {task.vocabulary}}}",
        f"batch={{sequences: {task.micro * task.accumulation * task.ranks}, micro_sequences: {task.micro}}}",
        f"precision.compute={task.format}",
        f"parallel.compile={'blocks' if task.compiled else 'none'}",
        *(["parallel.strategy=ddp"] if task.ranks > 1 else []),
        "schedule={name: cosine, warmup_steps: 2}",
        "log={every_steps: 1, tensorboard: false}",
        "checkpoint={every_steps: 0, export_check: false}",
    ],
    callbacks=[Stamp()],
)
if code == 0:
    lines = (Path(task.work) / "runs" / name / "metrics.jsonl").read_text().splitlines()
    clock.write(json.loads(lines[task.steps - 1])["loss"])
raise SystemExit(code)
