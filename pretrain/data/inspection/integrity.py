"""Checks that prepared data, prepared pairs and a run's packing indices are intact: every file is hashed, and every damaged one named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pretrain.config.data_schema import Data
from pretrain.config.schema import Config
from pretrain.data.inspection.history import STARTS_FILE, History
from pretrain.data.packing import index_path
from pretrain.data.pairs.prepared_pairs import INVALID_KEY, SIDES, read_pairs
from pretrain.data.pairs.prepared_pairs import NAME as PAIRS_NAME
from pretrain.data.preparation.process_pool import usable_cores
from pretrain.data.shards.manifest import (
    INDEX_DTYPE,
    INPUTS_NAME,
    INVALID_NAME,
    read_manifest,
    splits_with,
    tokenizer_difference,
)
from pretrain.data.shards.reader import PreparedData
from pretrain.data.sources import cache_folder, open_prepared, with_prepared_text
from pretrain.errors import DataError
from pretrain.progress import ByteProgress
from pretrain.storage import sha256_of, unsealed
from pretrain.transfer import is_url

_THREADS = min(4, usable_cores())  # hashing releases the interpreter's lock


@dataclass(frozen=True)
class Damage:
    """A file, and what is wrong with it."""

    file: str
    problem: str


@dataclass(frozen=True)
class Integrity:
    """The files that were checked, and the damaged ones."""

    files: int
    bytes: int
    damaged: list[Damage]


@dataclass(frozen=True)
class _Checked:
    """A file or directory to check. `problem`: finds a phrase about it, None if it is intact; it may raise OSError or DataError."""

    path: Path | str
    size: int
    problem: Callable[[], str | None]

    def check(self) -> str | None:
        try:
            return self.problem()
        except FileNotFoundError:
            return "missing, though the manifest lists it"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        except DataError as error:
            return str(error).removeprefix(f"{self.path}: ")


def _listed(path: Path, sha256: str) -> _Checked:
    """A file as a manifest lists it."""

    def problem() -> str | None:
        return None if sha256_of(path) == sha256 else "its content does not match its hash in the manifest"

    return _Checked(path, path.stat().st_size if path.is_file() else 0, problem)


def _shard_behind_url(data: PreparedData, number: int) -> _Checked:
    """The files of one shard behind a URL. Files that are not in the cache are downloaded, which checks them."""
    shard = data.manifest.shards[number]
    size = shard.tokens * data.dtype.itemsize + shard.documents * INDEX_DTYPE.itemsize
    return _Checked(f"{data.path}/{shard.file}", size, lambda: data.verify(number, len(data.manifest.shards), fetch=True))


def check_integrity(path: str) -> Integrity:
    """Hash every file of prepared data or pairs (or of both splits), or of all data that a run reads. Shows progress on standard error.

    Raises DataError if `path` is neither.
    """
    damaged: list[Damage] = []
    listed: dict[str, _Checked] = {}  # splits share a tokenizer, and a run may read a directory twice
    for files, problem in _of_run(Path(path)) if (Path(path) / STARTS_FILE).exists() else _of_directory(path):
        listed |= {str(file.path): file for file in files}
        damaged += [problem] if problem else []
    with ByteProgress("checking", sum(file.size for file in listed.values())) as progress, ThreadPoolExecutor(_THREADS) as pool:
        for file, problem in zip(listed.values(), pool.map(_Checked.check, listed.values())):
            damaged += [Damage(str(file.path), problem)] if problem else []
            progress.add(file.size)
    return Integrity(len(listed), progress.total, list(dict.fromkeys(damaged)))


def refuse_damage(integrity: Integrity) -> None:
    """Raise DataError if anything is damaged."""
    if integrity.damaged:
        first = integrity.damaged[0]
        raise DataError(
            f"{len(integrity.damaged)} damaged: {first.file}: {first.problem}; restore them or prepare the data again "
            "(if it is a packing index, remove its directory: it is made again)"
        )


_Found = tuple[list[_Checked], Damage | None]


def _of_directory(path: str) -> Iterator[_Found]:
    if is_url(path):
        yield _of_prepared(path, Config().data)
        return
    folder = Path(path)
    if (folder / PAIRS_NAME).exists():
        yield from _of_pairs(path)
        return
    paired = splits_with(folder, PAIRS_NAME)
    for split in paired:
        yield from _of_pairs(str(split))
    if paired:
        return
    splits = splits_with(folder, "manifest.json")
    if (folder / "manifest.json").exists() or not splits:
        splits = [folder]
        read_manifest(folder)  # raises the error for a path that is not a prepared directory
    for split in splits:
        yield _of_prepared(str(split), Config().data)


def _of_prepared(path: str, data: Data) -> _Found:
    try:
        if is_url(path):
            opened = open_prepared(path, data)
            return [_shard_behind_url(opened, number) for number in range(len(opened.manifest.shards))], None
        manifest = read_manifest(path)
    except DataError as error:
        return [], Damage(path, str(error).removeprefix(f"{path}: "))
    hashes = [file for shard in manifest.shards for file in shard.files] + [(INPUTS_NAME, manifest.inputs_sha256)]
    hashes += [(INVALID_NAME, manifest.invalid_sha256)] if manifest.invalid_sha256 else []
    files, tokenizer = [_listed(Path(path) / name, sha256) for name, sha256 in hashes], Path(path) / "tokenizer"
    return [*files, _Checked(tokenizer, 0, lambda: tokenizer_difference(tokenizer, manifest))], None


def _of_pairs(path: str) -> Iterator[_Found]:
    """Both sides of prepared pairs, and what ties them."""
    try:
        content = read_pairs(Path(path))
        if INVALID_KEY in content:
            yield [_listed(Path(path) / INVALID_NAME, content[INVALID_KEY])], None
    except DataError as error:
        yield [], Damage(path, str(error))
    for side in SIDES:
        if (Path(path) / side / "manifest.json").is_file():  # a missing one was named above
            yield _of_prepared(f"{path}/{side}", Config().data)


def _of_run(folder: Path) -> Iterator[_Found]:
    configs = {repr(stretch.config.data): stretch.config for stretch in History.read(folder).stretches}
    for data in (with_prepared_text(config, make=False).data for config in configs.values()):
        if data.pairs is not None:
            for path in [data.pairs, *(source.path for source in data.validation)]:
                yield from _of_pairs(path)
            continue
        for source in [*data.sources, *data.validation]:
            yield _of_prepared(source.path, data)
            yield _of_index(source.path, data)


def _of_index(path: str, data: Data) -> _Found:
    """The files of a packing index. A missing index is no damage, because it is made again."""
    if data.packing == "concatenate":
        return [], None
    try:
        prepared = open_prepared(path, data) if is_url(path) else PreparedData(Path(path), read_manifest(path))
    except DataError:
        return [], None  # reported as damage of the directory
    index = index_path(prepared, data.packing, data.sequence_length, cache_folder(data))
    if not index.exists():
        return [], None
    try:
        hashes = unsealed((index / "manifest.json").read_bytes())["sha256"]
        return [_listed(index / name, sha256) for name, sha256 in hashes.items()], None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [], Damage(str(index / "manifest.json"), f"not the manifest of a packing index ({error!r}); remove {index}")
