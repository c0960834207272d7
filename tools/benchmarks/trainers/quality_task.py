"""What the programs of the record share: their task, the tokens, and what they report (benchmarks/quality.py)."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.trainers.clock import Clock

PROGRAMS = {"pretrain": "quality_ours.py", "HF Trainer": "quality_hf.py", "nanoGPT's loop": "quality_loop.py"}


@dataclass(frozen=True)
class QualityTask:
    """A text to learn in a number of steps, with settings of the program's own."""

    setting: dict[str, Any]
    device: str
    """cpu or cuda."""
    steps: int
    seed: int
    vocabulary: int
    work: str
    """A folder with `train.bin` and `validation.bin` (uint16), and prepared folders `data/train` and `data/validation`."""
    result: str

    @classmethod
    def given(cls) -> QualityTask:
        return cls(**json.loads(sys.argv[1]))

    @property
    def marks(self) -> tuple[int, ...]:
        """The steps, counted from 1, after which the clock is stamped: on a CPU all. A GPU's steps are only queued, and each stamp waits for them.
        So there are two stamps: in the middle, and as many steps later. The last step has none, because some programs end it with validation.
        """
        if self.device == "cpu":
            return tuple(range(1, self.steps + 1))
        half = (self.steps - 1) // 2
        return half, 2 * half

    def stamp(self, clock: Clock, step: int) -> None:
        """To be called after each step."""
        if step not in self.marks:
            return
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        clock.stamp()

    def batch(self, number: int) -> np.ndarray:
        """Random windows of the text [micro, length + 1], as nanoGPT draws them."""
        tokens, length = self._tokens("train"), self.setting["length"]
        starts = np.random.default_rng((self.seed, number)).integers(0, len(tokens) - length - 1, self.setting["micro"])
        return np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)

    def windows(self, name: str) -> int:
        """How many windows a text has."""
        return (len(self._tokens(name)) - 1) // self.setting["length"]

    def window(self, name: str, number: int) -> np.ndarray:
        """A window of a text [length + 1]. Neighbours share a token."""
        length = self.setting["length"]
        return self._tokens(name)[number * length : (number + 1) * length + 1].astype(np.int64)

    def validation(self) -> Iterator[np.ndarray]:
        """The whole validation text in windows [up to 16, length + 1], one after the other."""
        numbers = np.arange(self.windows("validation"))
        for some in np.array_split(numbers, -(-len(numbers) // 16)):
            yield np.stack([self.window("validation", number) for number in some])

    def _tokens(self, name: str) -> np.ndarray:
        return np.memmap(Path(self.work) / f"{name}.bin", dtype=np.uint16, mode="r")

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: a linear warmup, then a cosine."""
        peak, warmup = self.setting["lr"], max(1, round(self.setting["warmup"] * self.steps))
        if step < warmup:
            return peak * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        least = self.setting["min_ratio"]
        return peak * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * progress)))

    def report(self, clock: Clock, losses: list[tuple[float, int]]) -> None:
        """Leave the clock and the mean loss. `losses`: mean and number of windows of each batch of `validation`."""
        clock.write(sum(loss * count for loss, count in losses) / sum(count for _, count in losses))

    def end(self, code: int = 0) -> None:
        """Leave at once: torch 2.11's compiler would wait for its processes, for up to five minutes."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
