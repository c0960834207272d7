"""Checkpoint directories: which are complete, whether they are intact, which are kept.

checkpoints/step-00000100/   manifest.json names every other file with its size and sha256; its presence means complete
checkpoints/.writing-step-00000100/   not yet one, or never to be one
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.errors import CheckpointError
from pretrain.storage import flush, sha256_of, unrepeated

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT, VERSION = "pretrain-checkpoint", 1
_NAME = re.compile(r"step-(\d{8,})")


def directory_of(step: int) -> str:
    return f"step-{step:08d}"


def writing_directory_of(target: Path) -> Path:
    return target.with_name(f".writing-{target.name}")


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a `checkpoints` folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)) and (p / MANIFEST).is_file()]
    return [path for _, path in sorted(found)]


def resolve(path: Path) -> list[Path]:
    """The checkpoints that a path means, best last: the directory itself, or those of a run directory.

    Raises CheckpointError when there is none.
    """
    if (path / MANIFEST).is_file() and (path / STATE).is_file():
        return [path]
    found = complete_checkpoints(path / "checkpoints")
    if not found and (path / "config.json").is_file():
        raise CheckpointError(
            f"{path}: is a Hugging Face directory, no checkpoint; make one of it with "
            f"python tools/convert_checkpoint.py from-hf --model {path} --output DIR"
        )
    if not found:
        reason = "does not exist" if not path.exists() else "is neither a complete checkpoint nor a run directory with one"
        raise CheckpointError(f"{path}: {reason}")
    return found


def describe_file(path: Path, seen: Callable[[int], object] | None = None) -> dict[str, Any]:
    """What a manifest says about a file: its size and sha256."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path, seen)}


def write_json(path: Path, content: Any) -> None:
    """Write and flush to the disk."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    flush(path)


def read_json(path: Path) -> Any:
    """Raises CheckpointError naming the file when it cannot be read or parsed, or an object in it has a name twice."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unrepeated)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """File name -> size and sha256. Raises CheckpointError for a manifest that is missing, foreign or damaged."""
    path = checkpoint / MANIFEST
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a manifest of a {FORMAT}")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: version {manifest.get('version')} is not supported; this program reads version {VERSION}"
        )
    files = manifest.get("files")
    valid = isinstance(files, dict) and all(
        isinstance(f, dict) and isinstance(f.get("bytes"), int) and isinstance(f.get("sha256"), str) for f in files.values()
    )
    if not valid or any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise CheckpointError(f"{path}: its list of files is damaged")
    return files


def verify(checkpoint: Path, part: int = 0, parts: int = 1, seen: Callable[[int], object] | None = None) -> None:
    """Compare files with the manifest: every `parts`-th one from `part`, so that ranks can share the work.

    `seen` is told how many bytes were read, piece by piece.

    Raises CheckpointError naming the first file that is missing, cut short or altered.
    """
    for index, (name, expected) in enumerate(sorted(read_manifest(checkpoint).items())):
        if index % parts != part:
            continue
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        try:
            actual = describe_file(path, seen)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        if actual["bytes"] != expected["bytes"]:
            raise CheckpointError(f"{path}: {actual['bytes']} bytes instead of {expected['bytes']}")
        if actual["sha256"] != expected["sha256"]:
            raise CheckpointError(f"{path}: its content does not match its sha256")


def retire(folder: Path, newest: Path, keep_last: int, keep_every_steps: int) -> list[Path]:
    """Remove the checkpoints that need not be kept; the removed ones. `newest`, just committed, always stays."""
    if keep_last == 0:
        return []
    found = complete_checkpoints(folder)
    keep = {newest, *found[-keep_last:]}
    if keep_every_steps:
        keep |= {p for p in found if step_of(p) % keep_every_steps == 0}
    removed = [p for p in found if p not in keep]
    for path in removed:
        discard(path)
    return removed


def discard(path: Path) -> None:
    """Remove a checkpoint directory such that it is none from the first moment on."""
    aside = path.with_name(f".removing-{path.name}")
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def replace_directory(writing: Path, target: Path) -> None:
    """Rename a complete directory into place, also over a damaged one of the same name."""
    aside = target.with_name(f".replaced-{target.name}")
    if target.exists():
        os.rename(target, aside)
    os.rename(writing, target)
    flush(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def discard_unfinished(folder: Path) -> list[str]:
    """Remove what a crashed save left behind; the names removed. Only for the one who holds the run directory."""
    for aside in folder.glob(".replaced-step-*"):
        target = aside.with_name(aside.name.removeprefix(".replaced-"))
        if not target.exists():  # the crash came between the two renames
            os.rename(aside, target)
    leftovers = sorted(p for p in folder.glob(".*-step-*") if p.is_dir()) if folder.is_dir() else []
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return [p.name for p in leftovers]


def incomplete_checkpoints(folder: Path) -> list[Path]:
    """Directories that are named like checkpoints and have no manifest: a partial copy, or an interrupted removal."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name) and not (p / MANIFEST).is_file())


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint directory is named after."""
    return int(_NAME.fullmatch(checkpoint.name)[1])
