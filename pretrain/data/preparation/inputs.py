"""What a preparation reads: files by name, folder, pattern or data set, each with its kind and the state it was found in.

*.jsonl *.ndjson *.json (.gz .zst)   one JSON object per line
*.parquet *.pq                       rows
*.arrow                              rows: an Arrow IPC file or stream, as `datasets` writes them
*.npy, and *.bin with a --ids-dtype  token ids, an end-of-document id after each document
anything else (.gz .zst)             plain text: a document per file, or per line
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import DataError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet", ".pq")
ARROW_SUFFIXES = (".arrow",)
COMPRESSED_SUFFIXES = (".gz", ".zst")


@dataclass(frozen=True)
class InputFile:
    """One file, and its size and time of change (ns) when it was found: a later difference is an error, not other data.

    `name` is what the user gave and what errors and provenance say; `path` is where it is read on this machine. `modified` is
    0 for a file whose path already stands for its content (a download cache), where machines differ in the time.
    """

    name: str
    path: str
    size: int
    modified: int

    @classmethod
    def found_at(cls, path: str, name: str | None = None, *, check_time: bool = True) -> InputFile:
        """The file as it is now. Raises DataError when it is not there."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"{name or path}: cannot be read ({error.strerror})") from error
        return cls(name or path, path, status.st_size, status.st_mtime_ns if check_time else 0)

    @property
    def compression(self) -> str:
        """`.gz`, `.zst` or nothing."""
        suffix = Path(self.path).suffix.lower()
        return suffix if suffix in COMPRESSED_SUFFIXES else ""

    def kind(self, ids_dtype: str = "") -> str:
        """`json`, `parquet`, `arrow`, `ids` or `text`."""
        path = Path(self.path)
        suffix = (Path(path.stem).suffix if self.compression else path.suffix).lower()
        if suffix in JSON_SUFFIXES:
            return "json"
        if self.compression:
            return "text"
        if suffix in PARQUET_SUFFIXES:
            return "parquet"
        if suffix in ARROW_SUFFIXES:
            return "arrow"
        return "ids" if suffix == ".npy" or (suffix == ".bin" and ids_dtype) else "text"

    def refuse_changes(self) -> None:
        """Raise DataError unless the file is as it was found."""
        now = InputFile.found_at(self.path, self.name, check_time=bool(self.modified))
        if now.size != self.size or now.modified != self.modified:
            raise DataError(f"{self.name}: was changed during the preparation; leave the input alone and start with --restart")


def find_inputs(patterns: Sequence[str], log: Callable[[str], None] | None = None) -> list[Path]:
    """The files that `patterns` name, each once, sorted: a file, a glob (`**` descends), or a folder with all its files.

    In a folder hidden files and folders are left out, and links to folders are not followed; `log` (default: a line on
    standard error) is told when that left something out. Raises DataError for a pattern that gives no file.
    """
    found: set[str] = set()
    for pattern in patterns:
        # A name that exists is taken literally, so that a file called "a[1].txt" can be given at all.
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        files = [os.path.normpath(match) for match in matches if os.path.isfile(match)]
        if os.path.isdir(pattern):
            files = _files_below(os.path.normpath(pattern), log or _say)
        if not files:
            hint = " (a folder without files)" if os.path.isdir(pattern) else ""
            raise DataError(f"{pattern}: no such input file{hint}")
        found.update(files)
    return [Path(name) for name in sorted(found)]


def _files_below(folder: str, log: Callable[[str], None]) -> list[str]:
    found, hidden, links = [], 0, 0
    for parent, folders, names in os.walk(folder, onerror=_refuse_folder):
        shown = [name for name in folders if not name.startswith(".")]
        followed = [name for name in shown if not os.path.islink(os.path.join(parent, name))]
        visible = [name for name in names if not name.startswith(".")]
        hidden += len(folders) - len(shown) + len(names) - len(visible)
        links += len(shown) - len(followed)
        folders[:] = followed
        found += [path for name in visible if os.path.isfile(path := os.path.join(parent, name))]
    if hidden or links:
        log(f"{folder}: left out {hidden} hidden files and folders and {links} links to folders")
    return found


def _refuse_folder(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
