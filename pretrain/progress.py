"""Progress of long work over a corpus or over files, on standard error: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from pretrain.errors import say

MEGABYTE = 1_000_000
EVERY_SECONDS = 10.0
"""The least time between two plain lines; a bar follows tqdm's own pace."""


class _Bar:
    """How much of `total` is done (0: the total is unknown). `label` names the work, and `unit` what it is counted in."""

    def __init__(self, label: str, total: int, unit: str = "B") -> None:
        self.label, self.total, self.done, self._bar = label, total, 0, None
        self._start = self._shown = time.monotonic()
        if sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(desc=label, total=total or None, unit=unit, unit_scale=True, leave=False)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _advance(self, amount: int, line: Callable[[], str]) -> None:
        """Count `amount` more as done, and move the bar, or print a line if one is due."""
        self.done += amount
        if self._bar is not None:
            self._bar.update(amount)
        elif time.monotonic() - self._shown >= EVERY_SECONDS:
            self._shown = time.monotonic()
            say(f"{self.label}: {line()}", to_errors=True)


class CorpusProgress(_Bar):
    """Counts documents, tokens and bytes of text, and shows them with their rates.

    `total` is the amount of work, counted in `unit`, if it is known: then the remaining time is shown too.
    """

    def __init__(self, label: str, total: int = 0, unit: str = "B") -> None:
        super().__init__(label, total, unit)
        self.documents = self.tokens = self.bytes = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def add(self, documents: int, tokens: int, size: int, done: int = 0) -> None:
        """Count `documents` more documents, made of `tokens` tokens and `size` bytes of text; `done` of the total is done."""
        self.documents += documents
        self.tokens += tokens
        self.bytes += size
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(self._counts()), refresh=False)
        self._advance(done if self.total else size, lambda: ", ".join(self._counts() + self._share()))

    def _counts(self) -> list[str]:
        seconds = max(self.seconds, 1e-9)
        counts = [f"{self.documents:,} documents"] if self.documents else []
        if self.bytes:
            counts.append(f"{self.bytes / MEGABYTE / seconds:.1f} MB/s")
        if self.tokens:
            counts += [f"{self.tokens:,} tokens", f"{self.tokens / seconds:,.0f} tokens/s"]
        return counts

    def _share(self) -> list[str]:
        if not self.total:
            return []
        left = self.seconds * (self.total - self.done) / self.done if self.done else 0.0
        return [f"{self.done / self.total:.0%}, {_duration(left)} left"]


class ByteProgress(_Bar):
    """Shows how many of `total` bytes are done."""

    def add(self, size: int) -> None:
        """Count `size` more bytes as done."""
        self._advance(size, lambda: f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
