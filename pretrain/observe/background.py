"""A tracker in a thread of its own: a slow or broken network never holds up a step.

When a tracker opens, it is brought up to date: it gets the lines of metrics.jsonl that are not known to have arrived. The process of a start before may
have been killed before it sent them. trackers.json of the run directory has the run's id in each tracker, and the last step that arrived there:

    {"wandb": "1f0c...", "mlflow": "9a3e...", "arrived": {"wandb": 120, "mlflow": 340}}
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from pretrain.config.schema import Config
from pretrain.observe.logs import TRACEBACKS
from pretrain.observe.metrics import StepRecord, known_records
from pretrain.observe.sinks import Sink, open_whole
from pretrain.storage import replace_text

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Records that wait in memory. After that the oldest is dropped for each new one."""
RETRY_SECONDS = 30.0
CLOSE_SECONDS = 60.0
"""How long the end of a run waits for the last records to be sent."""
TRACKERS_FILE = "trackers.json"
_LOCK = threading.Lock()
"""For trackers.json: each tracker has a thread of its own."""


class Tracker(Sink):
    """A sink over a network, which `InBackground` gives a thread."""

    tracker = ""
    """Its key in trackers.json."""
    finished = False
    """Whether the run's last step was sent. It is set before `close`."""
    is_immediate = False
    """Whether a record has arrived when `write` returns. Else all have arrived when `close` does."""

    def arrived(self) -> int:
        """The last step that the tracker says it has; 0 if it cannot be asked."""
        return 0


class InBackground(Sink):
    """Gives the records to a tracker, in a thread. While it fails they wait in memory, and it is tried again every 30 s."""

    def __init__(self, sink: Tracker, retry_seconds: float = RETRY_SECONDS, close_seconds: float = CLOSE_SECONDS) -> None:
        self.sink, self.name = sink, sink.name
        self._retry, self._close = retry_seconds, close_seconds
        self._waiting: collections.deque[StepRecord] = collections.deque()
        self._changed, self._ends, self._dropped = threading.Condition(), False, 0
        self._is_open = self._fails = False
        self._last = 0

    def open(self, directory: Path, config: Config, step: int) -> None:
        self._start = directory, config, step
        self._thread = threading.Thread(target=self._work, name=f"sink {self.name}", daemon=True)
        self._thread.start()

    def write(self, record: StepRecord) -> None:
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(record)
            self._changed.notify()

    def close(self) -> None:
        if not hasattr(self, "_thread"):
            return
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join(self._close)
        lost = len(self._waiting) + self._dropped
        if self._thread.is_alive():
            log.warning("%s: has not ended within %g s; the run ends without it", self.name, self._close)
        if lost:
            log.warning("%s: %d log lines could not be sent; metrics.jsonl has them", self.name, lost)

    def _work(self) -> None:
        """The thread: open the sink, send what waits, close it."""
        while True:
            with self._changed:
                until = time.monotonic() + self._retry
                while not self._ends and (self._fails or not self._waiting):
                    left = until - time.monotonic() if self._fails else None
                    if left is not None and left <= 0:
                        break
                    self._changed.wait(left)
                ends = self._ends
            self._send()
            if ends:
                break
        if self._is_open:
            self.sink.failed, self.sink.finished = self.failed, self._last >= self._start[1].run.steps
            try:
                self.sink.close()
                if not self._waiting:
                    self._arrived(self._last)
            except Exception as error:
                self._warn(error, "its end could not be recorded")

    def _send(self) -> None:
        try:
            if not self._is_open:
                open_whole(self.sink, *self._start)
                self._is_open = True
                self._bring_up_to_date()
            while (record := self._take()) is not None:
                try:
                    self.sink.write(record)
                except Exception:
                    self._waiting.appendleft(record)
                    raise
                self._last = record.step
                if self.sink.is_immediate:
                    self._arrived(record.step)
        except Exception as error:
            if not self._fails:
                self._warn(error, f"the run goes on; log lines wait in memory, and it is tried again every {self._retry:g} s")
            self._fails = True
            return
        if self._fails:
            log.warning("%s: works again; all log lines that waited were sent", self.name)
            self._fails = False

    def _take(self) -> StepRecord | None:
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def _bring_up_to_date(self) -> None:
        """Let the lines that a start before this one may not have sent go first."""
        directory, _, step = self._start
        arrived = min(step, max(arrived_step(directory, self.sink.tracker), self.sink.arrived()))
        self._last = arrived
        self._arrived(arrived)
        missing = [record for record in known_records(directory, step) if record.step > arrived]
        with self._changed:
            coming = {record.step for record in self._waiting}
            self._waiting.extendleft(record for record in reversed(missing) if record.step not in coming)

    def _arrived(self, step: int) -> None:
        with contextlib.suppress(OSError):  # then the next start sends more than it has to
            keep_arrived(self._start[0], self.sink.tracker, step)

    def _warn(self, error: Exception, what: str) -> None:
        log.warning("%s: %s: %s; %s", self.name, type(error).__name__, " ".join(str(error).split())[:300], what)
        logging.getLogger(TRACEBACKS).error("%s: the traceback", self.name, exc_info=error)


# ---- trackers.json ----------------------------------------------------------------------------------------------------


def kept_id(directory: Path, tracker: str, new_id: str | None = None) -> str | None:
    """The run's id in a tracker. A run without an id keeps `new_id`, if given. Raises OSError."""
    with _LOCK:
        kept = _read(directory)
        if tracker not in kept and new_id is not None:
            kept[tracker] = new_id
            replace_text(directory / TRACKERS_FILE, json.dumps(kept, indent=1) + "\n")
        return kept.get(tracker)


def arrived_step(directory: Path, tracker: str) -> int:
    """The last step that has arrived, with all before it; 0 if nothing is known. Raises OSError."""
    return _read(directory).get("arrived", {}).get(tracker, 0)


def keep_arrived(directory: Path, tracker: str, step: int) -> None:
    """Remember the last step that has arrived. Raises OSError."""
    with _LOCK:
        kept = _read(directory)
        kept["arrived"] = {**kept.get("arrived", {}), tracker: step}
        replace_text(directory / TRACKERS_FILE, json.dumps(kept, indent=1) + "\n", durable=False)


def _read(directory: Path) -> dict[str, Any]:
    path = directory / TRACKERS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
