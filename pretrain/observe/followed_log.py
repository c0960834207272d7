"""A log of metrics that is read while it grows: each look reads only what was added since the one before."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any

from pretrain.observe.metrics import record_of

EVALUATED = ("validation", "bits_per_byte", "evaluation")
"""Numbers that few records have, and of which the newest are kept."""


class FollowedLog:
    """The records of a metrics.jsonl, as `read_metrics` gives them, in 16 bytes for each.

    A long run has a million of them, and a page that reads all of them every two seconds takes a core from the run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin((0, 0))

    def _begin(self, file: tuple[int, int]) -> None:
        """Read a file, by its device and inode, from its beginning."""
        self._file, self._read, self._rest = file, 0, b""
        self.last: dict[str, Any] | None = None
        self.steps, self.losses = array("q"), array("d")
        self._evaluated: dict[str, list[dict[str, Any]]] = {name: [] for name in EVALUATED}

    def look(self) -> None:
        """Read what was added since the last look. A log that is another file now, or shorter, is read from its beginning."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._begin((0, 0))
            return
        with file:
            state = os.fstat(file.fileno())
            if (state.st_dev, state.st_ino) != self._file or state.st_size < self._read:
                self._begin((state.st_dev, state.st_ino))
            file.seek(self._read)
            for line in file:
                self._read += len(line)
                line, self._rest = self._rest + line, b""
                if line.endswith(b"\n"):
                    self._add(line)
                else:  # half a line, whose rest comes later
                    self._rest = line

    def _add(self, line: bytes) -> None:
        record = record_of(line)
        if record is None:
            return
        # A run that went back to a checkpoint logs an earlier step again.
        while self.steps and self.steps[-1] >= record["step"]:
            self.steps.pop()
            self.losses.pop()
        for name, found in self._evaluated.items():
            while found and found[-1]["step"] >= record["step"]:
                found.pop()
            if name in record:
                found.append({"step": record["step"], name: record[name]})
        loss = record.get("loss")
        self.steps.append(record["step"])
        self.losses.append(float("nan") if loss is None else loss)
        self.last = record

    def newest(self, name: str) -> dict[str, Any] | None:
        """The newest numbers of `name` (one of EVALUATED) and their step. None before the first."""
        found = self._evaluated[name]
        return found[-1] if found else None
