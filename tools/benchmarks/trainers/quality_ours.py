"""pretrain on the record's text."""

import contextlib
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[3])]

from benchmarks.trainers.clock import Clock  # noqa: E402
from benchmarks.trainers.quality_task import QualityTask  # noqa: E402

from pretrain.run import main  # noqa: E402
from pretrain.train.garbage import first_import  # noqa: E402

end = contextlib.ExitStack()
with first_import(until=end):  # as pretrain/run.py does
    from pretrain.observe.sinks import Sink

task = QualityTask.given()
clock = Clock(task.result)


class Stamp(Sink):
    """Stamps the clock when a step's figures are there, the last one's after validation. A callback would make each step wait for the GPU."""

    def write(self, record):
        if record.step in task.marks:
            clock.stamp()


config, name = Path(f"{task.result}.yaml"), Path(task.result).name
config.write_text("{}\n")
share = task.setting["warmup"]
code = main(
    [
        "--config",
        str(config),
        f"run={{dir: {task.work}/runs, name: {name}, steps: {task.steps}, seed: {task.seed}, resume: never, device: {task.device}}}",
        f"data={{sources: [{{path: {task.work}/data/train, name: text}}], validation: [{{path: {task.work}/data/validation, name: text}}]}}",
        f"log={{every_steps: {task.marks[0]}, tensorboard: false}}",
        "checkpoint={every_steps: 0, export_check: false}",
        "validation.sequences=0",  # all of them, as the other programs
        f"schedule.warmup_steps={max(1, round(share * task.steps))}",
        *(f"schedule.decay_steps={round(value * task.steps)}" for value in [task.setting.get("decay")] if value),
        *task.setting["overrides"],
    ],
    sinks=[Stamp()],
)
if code == 0:
    lines = (Path(task.work) / "runs" / name / "metrics.jsonl").read_text().splitlines()
    clock.write(json.loads(lines[-1])["validation"]["text"])
task.end(code)
