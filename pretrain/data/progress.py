"""Progress of long work over a corpus: a bar on a terminal, plain lines anywhere else."""

import sys
import time

MEGABYTE = 1_000_000


class CorpusProgress:
    """Counts documents, tokens and bytes of text, and shows them with the rate in MB/s on standard error.

    `every_seconds` is the least time between two plain lines; a bar follows tqdm's own pace.
    """

    def __init__(self, label: str, every_seconds: float = 10.0) -> None:
        self.documents = 0
        self.tokens = 0
        self.bytes = 0
        self._label = label
        self._every_seconds = every_seconds
        self._start = self._shown = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(desc=label, unit="B", unit_scale=True, leave=False)

    def __enter__(self) -> "CorpusProgress":
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

    def add(self, documents: int, tokens: int, size: int) -> None:
        """Count `documents` more documents, made of `tokens` tokens and `size` bytes of text."""
        self.documents += documents
        self.tokens += tokens
        self.bytes += size
        if self._bar is not None:
            self._bar.set_postfix_str(self._counts(), refresh=False)
            self._bar.update(size)
        elif time.monotonic() - self._shown >= self._every_seconds:
            self._shown = time.monotonic()
            print(f"{self._label}: {self._counts()}, {self.megabytes_per_second:.1f} MB/s", file=sys.stderr, flush=True)

    def _counts(self) -> str:
        tokens = f", {self.tokens:,} tokens" if self.tokens else ""
        return f"{self.documents:,} documents{tokens}"
