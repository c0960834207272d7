"""The plan of a preparation: its inputs as they are now, the options that decide the content, and the units of work.

A unit is read, tokenized and written by one process, and kept once it is finished:

    many small files ─┐
                      ├─▶ unit 0, unit 1, unit 2, ... in the order of the documents
    one large file  ──┘   (cut at lines, row groups, record batches or ids; compressed files, csv and web archives are never cut)

The cuts depend only on the names, sizes and inner structure of the files, never on processes or machines. So these may change
from one run to the next. Units are about 1/256 of the input, between 2 and 32 MB, so that even a few files occupy all processes.
They are larger again if there would be more than 65,536 of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.data.preparation.binary_inputs import IDS_DTYPES, WHOLE, IdFile, column_parts
from pretrain.data.preparation.inputs import InputFile
from pretrain.data.shards.writer import SHARD_TOKENS
from pretrain.data.tokenizers.tokenizer import TokenizerIdentity
from pretrain.errors import ConfigError, DataError
from pretrain.transfer import Remote

_FORMAT, _VERSION = "pretrain-preparation", 3
TEXT_MODES = ("file", "line")

Span = tuple[int, int, int]
"""(number of the input file, start, stop) of a piece."""

_LEAST_BYTES, _USUAL_BYTES = 1 << 21, 1 << 25
_USUAL_UNITS, _MOST_UNITS = 1 << 8, 1 << 16
_UNIT_FILES = 4096
_FEW_DOCUMENTS = 10
"""Fewer than so many whole documents, on average, are too few for a split: with 5, one preparation in 150 would have none."""


@dataclass(frozen=True)
class Settings:
    """The options that decide the content of the output, as the command line names them (`text_mode` is --documents).

    `max_invalid` decides whether the output is made, but not its content. It may change before the work is finished.
    """

    text_field: str = "text"
    text_mode: str = "file"
    ids_field: str = ""
    ids_dtype: str = ""
    max_invalid: int = 0
    deduplicate: bool = False
    validation_fraction: float = 0.0
    fim_rate: float = 0.0
    fim_spm_rate: float = 0.5
    shard_tokens: int = SHARD_TOKENS

    def check(self) -> None:
        """Raise ConfigError for a value out of range."""
        if self.text_mode not in TEXT_MODES:
            raise ConfigError(f"--documents {self.text_mode}: expected one of {', '.join(TEXT_MODES)}")
        if not 0 <= self.validation_fraction < 1:
            raise ConfigError(f"--validation-fraction {self.validation_fraction}: expected a number in [0, 1)")
        if self.max_invalid < 0:
            raise ConfigError(f"--max-invalid {self.max_invalid}: expected at least 0")
        if self.shard_tokens < 1:
            raise ConfigError(f"--shard-tokens {self.shard_tokens}: expected at least 1")
        if not all(self.text_fields):
            raise ConfigError(f"--text-field {self.text_field!r}: expected names of fields, separated by commas")
        if self.ids_dtype and self.ids_dtype not in IDS_DTYPES:
            raise ConfigError(f"--ids-dtype {self.ids_dtype}: expected one of {', '.join(IDS_DTYPES)}")
        if "," in self.ids_field:
            raise ConfigError(f"--ids-field {self.ids_field}: expected the name of one field")
        for option, rate in (("--fim-rate", self.fim_rate), ("--fim-spm-rate", self.fim_spm_rate)):
            if not 0 <= rate <= 1:
                raise ConfigError(f"{option} {rate}: expected a number from 0 to 1")

    @property
    def text_fields(self) -> list[str]:
        return [name.strip() for name in self.text_field.split(",")]

    def changes(self, before: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
        """(option, value before, value now) of the options that change the content; options that `before` lacks are left out."""
        for name, now in dataclasses.asdict(self).items():
            if name != "max_invalid" and before.get(name, now) != now:
                yield "--documents" if name == "text_mode" else f"--{name.replace('_', '-')}", before[name], now


@dataclass(frozen=True)
class Piece:
    """A part of one input file. The kind of file decides what `start` and `stop` count (parts of tables, bytes, ids).

    `size` is about the number of its bytes in the file, for progress; `number` is that of the file.
    """

    file: InputFile
    start: int = 0
    stop: int = WHOLE
    size: int = 0
    number: int = 0


def unit_size(files: Sequence[InputFile]) -> int:
    """Bytes of input per unit."""
    total = sum(file.size for file in files)
    return max(_LEAST_BYTES, min(_USUAL_BYTES, total // _USUAL_UNITS), total // _MOST_UNITS)


def plan_units(files: Sequence[InputFile], settings: Settings, unit_bytes: int) -> list[list[Span]]:
    """The pieces of each unit. A file that is cut shares no unit with another file."""
    units: list[list[Span]] = []
    group: list[Span] = []
    size = 0
    for number, file in enumerate(files):
        parts = _parts(file, settings, unit_bytes)
        if group and (len(parts) > 1 or size + file.size > unit_bytes or len(group) == _UNIT_FILES):
            units.append(group)
            group, size = [], 0
        if len(parts) > 1:
            units += [[(number, start, stop)] for start, stop in parts]
        else:
            group.append((number, 0, WHOLE))
            size += file.size
    return [*units, group] if group else units


def _parts(file: InputFile, settings: Settings, unit_bytes: int) -> list[tuple[int, int]]:
    kind = file.kind(settings.ids_dtype)
    if file.size <= unit_bytes or kind in ("csv", "warc") or (kind == "text" and settings.text_mode == "file"):
        return [(0, WHOLE)]
    if kind in ("parquet", "arrow"):
        return Remote().persist(file.path, lambda: column_parts(file, kind, unit_bytes))
    if kind != "ids" and not file.is_divisible:
        return [(0, WHOLE)]
    length = len(IdFile(file, settings.ids_dtype)) if kind == "ids" else file.size
    count = -(-file.size // unit_bytes)
    bounds = [length * part // count for part in range(count + 1)]
    return list(zip(bounds, bounds[1:]))


@dataclass(frozen=True)
class PreparationPlan:
    """Equal plans give equal output, byte for byte, however often the work is interrupted and whichever process does it."""

    settings: Settings
    tokenizer: TokenizerIdentity
    unit_bytes: int
    inputs: tuple[InputFile, ...]
    units: tuple[tuple[Span, ...], ...]

    @classmethod
    def make(
        cls, settings: Settings, tokenizer: TokenizerIdentity, inputs: Sequence[InputFile], unit_bytes: int | None = None
    ) -> PreparationPlan:
        """`unit_bytes` (default: by the size of the input) is for tests. Raises DataError for a file that cannot be read."""
        unit_bytes = unit_bytes or unit_size(inputs)
        units = plan_units(inputs, settings, unit_bytes)
        return cls(settings, tokenizer, unit_bytes, tuple(inputs), tuple(map(tuple, units)))

    def to_json(self) -> str:
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "settings": dataclasses.asdict(self.settings),
            "tokenizer": self.tokenizer,
            "unit_bytes": self.unit_bytes,
            "inputs": [(file.name, file.size, file.modified) for file in self.inputs],  # a path may be a URL with a password
            "units": self.units,
        }
        return json.dumps(content, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: bytes, name: str) -> PreparationPlan:
        """Read the JSON of `to_json`. Raises DataError, naming the file, for anything that this version did not write."""
        try:
            content = json.loads(text)
            if (content["format"], content["version"]) != (_FORMAT, _VERSION):
                raise ValueError("another format or version")
            return cls(
                Settings(**content["settings"]),
                TokenizerIdentity(*content["tokenizer"]),
                content["unit_bytes"],
                tuple(InputFile(name, name, size, modified) for name, size, modified in content["inputs"]),
                tuple(tuple((number, start, stop) for number, start, stop in unit) for unit in content["units"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"{name}: not a plan of this version of the program ({reason}); remove {Path(name).parent}, and start again"
            ) from error

    @property
    def cuts_tail(self) -> bool:
        """Whether the end of each document becomes the validation split: where a share of whole documents would be few, or none."""
        settings, fraction = self.settings, self.settings.validation_fraction
        if not fraction or len(self.inputs) * min(fraction, 1 - fraction) >= _FEW_DOCUMENTS:
            return False
        return settings.text_mode == "file" and all(file.kind(settings.ids_dtype) == "text" for file in self.inputs)

    @property
    def sha256(self) -> str:
        """A hash that is equal for all plans with the same output."""
        settings = dataclasses.replace(self.settings, max_invalid=0)
        return hashlib.sha256(dataclasses.replace(self, settings=settings).to_json().encode()).hexdigest()

    @property
    def pieces(self) -> list[tuple[Piece, ...]]:
        """The pieces of each unit."""
        counts = Counter(number for unit in self.units for number, _, _ in unit)
        sizes = {number: self.inputs[number].size // count for number, count in counts.items()}
        return [tuple(Piece(self.inputs[n], start, stop, sizes[n], n) for n, start, stop in unit) for unit in self.units]

    def differences(self, now: PreparationPlan) -> Iterator[str]:
        """The differences from this plan, one phrase each."""
        for option, before, after in now.settings.changes(dataclasses.asdict(self.settings)):
            yield f"{option} was {before!r} and is {after!r}"
        if self.tokenizer != now.tokenizer:
            difference = self.tokenizer.difference(now.tokenizer)
            yield f"they have {difference}" if difference and "one tokenizer" in difference else "the tokenizer has changed"
        before_files = {file.name: file for file in self.inputs}
        after_files = {file.name: file for file in now.inputs}
        for name in sorted(before_files.keys() | after_files.keys()):
            if name not in after_files or name not in before_files:
                yield f"{name} is {'new' if name in after_files else 'gone'}"
            elif before_files[name].size != after_files[name].size:
                yield f"{name} had {before_files[name].size} bytes and has {after_files[name].size}"
            elif before_files[name].modified != after_files[name].modified:
                yield f"{name} was modified"
        if self.unit_bytes != now.unit_bytes or (self.units != now.units and self.inputs == now.inputs):
            yield "the cut into units has changed"
