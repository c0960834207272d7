"""Errors that a user can act on, and the one way in which command-line tools end.

Each error carries one line that names the key, file or rank and the remedy. Entry points print that line and put the traceback
in the log; any other exception is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

OTHERS_WAIT_SECONDS = 3.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where it has no room for more of a file."""


def install_command(extra: str) -> str:
    """The command that installs the packages of one of pyproject.toml's extras, from the repository's root."""
    return f'pip install -c constraints.txt -e ".[{extra}]"'


class UserError(Exception):
    """Something the user can correct. `exit_code` is what the process returns.

    Most errors happen on all ranks alike, and the first rank of each host prints them. An error of a single rank says so with
    `on_rank`, and that rank prints it at once.
    """

    exit_code = 1
    rank: int | None = None
    told: bool = False
    """Whether the other processes of the run know of this error."""

    def on_rank(self, rank: int) -> UserError:
        """The same error, marked as one that only this rank has."""
        error = type(self)(f"rank {rank}: {self}")
        error.rank = rank
        return error


class ConfigError(UserError):
    """The configuration cannot be used: unknown key, wrong type, out of range, or two values that cannot go together.

    Where the message begins with the dotted path of a key, the entry (pretrain/run.py) says where that was written.
    """

    exit_code = 2


class LaunchError(UserError):
    """The processes that were started do not fit the configuration.

    `remedy`: what to do about it in the place where they were started, which ends the message.
    """

    exit_code = 2

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.problem = message


class DataError(UserError):
    """Prepared data or a tokenizer is missing, damaged or does not fit the run."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class OtherFormatError(CheckpointError):
    """A checkpoint is of another version of the format. It is not damaged, so that a run does not fall back from it."""


class ExportError(CheckpointError):
    """A new run could not be exported in the end."""


class UnreadableError(CheckpointError):
    """A file of a checkpoint cannot be read at the moment. Its content may still be good."""

    path: str | None = None
    missing = False


class GenerationError(UserError):
    """A model gives no text, for instance because its logits are not numbers."""


class TrainingError(UserError):
    """Training cannot go on, for instance because the loss is not a number."""


class LostRankError(UserError):
    """A rank has ended or does not answer, and the others cannot go on without it."""


def print_error(error: UserError, before_end: Callable[[], object] | None = None) -> None:
    """Print the one line of an error, once per host if all ranks have it; then call what is left to do.

    The first rank of the host prints, and its launcher then ends the others. A rank that still lives after a while had
    the error alone, and prints it.
    """
    waits = os.environ.get("LOCAL_RANK", "0") != "0" and error.rank is None
    if not waits:
        _say_error(error)
    if before_end:
        before_end()
    if waits:
        time.sleep(OTHERS_WAIT_SECONDS)
        _say_error(error)


def _say_error(error: UserError) -> None:
    say(f"error: {line_of(error)}", to_errors=True)


def without_secrets(url: str) -> str:
    """A URL without user, password and query; another text as it is."""
    if "://" not in url:
        return url
    links = re.split(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)", url)  # a query may have colons too
    return "::".join(re.sub(r"//[^/@]*@", "//", link.partition("?")[0]) for link in links)


def say(line: str, to_errors: bool = False) -> None:
    """Print a line at once, on standard output or on standard error. Nothing happens if that cannot be: the reader has ended (`| tee` after Ctrl-C),
    the terminal is lost, the disk is full. A process must come to its end all the same.
    """
    stream = sys.stderr if to_errors else sys.stdout
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:  # it is None if the caller closed it (`>&-`)
            print(line, file=stream, flush=True)


def flush_output() -> None:
    """Write what was printed and is not written yet, if that can be (see `say`)."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout is not None:
            sys.stdout.flush()


def escape_unknown_characters() -> None:
    """From now on write a character that standard output cannot encode as an escape such as \\u2581: locales without UTF-8 still exist."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def reason_of(error: OSError) -> str:
    """The system's error about a file, with the file's name, in one line."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename is not None else reason


def shown(value: object) -> str:
    """A value from a user's file, as a message shows it."""
    return clipped(repr(value))


def clipped(text: str, most: int = 80) -> str:
    """A text on one line. A long one is cut, and its length is given."""
    line = " ".join(text.split()) if "\n" in text else text
    return line if len(line) <= most else f"{line[:most]}... ({len(text):,} characters)"


def nearest_multiples(value: int, unit: int) -> str:
    """The nearest multiples of `unit`, for a message about a number that is not one."""
    below = value // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n)


INTERRUPTED = 130  # what shells report for a process ended by SIGINT
NO_READER = 141  # and by SIGPIPE
TERMINATED = 143  # and by SIGTERM


class _Terminated(KeyboardInterrupt):
    """SIGTERM, from a scheduler, `timeout` or `kill`. What cleans up after Ctrl-C does so after it as well."""


@contextlib.contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    """Inside, the first SIGTERM raises `_Terminated`, and the second one ends the process at once. Somebody else's handler stays."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_tool(function: Callable[[], object]) -> int:
    """Call `function` and return the exit code of the process: the int that it returns, or 0.

    A `UserError` becomes one line on standard error and its own exit code. So does an OSError that names a file or means a full disk. Any
    other exception is a defect of ours and keeps its traceback. SIGTERM lets it clean up, as Ctrl-C does. If the reader of standard output has ended (`| head`), the tool ends silently.
    """
    code = 0
    escape_unknown_characters()
    try:
        with _raising_on_sigterm():
            code = _exit_code(function)
        if sys.stdout is not None:  # it is None if the caller closed it (`>&-`)
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise  # of another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again when it ends
        return code or NO_READER
    return code


def _reader_is_gone() -> bool:
    """Whether nobody can read what is written to standard output any more."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something without a file
        return False
    poll = select.poll()
    poll.register(output, 0)  # errors are always reported
    return bool(poll.poll(0))


def _exit_code(function: Callable[[], object]) -> int:
    try:
        code = function()
    except UserError as error:
        _say_error(error)
        return error.exit_code
    except OSError as error:
        is_full = error.errno in FULL
        if error.filename is None and not is_full:
            raise
        what = "a file cannot be written" if error.filename is None else error.filename
        remedy = "; make room and start the same command again" if is_full else ""
        say(f"error: {what}: {error.strerror}{remedy}", to_errors=True)
        return UserError.exit_code
    except _Terminated:
        say("ended by SIGTERM", to_errors=True)
        return TERMINATED
    except KeyboardInterrupt:
        say("interrupted", to_errors=True)
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def line_of(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, UserError):
        return " ".join(str(error).splitlines())
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by SIGINT"
    first = str(error).splitlines()[:1]
    return ": ".join([type(error).__name__, *first])
