"""What every compared program shares: the task, the tokens, and a clock that it stamps after each optimizer step."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.trainers.versions import versions


@dataclass(frozen=True)
class Task:
    """GPT-2's architecture without dropout, trained by AdamW with clipping at 1."""

    dim: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    micro: int
    """Sequences of a micro-step of a rank."""
    accumulation: int
    ranks: int
    steps: int
    format: str
    compiled: bool
    """By torch.compile, whole or by blocks as the program does it."""
    work: str
    """A folder with `tokens.bin` (uint16) and, for pretrain, the prepared folder `tokens`."""
    result: str

    @classmethod
    def given(cls) -> Task:
        return cls(**json.loads(sys.argv[1]))

    def windows(self, seed: int) -> np.ndarray:
        """Random windows of the tokens [micro, length + 1], as nanoGPT draws them."""
        tokens = np.memmap(Path(self.work) / "tokens.bin", dtype=np.uint16, mode="r")
        starts = np.random.default_rng(seed).integers(0, len(tokens) - self.length - 1, self.micro)
        return np.stack([tokens[start : start + self.length + 1] for start in starts]).astype(np.int64)


class Clock:
    """CPU and wall time after each step of this process, and its largest memory by then. `write` leaves them and its versions for the benchmark."""

    def __init__(self, result: str) -> None:
        self.path = Path(f"{result}-{os.environ.get('RANK', '0')}.json")
        self.stamps: list[tuple[float, float]] = []
        self.peak_kib = 0

    def stamp(self) -> None:
        self.stamps.append((time.process_time(), time.time()))
        self.peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def write(self, loss: float | None) -> None:
        known = {"Python": platform.python_version(), **versions()}
        self.path.write_text(json.dumps({"stamps": self.stamps, "peak_kib": self.peak_kib, "loss": loss, "versions": known}))
