"""Where numbers go: metrics.jsonl, TensorBoard and the console, written by the main rank."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

from pretrain.observe.logs import Tolerated
from pretrain.storage import append_line, plain

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class Metrics:
    """Append-only: a run that went back to a checkpoint says so, and logs the repeated steps again.

    `step`: the step that the run continues from. A line that cannot be written is lost, with a warning: the run goes on.
    """

    def __init__(self, directory: Path, tensorboard: bool, step: int = 0) -> None:
        self.path, self.board_path, self.step = directory / METRICS_FILE, directory / "tensorboard", step
        self._lines, self._board_lines = Tolerated(str(self.path)), Tolerated(str(self.board_path))
        self._has_board, self._board = tensorboard, None
        self._thread_hook = threading.excepthook
        if tensorboard:
            self._board_lines.attempt(self._open_board)

    def write(self, record: dict[str, Any]) -> None:
        """One object with `step`; nested objects become `parent/child` in TensorBoard."""
        written = self._lines.attempt(lambda: append_line(self.path, json.dumps(plain(record), allow_nan=False)))
        if self._board is not None or (self._has_board and written):
            self._board_lines.attempt(lambda: self._add_scalars(record))
        elif self._has_board:
            self._board_lines.lost += 1  # each try would leave an empty file, and there is still no room

    def close(self) -> None:
        self._lines.close()
        if self._board is not None:
            self._board_lines.attempt(self._board.close)
        self._board_lines.close()
        threading.excepthook = self._thread_hook

    def _open_board(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = self._on_thread_failure
        self._board = SummaryWriter(str(self.board_path), purge_step=self.step + 1)
        if (configuration := self.path.with_name("config.yaml")).is_file():
            lines = configuration.read_text(encoding="utf-8").splitlines()
            # After the step, or the purge would take it. Indented: TensorBoard shows texts as Markdown.
            self._board.add_text("config", "\n".join(f"    {line}" for line in lines), self.step + 1)

    def _on_thread_failure(self, failure: threading.ExceptHookArgs) -> None:
        # TensorBoard writes in a thread of its own. What it meets is raised again at the next line, and said in one line there.
        of_board = failure.thread is not None and type(failure.thread).__module__.startswith("tensorboard")
        if not (of_board and issubclass(failure.exc_type, OSError)):
            self._thread_hook(failure)

    def _add_scalars(self, record: dict[str, Any]) -> None:
        if self._board is None:
            self._open_board()
        try:
            for name, value in _flat(record):
                if name != "step" and isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, record["step"])
        except OSError:
            # The thread that writes has ended with this error; another one has to take its place.
            self._board, self.step = None, record["step"]
            raise


def _flat(record: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items = []
    for name, value in record.items():
        items += _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else [(prefix + name, value)]
    return items


def read_metrics(run_directory: Path) -> list[dict[str, Any]]:
    """The records of a run in order of steps. A line that is no record of a step (torn, damaged, somebody's own) is passed over.

    A run that went back to a checkpoint logs an earlier step again: what it had logged from that step on is dropped.
    """
    records: list[dict[str, Any]] = []
    for line in (run_directory / METRICS_FILE).read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: no JSON, or no UTF-8
            continue
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            continue
        while records and records[-1]["step"] >= record["step"]:
            records.pop()
        records.append(record)
    return records


def last_record(run_directory: Path, step: int) -> dict[str, Any]:
    """The run's last record, if it is that of `step`; else, or where it cannot be read, an empty one."""
    record = _last(run_directory)
    return record if record.get("step") == step else {}


def last_step(run_directory: Path) -> int | None:
    """The step of the run's last record; None where there is none, or it cannot be read."""
    return _last(run_directory).get("step")


def _last(run_directory: Path) -> dict[str, Any]:
    """The last record. The log only observes the run: one that cannot be read is a warning, and a missing one is empty."""
    try:
        return next(reversed(read_metrics(run_directory)), {})
    except FileNotFoundError:
        return {}
    except OSError as error:
        log.warning("%s: cannot be read: %s; the run goes on", run_directory / METRICS_FILE, error.strerror or error)
        return {}


def progress_line(record: dict[str, Any], steps: int, seconds_left: float) -> str:
    """A step for the console."""
    parts = [
        f"step {record['step']:>{len(str(steps))}}/{steps}",
        f"loss {_number(record['loss'], '.4f')}",
        *([f"objective {_number(record['objective'], '.4f')}"] if "objective" in record else []),
        f"grad {_number(record['grad_norm'], '.3f')}",
        f"lr {record['lr']:.2e}",
        f"{_short(record['tokens_per_second'])} tok/s",
    ]
    if record["mfu"] is not None:
        parts.append(f"mfu {record['mfu']:.1%}")
    if "skipped" in record:
        parts.append(f"skipped {record['skipped']}")
    return "  ".join([*parts, *evaluation_parts(record), f"eta {duration(seconds_left)}"])


def evaluation_parts(record: dict[str, Any]) -> list[str]:
    """What was found on validation data, for the console."""
    parts = [f"validation {name} {loss:.4f}" for name, loss in record.get("validation", {}).items()]
    for name, scores in record.get("translation", {}).items():
        parts.append(
            f"translation {name} BLEU {scores['bleu']:.2f} chrF {scores['chrf']:.2f} CER {scores['cer']:.1f} WER {scores['wer']:.1f}"
        )
    return parts


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


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
    """Wall-clock time since the last report. Validation, saving and whatever else is no step count as well."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._steps = self._tokens = 0
        self._computed = self._waited = 0.0
        self._all_steps, self._after_first, self._mean = 0, 0.0, 0.0

    def add(self, computed: float, waited: float, tokens: int) -> None:
        """A step: the seconds it computed, those it waited for its data before, and its target tokens."""
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens
        self._computed, self._waited = self._computed + computed, self._waited + waited
        self._all_steps += 1
        if self._all_steps == 1:
            self._after_first = time.monotonic()

    def take(self) -> dict[str, float]:
        """What docs/metrics.md says of speed; the window starts anew."""
        now = time.monotonic()
        seconds = now - self._started
        speed = {
            "tokens_per_second": self._tokens / seconds,
            "seconds": seconds / self._steps,
            "step_tokens_per_second": self._tokens / self._computed,
            "step_seconds": self._computed / self._steps,
            "data_wait": self._waited / seconds,
        }
        # The first step of a start compiles and warms up; a later one says what a step takes, with its share of all else.
        self._mean = (now - self._after_first) / (self._all_steps - 1) if self._all_steps > 1 else seconds
        self._started, self._steps, self._tokens, self._computed, self._waited = now, 0, 0, 0.0, 0.0
        return speed

    def left(self, steps: int) -> float:
        """Seconds that so many more steps take, at the mean speed of this start at the last report."""
        return steps * self._mean
