"""Logging: every rank to its own file in the run directory, the main rank to the console as well."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from pretrain.errors import escape_unknown_characters, reason_of

log = logging.getLogger(__name__)

TRACEBACKS = "pretrain.traceback"  # a logger for the files only
PASSING = {"passing": True}  # for `extra`: see ConsoleHandler
FORMAT = "%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s"


def log_to_console(is_main: bool) -> None:
    """Print this package's messages on the main rank's standard output. Other ranks print only their error, at the end."""
    escape_unknown_characters()
    handler = ConsoleHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.INFO if is_main else logging.CRITICAL)
    handler.addFilter(lambda record: record.name != TRACEBACKS)
    root = logging.getLogger("pretrain")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


class ConsoleHandler(logging.StreamHandler):
    """Standard output. On a terminal the next message replaces a message with `extra=PASSING`, which is one line."""

    _stands = False  # whether the next message replaces the terminal's last line

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
        """Keep the line that the next message would have replaced."""
        if self._stands:
            self._stands = False
            with contextlib.suppress(OSError):  # a lost terminal must not keep a run from recording why it ends
                self.stream.write("\n")
                self.flush()


def finish_line() -> None:
    """Finish the progress line. Call it before anything else writes to the terminal."""
    for handler in logging.getLogger("pretrain").handlers:
        if isinstance(handler, ConsoleHandler):
            handler.finish_line()


def log_to_file(directory: Path, rank: int) -> None:
    """Write messages and tracebacks of this rank to logs/rank-N.log. If the file cannot be opened, warn and go on without it."""
    logging.raiseExceptions = False  # a log line that cannot be written must not hide the error in it
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(directory / f"rank-{rank}.log", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        log.warning("the log of rank %d cannot be opened: %s", rank, reason_of(error))
        return
    handler.setFormatter(logging.Formatter(FORMAT.format(rank=rank)))
    logging.getLogger("pretrain").addHandler(handler)


class Tolerated:
    """Writing that only observes a run, so the run goes on if it fails.

    The first failure in a row is a warning. When writing works again, or at the end, a second warning says how many lines were lost.
    `kind`: the exceptions that count as such a failure; any other is raised.
    """

    def __init__(self, what: str, kind: type[Exception] = OSError) -> None:
        self.what, self.kind, self.lost = what, kind, 0

    def attempt(self, write: Callable[[], object]) -> bool:
        """Call `write`, turn its failure into a warning, and return whether it succeeded."""
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
                logging.getLogger(TRACEBACKS).error("%s: the traceback", self.what, exc_info=error)
        self.lost += 1

    def close(self) -> None:
        """Warn of lines that were lost until the end."""
        if self.lost:
            log.warning("%s: could not be written to the end; lines that were lost: %d", self.what, self.lost)
            self.lost = 0
