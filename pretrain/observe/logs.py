"""Logging: every rank to its own file in the run directory, the main rank to the console as well."""

from __future__ import annotations

import logging
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from pretrain.errors import reason_of

log = logging.getLogger(__name__)

TRACEBACKS = "pretrain.traceback"  # a logger for the files only
PASSING = {"passing": True}  # for `extra`: see ConsoleHandler
FORMAT = "%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s"


def log_to_console(is_main: bool) -> None:
    """Messages of this package on standard output; of the other ranks nothing: their errors are printed at the end."""
    handler = ConsoleHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.INFO if is_main else logging.CRITICAL)
    handler.addFilter(lambda record: record.name != TRACEBACKS)
    root = logging.getLogger("pretrain")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


class ConsoleHandler(logging.StreamHandler):
    """Standard output. On a terminal a message with `extra=PASSING` is one line that the next message takes the place of."""

    _stands = False  # whether the terminal's last line is to be replaced

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text, passes = self.format(record), getattr(record, "passing", False) and self.stream.isatty()
            if passes:
                text = text[: shutil.get_terminal_size().columns - 1]
            self.stream.write(("\r\x1b[K" if self._stands else "") + text + ("" if passes else "\n"))
            self._stands = passes
            self.flush()
        except Exception:
            self.handleError(record)

    def finish_line(self) -> None:
        """Let the line stand that the next message would have replaced."""
        if self._stands:
            self._stands = False
            self.stream.write("\n")
            self.flush()


def finish_line() -> None:
    """Before anything else writes to the terminal."""
    for handler in logging.getLogger("pretrain").handlers:
        if isinstance(handler, ConsoleHandler):
            handler.finish_line()


def log_to_file(directory: Path, rank: int) -> None:
    """Messages, and tracebacks, of this rank in logs/rank-N.log. A file that cannot be opened is warned of: the run goes on without."""
    logging.raiseExceptions = False  # a log line that finds the disk full must not bury the error that is being reported
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(directory / f"rank-{rank}.log", encoding="utf-8")
    except OSError as error:
        log.warning("the log of rank %d cannot be opened: %s", rank, reason_of(error))
        return
    handler.setFormatter(logging.Formatter(FORMAT.format(rank=rank)))
    logging.getLogger("pretrain").addHandler(handler)


class Tolerated:
    """Writing that only observes a run, so that the run goes on where it fails.

    The first failure in a row is warned of, and so is how many lines were lost, when it works again or at the end. `kind`: what counts
    as such a failure; anything else is raised.
    """

    def __init__(self, what: str, kind: type[Exception] = OSError) -> None:
        self.what, self.kind, self.lost = what, kind, 0

    def attempt(self, write: Callable[[], object]) -> bool:
        """Call `write`; a failure of it is a warning. Whether it succeeded."""
        try:
            write()
        except self.kind as error:
            self.fail(error)
            return False
        if self.lost:
            log.warning("%s: is written again; lines that were lost: %d", self.what, self.lost)
            self.lost = 0
        return True

    def fail(self, error: Exception) -> None:
        """Count a line that was lost, and warn of the first in a row."""
        if not self.lost:
            reason = (error.strerror or error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            log.warning("%s: cannot be written: %s; the run goes on, and the next line is tried again", self.what, reason)
            if not isinstance(error, OSError):
                logging.getLogger(TRACEBACKS).error("%s", "".join(traceback.format_exception(error)))
        self.lost += 1

    def close(self) -> None:
        """Say what was lost to the end."""
        if self.lost:
            log.warning("%s: could not be written to the end; lines that were lost: %d", self.what, self.lost)
            self.lost = 0
