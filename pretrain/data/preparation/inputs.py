"""The inputs of a preparation: files by name, folder, pattern, URL or data set, each with its kind and its state when found.

*.jsonl *.ndjson *.json              one JSON object per line
*.csv *.tsv                          rows under a line with the names of the columns
*.parquet *.pq                       rows
*.arrow                              rows: an Arrow IPC file or stream, as `datasets` writes them
*.warc *.wet                         text records of web archives
*.npy, and *.bin with a --ids-dtype  token ids, an end-of-document id after each document
anything else                        plain text: a document per file, or per line

All kinds except Parquet, Arrow and ids may be compressed: .gz .bz2 .xz .zst.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pretrain.errors import DataError, say, without_secrets
from pretrain.transfer import Remote, is_url

_KINDS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".warc", ".wet"), "warc"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    ".arrow": "arrow",
    ".npy": "ids",
}
_COMPRESSIBLE = ("json", "csv", "warc", "text")
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_STATE_KEYS = "etag lastmodified last_modified last-modified mtime updated md5 md5hash generation oid".split()

_STORE = Remote()


@dataclass(frozen=True)
class InputFile:
    """One file, with its size and state when it was found. A later difference is an error.

    `name` is what the user gave; errors and provenance use it. `path` is its place on this machine, or its URL. `modified` is the
    modification time (ns), or for a URL a number from what its server says (ETag, time). It is 0 if the path already identifies the
    content (a download cache), because its times differ between machines.
    """

    name: str
    path: str
    size: int
    modified: int

    @classmethod
    def found_at(cls, path: str, name: str | None = None, *, check_time: bool = True) -> InputFile:
        """The file as it is now. Raises DataError if it is missing."""
        if is_url(path):
            return cls(name or without_secrets(path), path, *_asked(path, _state_of))
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"{name or path}: cannot be read ({error.strerror})") from error
        return cls(name or path, path, status.st_size, status.st_mtime_ns if check_time else 0)

    @property
    def is_remote(self) -> bool:
        """Whether the path is a URL."""
        return is_url(self.path)

    @property
    def compression(self) -> str:
        """`.gz`, `.bz2`, `.xz`, `.zst` or nothing."""
        suffix = self._suffixes[-1]
        return suffix if suffix in COMPRESSED_SUFFIXES else ""

    @property
    def suffix(self) -> str:
        """The suffix that says what it holds, in lower case, without that of the compression."""
        return self._suffixes[-2] if self.compression else self._suffixes[-1]

    @property
    def _suffixes(self) -> list[str]:
        plain = self.path.split("::")[0].partition("?")[0] if self.is_remote else self.path
        return ["", "", *(suffix.lower() for suffix in Path(plain).suffixes)]

    def kind(self, ids_dtype: str = "") -> str:
        """`json`, `csv`, `warc`, `parquet`, `arrow`, `ids` or `text`."""
        kind = "ids" if self.suffix == ".bin" and ids_dtype else _KINDS.get(self.suffix, "text")
        return kind if not self.compression or kind in _COMPRESSIBLE else "text"

    @property
    def is_divisible(self) -> bool:
        """Whether it can be read from any position: some https servers cannot do that."""
        return not self.compression and not self.path.startswith(("http://", "https://"))

    def open(self, at_random: bool = False) -> BinaryIO:
        """The file's bytes, unbuffered if it is local. `at_random`: for readers that jump. `text_inputs.reading` handles the errors."""
        if self.is_remote:
            return _STORE.open(self.path, at_random or self.is_divisible)
        return open(self.path, "rb", buffering=0)

    def refuse_changes(self) -> None:
        """Raise DataError if the file was changed since it was found."""
        now = InputFile.found_at(self.path, self.name, check_time=bool(self.modified))
        if now.size != self.size or now.modified != self.modified:
            raise DataError(f"{self.name}: was changed during the preparation; leave the input alone and start with --restart")


def _state_of(system: Any, path: str) -> tuple[int, int]:
    """The size, and a number that changes with the content if the server shows that."""
    system.invalidate_cache()
    found = system.info(path)
    if found.get("type") == "directory":
        raise IsADirectoryError(path)
    told = sorted((key.lower(), str(value)) for key, value in found.items() if key.lower() in _STATE_KEYS)
    return found.get("size") or 0, int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:7], "big")


def _asked(url: str, question: Callable[[Any, str], Any]) -> Any:
    """See `Remote.ask`. Raises DataError."""
    try:
        return _STORE.ask(url, question)
    except FileNotFoundError as error:
        raise DataError(f"{without_secrets(url)}: no such input file") from error


def find_inputs(patterns: Sequence[str]) -> list[InputFile]:
    """The files that `patterns` name, sorted. A pattern is a file, a glob (`**` descends), a folder, or a URL of one of these.

    A file that two patterns name is taken once, whatever they call its folder. Hidden files and folders in a folder are left out, links to
    folders are not followed, and a glob's folders are not descended into without `**`. A line on standard error says how many. Raises
    DataError for a pattern that gives no file, and for a link to nothing.
    """
    found: set[str] = set()
    for pattern in patterns:
        if is_url(pattern):
            found.update(_asked(pattern, functools.partial(_remote_files, pattern)))
            continue
        # An existing name is taken literally. Otherwise nobody could give a file called "a[1].txt".
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        # Not os.path.normpath: it takes link/../a.txt for a.txt, which is another file if the link leads elsewhere.
        files = [str(Path(match)) for match in matches if _is_file(match)]
        if os.path.isdir(pattern):
            files = _files_below(str(Path(pattern)))
        elif (folders := sum(map(os.path.isdir, matches))) and "**" not in pattern:
            say(f"{pattern}: left out {folders} folders; name them, or descend by **", to_errors=True)
        if not files:
            hint = " (a folder without files)" if os.path.isdir(pattern) else ""
            raise DataError(f"{pattern}: no such input file{hint}")
        found.update(files)
    return [InputFile.found_at(name) for name in sorted(_once(found))]


def folders_taken(pattern: str) -> list[str]:
    """The local folders of which `find_inputs` takes every file, also below them: `DIR`, `DIR/**` or `DIR/**/*`."""
    if os.path.isdir(pattern):
        return [pattern]
    above, stars, below = pattern.partition("**")
    return glob.glob(above or ".") if stars and below in ("", "/", "/*") else []


def _is_file(path: str) -> bool:
    """Whether it is a regular file. Raises DataError for a link to nothing, as a data set that was fetched in part has."""
    if os.path.islink(path) and not os.path.exists(path):
        raise DataError(f"{path}: is a link to {os.readlink(path)}, which is missing; fetch that file, or remove the link")
    return os.path.isfile(path)


def _once(names: set[str]) -> Iterator[str]:
    """The names, less those of files that have another one: `c/a` and `/data/c/a`. Links within a folder are files of their own."""
    places: set[tuple[str, str]] = set()
    real = functools.cache(os.path.realpath)  # it asks the storage about each part of the path; folders have many files
    for name in sorted(names):
        folder, base = os.path.split(name)
        place = (folder, base) if is_url(name) else (real(folder), base)
        if place not in places:
            places.add(place)
            yield name


def _remote_files(pattern: str, system: Any, path: str) -> list[str]:
    """The URLs that a URL stands for: itself, the files below it, or what matches it."""
    if "::" in pattern:
        return [pattern]
    # An https query (a signed URL, say) has question marks that are not patterns.
    if glob.has_magic(path) and not (path.startswith("http") and not {"*", "["} & set(path)):
        paths = [name for name, found in system.glob(path, detail=True).items() if found["type"] == "file"]
    elif not path.startswith("http") and system.isdir(path):
        paths = [name for name in system.find(path) if not any(part.startswith(".") for part in name[len(path) :].split("/"))]
    else:
        return [pattern]
    if not paths:
        raise FileNotFoundError(pattern)
    return [system.unstrip_protocol(name) for name in paths]


def _files_below(folder: str) -> list[str]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    found, hidden, links = [], 0, 0
    for parent, folders, names in os.walk(folder, onerror=refuse):
        shown_folders = [name for name in folders if not name.startswith(".")]
        followed = [name for name in shown_folders if not os.path.islink(os.path.join(parent, name))]
        visible = [name for name in names if not name.startswith(".")]
        hidden += len(folders) - len(shown_folders) + len(names) - len(visible)
        links += len(shown_folders) - len(followed)
        folders[:] = followed
        found += [path for name in visible if _is_file(path := os.path.join(parent, name))]
    if hidden or links:
        line = f"{folder}: left out {hidden} hidden files and folders and {links} links to folders"
        say(line, to_errors=True)
    return found


_SIGNATURES = (
    (b"\x1f\x8b", "a gzip file: name it .gz"),
    (b"\xfd7zXZ\0", "an xz file: name it .xz"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file: name it .zst"),
    (b"PAR1", "a Parquet file: name it .parquet, uncompressed"),
    (b"ARROW1", "an Arrow file: name it .arrow, uncompressed"),
    (b"\x93NUMPY", "a NumPy file: name it .npy, uncompressed"),
    (b"PK\x03\x04", "a zip archive (.zip, .npz, .xlsx, .docx, .pt): unpack or convert it first"),
    (b"7z\xbc\xaf", "a 7z archive: unpack it first"),
    (b"Rar!\x1a\x07", "a rar archive: unpack it first"),
    (b"%PDF-1.", "a PDF: extract its text first, for instance with pdftotext"),
    (b"SQLite format 3\0", "an SQLite database: write its texts to JSON lines or Parquet first"),
    (b"\x89HDF", "an HDF5 file: write its texts to JSON lines or Parquet first"),
    (b"ORC", "an ORC file: convert it to Parquet first"),
    (b"Obj\x01", "an Avro file: convert it to Parquet or JSON lines first"),
    (b"WARC/1.", "a web archive: name it .warc"),
    (b"\xff\xfe", "UTF-16: convert it first, for instance with iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16: convert it first, for instance with iconv -f UTF-16 -t UTF-8"),
)
SIGNATURE_BYTES = 512


def known_as(head: bytes) -> str | None:
    """The binary format that a file's first bytes show, and what to do; None if the file may be plain text."""
    for signature, what in _SIGNATURES:
        if head.startswith(signature) and (signature != b"ORC" or b"\0" in head):
            return what
    if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        return "a bzip2 file: name it .bz2"
    return "a tar archive: unpack it first" if head[257:262] == b"ustar" else None


# ---- datasets ---------------------------------------------------------------------------------------------------------


def dataset_files(
    dataset: str, config: str | None = None, split: str = "train", revision: str | None = None
) -> list[InputFile]:
    """The files of one split of a Hugging Face dataset, in the order of its rows. Their names are `dataset` and their place in it.

    NAME                       downloaded into the cache of `datasets`, as Arrow files: only here
    a `save_to_disk` directory its Arrow files, as they are
    any other directory        the files that `datasets` would take for the split: Parquet, Arrow, JSON lines, text

    `revision`: a branch, tag or commit of a dataset on the Hub.

    Raises DataError if the dataset, configuration or split does not exist, or if its rows are not those of its files.
    """
    import datasets

    if int(datasets.__version__.split(".")[0]) < 4 or dataset == "pandas":
        raise DataError(f"{dataset}: may execute code that comes with the data; use datasets >= 4, and not its pandas reader")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are ours to report, in one line
    if os.path.isdir(dataset):
        if revision is not None:
            raise DataError(f"{dataset}: is a directory and has no revision {revision}; leave the revision out")
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # otherwise even local files call a server
        saved = any(Path(dataset, name).is_file() for name in ("state.json", "dataset_dict.json"))
        paths = _saved(dataset, config, split) if saved else _resolved(dataset, config, split)
        return [InputFile.found_at(path, os.path.join(dataset, os.path.relpath(path, dataset))) for path in paths]
    with _loading(dataset, "cannot be loaded", "; check the name and the network"):
        loaded = datasets.load_dataset(dataset, config, split=split, revision=revision)
    paths = _files_of(loaded, dataset)
    label = "/".join(filter(None, (dataset, config, split)))
    # The cache is addressed by content, so the time of a machine's download does not matter.
    return [InputFile.found_at(path, f"{label}/{Path(path).name}", check_time=False) for path in paths]


def _saved(dataset: str, config: str | None, split: str) -> list[str]:
    import datasets

    if config:
        raise DataError(f"{dataset}: was saved to disk and has no configurations; leave out --dataset-config")
    with _loading(dataset, "cannot be read"):
        loaded = datasets.load_from_disk(dataset)
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"{dataset}: no split {split!r}; name one of {', '.join(loaded)} with --dataset-split")
        loaded = loaded[split]
    return _files_of(loaded, dataset)


def _files_of(loaded: Any, dataset: str) -> list[str]:
    paths = [entry["filename"] for entry in loaded.cache_files]
    if not paths or loaded._indices is not None or sum(map(_rows_of, paths)) != len(loaded):
        raise DataError(
            f"{dataset}: its rows are not those of its files, all and in their order, as of a slice such as train[:5%] or after a shuffle;"
            " write what you want with save_to_disk, and name that directory"
        )
    return paths


def _rows_of(arrow: str) -> int:
    """The number of rows of an Arrow file of `datasets`, from the heads of its batches."""
    import pyarrow as pa

    with pa.memory_map(arrow) as source:
        try:
            content = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            return sum(batch.num_rows for batch in pa.ipc.open_stream(source))
        return sum(content.get_batch(number).num_rows for number in range(content.num_record_batches))


def _resolved(dataset: str, config: str | None, split: str) -> list[str]:
    import datasets

    with _loading(dataset, "cannot be read as a dataset"):
        files = datasets.load_dataset_builder(os.path.abspath(dataset), config).config.data_files or {}
    if split not in files:
        raise DataError(f"{dataset}: no split {split!r}; name one of {', '.join(files)} with --dataset-split")
    return list(files[split])


@contextlib.contextmanager
def _loading(dataset: str, problem: str, remedy: str = "") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises a great many kinds
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{dataset}: {problem} ({reason}){remedy}") from error
