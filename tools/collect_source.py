"""Collect Python source from this machine into JSON lines: a corpus that needs no download."""

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import ConfigError, DataError, run_tool  # noqa: E402
from pretrain.progress import MEGABYTE  # noqa: E402
from pretrain.storage import named_if_full, refuse_existing_file  # noqa: E402

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Collection:
    """The outcome of `collect_python_source`; `str()` of it is the closing line of the tool."""

    path: Path
    files: int
    bytes: int
    undecodable: int

    def __str__(self) -> str:
        size = f"{self.bytes / MEGABYTE:.1f} MB"
        return f"collected {self.path} ({self.files} files, {size}); {self.undecodable} undecodable files skipped"


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def collect_python_source(output: str | Path, root: str | Path | None = None, max_megabytes: float = 11) -> Collection:
    """Write the Python files under `root` (default: the standard library) to the new file `output` as JSON lines {"path", "text"}.

    Tests, caches and installed packages are left out. Files come in the order of their paths and stop before the one
    that would exceed `max_megabytes` of text. Raises DataError when there is nothing to collect, and for an `output` that exists.
    """
    if not max_megabytes > 0:  # not a number, for one
        raise ConfigError(f"--max-mb {max_megabytes}: expected a number above 0")
    root, output = Path(root or standard_library()), Path(output)
    if not root.is_dir():
        raise DataError(f"{root}: no such directory")
    refuse_existing_file(output)
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    files = size = undecodable = 0
    try:
        with named_if_full(output), open(partial, "w", encoding="utf-8", newline="\n") as stream:
            for path in _python_files(root):
                data = path.read_bytes()
                try:
                    text = data.decode("utf-8")
                except UnicodeDecodeError:
                    undecodable += 1
                    continue
                if size + len(data) > max_megabytes * MEGABYTE:
                    break
                stream.write(json.dumps({"path": path.relative_to(root).as_posix(), "text": text}) + "\n")
                files, size = files + 1, size + len(data)
        if not files:
            raise DataError(f"{root}: no Python file to collect within {max_megabytes} MB")
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return Collection(output, files, size, undecodable)


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, metavar="FILE.jsonl", help="new file")
    parser.add_argument("--root", metavar="DIR", help="where to look (default: the interpreter's standard library)")
    parser.add_argument("--max-mb", type=float, default=11, help="most text to collect, in MB (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if not Path(arguments.output).name:
        parser.error(f"--output {arguments.output}: give the name of a file")
    return run_tool(lambda: print(collect_python_source(arguments.output, arguments.root, arguments.max_mb)))


if __name__ == "__main__":
    raise SystemExit(main())
