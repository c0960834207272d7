"""Where numbers go: metrics.jsonl, TensorBoard and the console, written by the main rank."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pretrain.errors import TrainingError

METRICS_FILE = "metrics.jsonl"


class Metrics:
    """Append-only: a run that went back to a checkpoint says so, and logs the repeated steps again.

    `step`: the step that the run continues from. Raises TrainingError, naming the file, when a line cannot be written.
    """

    def __init__(self, directory: Path, tensorboard: bool, step: int = 0) -> None:
        self.file = (directory / METRICS_FILE).open("a", encoding="utf-8")
        if _ends_in_torn_line(directory / METRICS_FILE):
            self.file.write("\n")  # what follows is a line of its own
        self.board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)
            if (configuration := directory / "config.yaml").is_file():
                lines = configuration.read_text(encoding="utf-8").splitlines()
                # After the step, or the purge would take it. Indented: TensorBoard shows texts as Markdown.
                self.board.add_text("config", "\n".join(f"    {line}" for line in lines), step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """One object with `step`; nested objects become `parent/child` in TensorBoard."""
        try:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        except OSError as error:
            raise TrainingError(f"{self.file.name}: cannot be written: {error.strerror}") from error
        if self.board:
            for name, value in _flat(record):
                if name != "step" and isinstance(value, (int, float)):
                    self.board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.file.close()
        if self.board:
            self.board.close()


def _ends_in_torn_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


def _flat(record: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items = []
    for name, value in record.items():
        items += _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else [(prefix + name, value)]
    return items


def read_metrics(run_directory: Path) -> list[dict[str, Any]]:
    """The records of a run in order of steps. A torn last line is passed over.

    A run that went back to a checkpoint logs an earlier step again: what it had logged from that step on is dropped.
    """
    records: list[dict[str, Any]] = []
    for line in (run_directory / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        while records and records[-1]["step"] >= record["step"]:
            records.pop()
        records.append(record)
    return records


def progress_line(record: dict[str, Any], steps: int, seconds_left: float) -> str:
    """A step for the console."""
    parts = [
        f"step {record['step']:>{len(str(steps))}}/{steps}",
        f"loss {record['loss']:.4f}",
        f"grad {record['grad_norm']:.3f}",
        f"lr {record['lr']:.2e}",
        f"{_short(record['tokens_per_second'])} tok/s",
    ]
    if record["mfu"] is not None:
        parts.append(f"mfu {record['mfu']:.1%}")
    parts += [f"validation {name} {loss:.4f}" for name, loss in record.get("validation", {}).items()]
    for name, scores in record.get("translation", {}).items():
        parts.append(
            f"translation {name} BLEU {scores['bleu']:.2f} chrF {scores['chrf']:.2f} CER {scores['cer']:.1f} WER {scores['wer']:.1f}"
        )
    return "  ".join([*parts, f"eta {duration(seconds_left)}"])


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """A time as a person says it."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


class Window:
    """Speed since the last report: steps, their seconds, the seconds spent waiting for data."""

    def __init__(self) -> None:
        self.steps, self.seconds, self.waited, self.tokens = 0, 0.0, 0.0, 0

    def add(self, seconds: float, waited: float, tokens: int) -> None:
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds
        self.waited, self.tokens = self.waited + waited, self.tokens + tokens

    def take(self) -> dict[str, float]:
        """Tokens per second over all ranks, seconds per step, share of the time spent waiting for data; starts anew."""
        speed = {
            "tokens_per_second": self.tokens / self.seconds,
            "seconds": self.seconds / self.steps,
            "data_wait": self.waited / self.seconds,
        }
        self.__init__()
        return speed
