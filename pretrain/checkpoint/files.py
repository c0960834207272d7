"""Checkpoint directories: which are complete, whether they are intact, which are kept.

checkpoints/step-00000100/   manifest.json names every other file with its size and sha256; its presence means complete
checkpoints/.writing-step-00000100/     not yet one, or never to be one
checkpoints/damaged-step-00000100/      was one; its content is not what was saved
checkpoints/abandoned-step-00000100/    is one, of a time line that the run has left
checkpoints/.removing-step-00000100/    was one; its files are being removed
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pretrain.config.load import check_recorded
from pretrain.config.model_schema import Model
from pretrain.config.written import build_section
from pretrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    OtherFormatError,
    UnreadableError,
    UserError,
    line_of,
    shown,
)
from pretrain.storage import exists, flush, refuse_existing, sha256_of, unrepeated

T = TypeVar("T")
MANIFEST = "manifest.json"
STATE = "state.json"
METADATA = ".metadata"
"""The table of contents that torch.distributed.checkpoint writes."""
FORMAT, VERSION = "pretrain-checkpoint", 2
"""The version changes with the keys of the model and with what a checkpoint holds. Other keys that a record lacks have their defaults."""
_NAME = re.compile(r"step-([0-9]{8,18})")
_UNFINISHED = re.compile(r"\.(writing-step-\d{8,}|removing-step-\d{8,}(\.\d+)?)")


def step_name(step: int) -> str:
    """The name of the directory of a step's checkpoint: `step-00000100`."""
    return f"step-{step:08d}"


def writing_directory_of(target: Path) -> Path:
    """Where a checkpoint is written until it is complete and takes the name of `target`."""
    return target.with_name(f".writing-{target.name}")


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a `checkpoints` folder, oldest first. Raises OSError where that cannot be known."""
    return [path for path in _named(folder) if exists(path / MANIFEST)]


def checkpoints_at(path: Path, key: str | None = None) -> list[Path]:
    """The checkpoints that a path means, best last: the directory itself, or those of a run directory. `key`: the setting it came from.

    Raises CheckpointError when there is no checkpoint.
    """
    setting = f"{key}=" if key else ""
    if not exists(path):
        raise CheckpointError(f"{setting}{path}: does not exist")
    if (path / MANIFEST).is_file() and (path / STATE).is_file():
        return [path]
    found = complete_checkpoints(path / "checkpoints")
    if not found and (path / "config.json").is_file():
        raise CheckpointError(
            f"{path}: is a Hugging Face directory, no checkpoint; make one of it with "
            f"python tools/convert_checkpoint.py from-hf --model {path} --output DIR"
        )
    if not found:
        raise CheckpointError(f"{setting}{path}: is neither a complete checkpoint nor a run directory with one")
    return found


def refuse_as_output(output: Path) -> None:
    """Raise DataError, naming `output`, unless a tool can make a checkpoint there: it is free, and no run would take it for one of its own."""
    refuse_existing(output)
    if _NAME.fullmatch(output.name) and output.absolute().parent.name == "checkpoints":
        raise DataError(f"{output}: a run would take it for a checkpoint of its own; choose another output")


def read_newest(path: Path, read: Callable[[Path], T]) -> T:
    """`read` of the checkpoint that a path means. Where its run removes it meanwhile (`checkpoint.keep_last`), of the one that is the newest then."""
    while True:
        checkpoint = checkpoints_at(path)[-1]
        try:
            return read(checkpoint)
        except (UserError, OSError):
            if exists(checkpoint):
                raise


def manifest_hash(checkpoint: Path) -> str:
    """sha256 of a checkpoint's manifest, which holds the hashes of all its other files. Raises UnreadableError."""
    try:
        return sha256_of(checkpoint / MANIFEST)
    except OSError as error:
        raise _unreadable(checkpoint / MANIFEST, error) from error


def describe_file(path: Path, seen: Callable[[int], object] | None = None) -> dict[str, Any]:
    """What a manifest says about a file: its size and sha256."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path, seen)}


def check_space(writing: Path, needed: int) -> None:
    """Raise CheckpointError if there is no room for `needed` bytes of all ranks, on storage that they share."""
    # torch reports a disk that fills up while it writes as a mismatch of positions, so it is better to look before.
    free = shutil.disk_usage(writing).free
    if free < needed:
        raise CheckpointError(f"it takes {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free; make room")


def write_json(path: Path, content: Any) -> None:
    """Write and flush to the disk."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    flush(path)


def read_json(path: Path, most: int | None = None) -> Any:
    """The contents of a JSON file.

    Raises UnreadableError when it cannot be read. Raises CheckpointError, naming the file, when it is no JSON, has more bytes than `most`, or
    has an object with a name twice.
    """
    try:
        if most is not None and path.stat().st_size > most:
            raise CheckpointError(f"{path}: {path.stat().st_size:,} bytes; such a file has {most:,} at most")
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unrepeated)
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _unreadable(path: Path, error: OSError) -> UnreadableError:
    missing = isinstance(error, FileNotFoundError)
    problem = UnreadableError(f"{path}: " + ("missing" if missing else f"cannot be read: {error.strerror or error}"))
    problem.path, problem.missing = str(path), missing
    return problem


# What state.json says besides its numbers of steps and samples. Imports and means have some of it only.
_KINDS: dict[str, tuple[type, ...]] = {
    "model": (dict,), "identity": (dict,), "layout": (str,), "record": (dict,), "loads": (list,), "timeline": (list,), "parent": (dict,),
    "skipped": (int,), "skipped_in_a_row": (int,), "useful_seconds": (int, float),
    "has_optimizer": (bool,),
}  # fmt: skip


def load_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint. Raises UnreadableError, and CheckpointError for what is no state."""
    state = read_json(checkpoint / STATE)
    if not isinstance(state, dict):
        raise CheckpointError(f"{checkpoint / STATE}: is not the state of a checkpoint; choose another checkpoint")
    for name in ("step", "samples", "tokens", "world_size"):
        if type(state.get(name)) is not int or state[name] < 0:
            raise CheckpointError(
                f"{checkpoint / STATE}: {name} is {shown(state.get(name))}, not a number; choose another checkpoint"
            )
    for name, kinds in _KINDS.items():
        if state.get(name) is not None and type(state[name]) not in kinds:
            raise CheckpointError(
                f"{checkpoint / STATE}: {name} is {shown(state[name])}, which no checkpoint has there; choose another checkpoint"
            )
    return state


def model_of(checkpoint: Path, state: dict[str, Any]) -> Model:
    """The shape of the model in a checkpoint with this state. Raises CheckpointError for one that this program does not know."""
    try:
        model = build_section(Model, state["model"])
        if model.hf_config is not None:
            json.loads(model.hf_config)
        check_recorded(Model, state["model"], "model", str(checkpoint / STATE))
        return model
    except ConfigError as error:
        raise CheckpointError(f"{error}; choose another checkpoint") from error
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{checkpoint / STATE}: `model` is not one of this version of the program ({line_of(error)}); take the version that saved it"
        ) from error


def read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """File name -> size and sha256. Raises CheckpointError for a manifest that is missing, foreign or damaged."""
    path = checkpoint / MANIFEST
    return files_of_manifest(read_json(path), path)


def files_of_manifest(manifest: Any, path: Path | str) -> dict[str, dict[str, Any]]:
    """File name -> size and sha256, by the content of a manifest. `path`: where it was read, for messages. Raises OtherFormatError, and CheckpointError for
    what is damaged.
    """
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a manifest of a {FORMAT}")
    if manifest.get("version") != VERSION:
        raise OtherFormatError(
            f"{path}: format version {shown(manifest.get('version'))}, this program reads {VERSION}; take the version of the program that wrote it"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(_is_file_name(name) and _is_description(f) for name, f in files.items()):
        raise CheckpointError(f"{path}: its list of files is damaged")
    if missing := [name for name in (METADATA, STATE) if name not in files]:  # what is not listed would not be verified
        raise CheckpointError(f"{path}: its list of files is damaged: {missing[0]} is not in it")
    return files


def _is_file_name(name: str) -> bool:
    """Whether this can be the name of a file in a checkpoint."""
    path = Path(name)
    is_inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == name
    return is_inside and name.isprintable() and max(len(part.encode()) for part in path.parts) <= 255


def _is_description(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    size, digest = found.get("bytes"), found.get("sha256")
    return type(size) is int and 0 <= size < 1 << 63 and isinstance(digest, str)


def verify(
    checkpoint: Path, part: int = 0, parts: int = 1, seen: Callable[[int], object] | None = None, content: bool = True
) -> None:
    """Compare files with the manifest: every `parts`-th one from `part`, so that ranks can share the work.

    `seen` is told how many bytes were read, piece by piece. Without `content`, only sizes are compared.

    Raises CheckpointError naming the first file that is cut short or altered, and UnreadableError for one that is missing or cannot be
    read.
    """
    for index, (name, expected) in enumerate(sorted(read_manifest(checkpoint).items())):
        if index % parts != part:
            continue
        path = checkpoint / name
        try:
            actual = describe_file(path, seen) if content else {"bytes": path.stat().st_size, "sha256": expected["sha256"]}
        except OSError as error:
            raise _unreadable(path, error) from error
        if actual["bytes"] != expected["bytes"]:
            raise CheckpointError(f"{path}: {actual['bytes']} bytes instead of {expected['bytes']}")
        if actual["sha256"] != expected["sha256"]:
            raise CheckpointError(f"{path}: its content does not match its sha256")


def remove(path: Path) -> bool:
    """Remove a directory, or the link to one: what a link points at is somebody's own. Whether it is gone."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


def discard(path: Path) -> None:
    """Remove a checkpoint directory. From the first moment on it is no checkpoint any more."""
    remove(give_up(path))


def give_up(path: Path) -> Path:
    """Rename a checkpoint to a hidden name, and return that. The run has it no more; `remove` has to follow. Raises OSError."""
    aside = _free(path.with_name(f".removing-{path.name}"))
    os.rename(path, aside)
    return aside


def set_aside(checkpoint: Path, why: str) -> Path:
    """Rename a checkpoint to `WHY-step-N`. The run has it no more, and no file of it is lost. `why`: `damaged` or `abandoned`."""
    aside = _free(checkpoint.with_name(f"{why}-{checkpoint.name}"))
    os.rename(checkpoint, aside)
    flush(checkpoint.parent)
    return aside


def was_set_aside(checkpoint: Path) -> bool:
    """Whether a checkpoint of this name was renamed by `set_aside`."""
    names = [path.name for path in checkpoint.parent.iterdir()] if checkpoint.parent.is_dir() else []
    return any(name.split(".")[0] in (f"damaged-{checkpoint.name}", f"abandoned-{checkpoint.name}") for name in names)


def _free(path: Path) -> Path:
    """The path, or the first one that is not taken of path.1, path.2, ..."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(1)))
    return next(name for name in names if not exists(name))


def put_in_place(writing: Path, target: Path) -> Path | None:
    """Give a complete directory its name. One that has it already belongs to another time line; it is set aside, and returned."""
    aside = set_aside(target, "abandoned") if exists(target) else None
    os.rename(writing, target)
    flush(target.parent)
    return aside


def discard_unfinished(folder: Path) -> list[str]:
    """Remove what a crashed save left behind; the names that are gone. Only for the one who holds the run directory."""
    return sorted(path.name for path in unfinished(folder) if remove(path))


def unfinished(folder: Path) -> list[Path]:
    """What a crashed save left behind, and what is being removed. Only for the one who holds the run directory.

    A hidden directory that is not named exactly as a save names its own is somebody's, and is not among them.
    """
    names = [name for name in _names(folder) if _UNFINISHED.fullmatch(name)]
    leftovers = [name for name in names if (folder / name).is_dir() or (folder / name).is_symlink()]
    return [folder / name for name in leftovers]


def incomplete_checkpoints(folder: Path) -> list[Path]:
    """Directories that are named like checkpoints and have no manifest: a partial copy, or an interrupted removal."""
    return [path for path in _named(folder) if not exists(path / MANIFEST)]


def _named(folder: Path) -> list[Path]:
    """What is named like a checkpoint, by rising step."""
    return sorted((folder / name for name in _names(folder) if _NAME.fullmatch(name)), key=step_of)


def _names(folder: Path) -> list[str]:
    """Names in a `checkpoints` folder, empty if it does not exist. Raises CheckpointError if it is a file."""
    try:
        return os.listdir(folder) if exists(folder) else []
    except NotADirectoryError as error:
        raise CheckpointError(f"{folder}: is a file where the run keeps its checkpoints; move it away") from error


def is_checkpoint_name(name: str) -> bool:
    """Whether a directory of this name is a checkpoint, of the step that `step_of` gives."""
    return _NAME.fullmatch(name) is not None


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint directory is named after."""
    return int(_NAME.fullmatch(checkpoint.name)[1])
