"""Progress of long work over bytes, on standard error: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time

EVERY_SECONDS = 10.0  # least time between two plain lines


class ByteProgress:
    """How many of `total` bytes are done; `label` says with what."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done, self._bar = label, total, 0, None
        self._shown = time.monotonic()
        if sys.stderr.isatty():
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
            print(f"{self.label}: {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB", file=sys.stderr, flush=True)
