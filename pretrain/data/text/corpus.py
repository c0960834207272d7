"""Where the text stream takes its documents from: local files, or a dataset of the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from pretrain.data.preparation.documents import Document, read_documents
from pretrain.data.preparation.inputs import find_inputs
from pretrain.errors import ConfigError, DataError

Place = tuple[int, int]
"""(file, row in the file), both from 0, rows without text included."""


class Corpus(Protocol):
    """Documents in one fixed order, readable from the middle."""

    def read(self, start: Place) -> Iterator[tuple[Place, Document]]:
        """Documents with their places, rising, from `start` or some place before it on."""

    def identity(self) -> dict[str, Any]:
        """JSON that changes when the documents do, as far as can be told without reading them."""


@dataclass(frozen=True)
class FileCorpus:
    """Local files, read by `read_documents`. Raises DataError for a file whose size has changed since `find`."""

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    text_field: str = "text"
    text_mode: str = "file"

    @classmethod
    def find(cls, patterns: Sequence[str], text_field: str = "text", text_mode: str = "file") -> FileCorpus:
        """The files that the glob `patterns` match. Raises DataError for a pattern that matches none."""
        if text_mode not in ("file", "line"):
            raise ConfigError(f"text_mode {text_mode}: expected file or line")
        found = find_inputs(patterns)
        if remote := next((file.name for file in found if file.is_remote), None):
            raise ConfigError(f"data.text.input: {remote} is a URL; prepare it with tools/prepare_data.py, which reads URLs")
        return cls(tuple(Path(file.path) for file in found), tuple(file.size for file in found), text_field, text_mode)

    def read(self, start: Place) -> Iterator[tuple[Place, Document]]:
        for number in range(start[0], len(self.files)):
            self._check_size(number)
            documents = read_documents([self.files[number]], self.text_field, self.text_mode)
            for row, document in enumerate(documents):
                yield (number, row), document

    def identity(self) -> dict[str, Any]:
        # Names below their common folder: a corpus that is moved or mounted elsewhere is still the same.
        root = os.path.commonpath([file.absolute().parent for file in self.files])
        names = [os.path.relpath(file.absolute(), root) for file in self.files]
        listing = json.dumps(list(zip(names, self.sizes))).encode()
        return {
            "files": len(self.files),
            "names_and_sizes_sha256": hashlib.sha256(listing).hexdigest(),
            "text_field": self.text_field,
            "text_mode": self.text_mode,
        }

    def _check_size(self, number: int) -> None:
        file, size = self.files[number], self.sizes[number]
        try:
            now = file.stat().st_size
        except OSError as error:
            raise DataError(f"{file}: cannot be read any more ({error.strerror}); restore it and resume") from error
        if now != size:
            raise DataError(f"{file}: has {now:,} bytes, {size:,} when the run began; restore it and resume")


@dataclass(frozen=True)
class HubCorpus:
    """A dataset of the Hugging Face Hub, or of a local folder, streamed by `datasets`. One file, as far as places go.

    Without a `revision` a dataset that changes on the Hub is not noticed by `identity`.
    """

    name: str
    text_field: str = "text"
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    data_files: tuple[str, ...] | None = None

    def read(self, start: Place) -> Iterator[tuple[Place, Document]]:
        row = start[1]
        rows = self._guarded(lambda: iter(self._open().skip(row)), row)
        while (values := self._guarded(lambda: next(rows, None), row)) is not None:
            yield (0, row), Document(self._text(values, row), self.name, f"row {row + 1}")
            row += 1

    def identity(self) -> dict[str, Any]:
        return {**asdict(self), "data_files": list(self.data_files) if self.data_files else None}

    def _open(self) -> Any:
        import datasets

        if int(datasets.__version__.split(".")[0]) < 4 or self.name == "pandas":
            raise DataError(
                f"{self.name}: may execute code that comes with the data; use datasets >= 4, and not its pandas reader"
            )
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are ours to report, in one line
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # a call to a server for every epoch
        files = list(self.data_files) if self.data_files else None
        options = {"split": self.split, "revision": self.revision, "data_files": files, "streaming": True}
        return datasets.load_dataset(self.name, self.config, **options)

    def _text(self, values: dict[str, Any], row: int) -> str:
        text = values.get(self.text_field)
        if not isinstance(text, str):
            found = f"is {type(text).__name__}" if self.text_field in values else f"is not among {', '.join(sorted(values))}"
            raise DataError(f"{self.name}, row {row + 1}: text field {self.text_field!r} {found}; name a field that holds text")
        return text

    def _guarded(self, read: Callable[[], Any], row: int) -> Any:
        try:
            return read()
        except DataError:
            raise
        except Exception as error:  # of datasets, huggingface_hub, fsspec, pyarrow and the HTTP library: no common base
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{self.name}, row {row + 1}: cannot be read ({reason}); check the name and the network") from error
