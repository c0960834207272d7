"""Progress of long work over a corpus or over files, on standard error: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time

from pretrain.errors import say

MEGABYTE = 1_000_000
EVERY_SECONDS = 10.0
"""The least time between two plain lines."""


class CorpusProgress:
    """Counts documents, tokens and bytes of text, and shows them with their rates on standard error.

    `total` is the amount of work, in any unit, if it is known: then the remaining time is shown too. `every_seconds` is the
    least time between two plain lines; a bar follows tqdm's own pace.
    """

    def __init__(self, label: str, every_seconds: float = EVERY_SECONDS, total: int = 0) -> None:
        self.documents = 0
        self.tokens = 0
        self.bytes = 0
        self.done = 0
        self._label = label
        self._total = total
        self._every_seconds = every_seconds
        self._start = self._shown = time.monotonic()
        self._bar = None
        if sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(desc=label, unit="B", unit_scale=True, leave=False, total=total or None)

    def __enter__(self) -> CorpusProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def megabytes_per_second(self) -> float:
        return self.bytes / MEGABYTE / max(self.seconds, 1e-9)

    def add(self, documents: int, tokens: int, size: int, done: int = 0) -> None:
        """Count `documents` more documents, made of `tokens` tokens and `size` bytes of text; `done` of the total is done."""
        self.documents += documents
        self.tokens += tokens
        self.bytes += size
        self.done += done
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(self._counts()), refresh=False)
            self._bar.update(done if self._total else size)
        elif time.monotonic() - self._shown >= self._every_seconds:
            self._shown = time.monotonic()
            say(f"{self._label}: {', '.join(self._counts() + self._share())}", to_errors=True)

    def _counts(self) -> list[str]:
        seconds = max(self.seconds, 1e-9)
        counts = [f"{self.documents:,} documents"] if self.documents else []
        if self.bytes:
            counts.append(f"{self.megabytes_per_second:.1f} MB/s")
        if self.tokens:
            counts += [f"{self.tokens:,} tokens", f"{self.tokens / seconds:,.0f} tokens/s"]
        return counts

    def _share(self) -> list[str]:
        if not self._total:
            return []
        left = self.seconds * (self._total - self.done) / self.done if self.done else 0.0
        return [f"{self.done / self._total:.0%}, {_duration(left)} left"]


class ByteProgress:
    """Shows how many of `total` bytes are done; `label` names the work."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done, self._bar = label, total, 0, None
        self._shown = time.monotonic()
        if sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, unit="B", unit_scale=True, leave=False)

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, size: int) -> None:
        """Count `size` more bytes as done."""
        self.done += size
        if self._bar is not None:
            self._bar.update(size)
        elif time.monotonic() - self._shown >= EVERY_SECONDS:
            self._shown = time.monotonic()
            say(f"{self.label}: {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB", to_errors=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
