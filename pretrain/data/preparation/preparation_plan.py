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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pretrain.data.preparation.binary_inputs import WHOLE, IdFile, check_ids_options, column_parts
from pretrain.data.preparation.documents import TEXT_MODES, DocumentOptions
from pretrain.data.preparation.encode import check_fim_rates
from pretrain.data.preparation.inputs import InputFile
from pretrain.data.shards.transfer import Remote
from pretrain.data.shards.writer import SHARD_TOKENS
from pretrain.data.tokenizers.tokenizer import TokenizerIdentity
from pretrain.errors import ConfigError, DataError

Span = tuple[int, int, int]
"""(number of the input file, start, stop) of a piece."""

_LEAST_BYTES, _USUAL_BYTES = 1 << 21, 1 << 25
_USUAL_UNITS, _MOST_UNITS = 1 << 8, 1 << 16
UNIT_FILES = 4096


def unit_size(files: Sequence[InputFile]) -> int:
    """Bytes of input per unit."""
    total = sum(file.size for file in files)
    return max(_LEAST_BYTES, min(_USUAL_BYTES, total // _USUAL_UNITS), total // _MOST_UNITS)


def plan_units(files: Sequence[InputFile], options: DocumentOptions, unit_bytes: int) -> list[list[Span]]:
    """The pieces of each unit. A file that is cut shares no unit with another file."""
    units: list[list[Span]] = []
    group: list[Span] = []
    size = 0
    for number, file in enumerate(files):
        parts = _parts(file, options, unit_bytes)
        if group and (len(parts) > 1 or size + file.size > unit_bytes or len(group) == UNIT_FILES):
            units.append(group)
            group, size = [], 0
        if len(parts) > 1:
            units += [[(number, start, stop)] for start, stop in parts]
        else:
            group.append((number, 0, WHOLE))
            size += file.size
    return [*units, group] if group else units


def _parts(file: InputFile, options: DocumentOptions, unit_bytes: int) -> list[tuple[int, int]]:
    kind = file.kind(options.ids_dtype)
    if file.size <= unit_bytes or kind in ("csv", "warc") or (kind == "text" and options.text_mode == "file"):
        return [(0, WHOLE)]
    if kind in ("parquet", "arrow"):
        return Remote().persist(file.path, lambda: column_parts(file, kind, unit_bytes))
    if kind != "ids" and not file.is_divisible:
        return [(0, WHOLE)]
    length = len(IdFile(file, options.ids_dtype)) if kind == "ids" else file.size
    count = -(-file.size // unit_bytes)
    bounds = [length * part // count for part in range(count + 1)]
    return list(zip(bounds, bounds[1:]))


_FORMAT, _VERSION = "pretrain-preparation", 2
_NO_CONTENT = ("max_invalid",)
"""Settings that decide whether the output is made, but not its content. They may change before the work is finished."""


@dataclass(frozen=True)
class Settings:
    """The options that decide the content of the output, as the command line names them (`text_mode` is --documents)."""

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
        if not all(self.documents.text_fields):
            raise ConfigError(f"--text-field {self.text_field!r}: expected names of fields, separated by commas")
        check_ids_options(self.ids_field, self.ids_dtype)
        check_fim_rates(self.fim_rate, self.fim_spm_rate)

    @property
    def documents(self) -> DocumentOptions:
        return DocumentOptions(self.text_field, self.text_mode, self.ids_field, self.ids_dtype, self.max_invalid)

    def difference(self, before: Mapping[str, object]) -> str | None:
        """A phrase for an option that differs from a manifest's record of its preparation; None if no difference is known."""
        for field in dataclasses.fields(self):
            now = getattr(self, field.name)
            if field.name not in _NO_CONTENT and field.name in before and before[field.name] != now:
                return f"{option_of(field.name)} {before[field.name]!r} instead of {now!r}"
        return None


def option_of(setting: str) -> str:
    """The name of a setting on the command line."""
    return "--documents" if setting == "text_mode" else f"--{setting.replace('_', '-')}"


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
        units = plan_units(inputs, settings.documents, unit_bytes)
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
            raise DataError(f"{name}: not a plan of this program ({reason}); start again with --restart") from error

    @property
    def sha256(self) -> str:
        """A hash that is equal for all plans with the same output."""
        settings = dataclasses.replace(self.settings, **{name: getattr(Settings, name) for name in _NO_CONTENT})
        return hashlib.sha256(dataclasses.replace(self, settings=settings).to_json().encode()).hexdigest()

    @property
    def timeless_sha256(self) -> str:
        """Like `sha256`, but equal for inputs that differ only in their modification times."""
        return dataclasses.replace(self, inputs=tuple(dataclasses.replace(file, modified=0) for file in self.inputs)).sha256

    @property
    def cuts_tail(self) -> bool:
        """Whether the corpus is one document of plain text whose end becomes the validation split."""
        files = self.inputs if self.settings.validation_fraction else ()
        return len(files) == 1 and files[0].kind(self.settings.ids_dtype) == "text" and self.settings.text_mode == "file"

    def differences(self, now: PreparationPlan) -> Iterator[str]:
        """The differences from this plan, one phrase each."""
        for field in dataclasses.fields(Settings):
            if field.name in _NO_CONTENT:
                continue
            before, after = getattr(self.settings, field.name), getattr(now.settings, field.name)
            if before != after:
                yield f"{option_of(field.name)} was {before!r} and is {after!r}"
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
