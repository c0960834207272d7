"""Logging: every rank to its own file in the run directory, the main rank to the console as well."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

TRACEBACKS = "pretrain.traceback"  # a logger for the files only
FORMAT = "%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s"


def log_to_console(is_main: bool) -> None:
    """Messages of this package on standard output; of the other ranks nothing: their errors are printed at the end."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.INFO if is_main else logging.CRITICAL)
    handler.addFilter(lambda record: record.name != TRACEBACKS)
    root = logging.getLogger("pretrain")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


def log_to_file(directory: Path, rank: int) -> None:
    """Messages, and tracebacks, of this rank in logs/rank-N.log."""
    directory.mkdir(parents=True, exist_ok=True)
    logging.raiseExceptions = False  # a log line that finds the disk full must not bury the error that is being reported
    handler = logging.FileHandler(directory / f"rank-{rank}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT.format(rank=rank)))
    logging.getLogger("pretrain").addHandler(handler)
