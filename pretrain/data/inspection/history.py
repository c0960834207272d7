"""Which configuration decided, or will decide, each step of a run.

A run directory has a line in starts.jsonl for each start of its processes. A start continues from a checkpoint, perhaps an
earlier one than the run had reached. From there on it alone decides:

    starts      0 ───────────────────▶ 60          the run went back to step 40 with another batch size
                              40 ───────────▶ 100
    stretches   0 ──────────▶ 40 ───────────▶ 100

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config.schema import Config
from pretrain.config.written import from_recorded
from pretrain.data.samples import Samples
from pretrain.data.sources import batch_schedule, check_data, open_sources, open_stream, source_name, with_prepared_text
from pretrain.data.stream import BatchSchedule, Stream, micro_steps_of
from pretrain.errors import ConfigError, DataError
from pretrain.observe.metrics import METRICS_FILE, STARTS_FILE
from pretrain.transfer import is_url


@dataclass(frozen=True)
class Start:
    """The point where processes began to work: after `step` steps and `samples`. Paths in `config` are absolute.

    `fingerprints`: the content of each source; empty for a plan.
    """

    step: int
    samples: int
    data_size: int
    config: Config
    fingerprints: tuple[str, ...] = ()


class Stretch:
    """Steps `start.step` + 1 .. `last` of a run, which one start decides."""

    def __init__(self, start: Start, last: int, opened: dict[str, list[Samples]]) -> None:
        self.start, self.last, self.config = start, last, start.config
        self._opened = opened  # shared by the stretches of a run, because most cut the same data alike

    @property
    def first(self) -> int:
        return self.start.step + 1

    @functools.cached_property
    def schedule(self) -> BatchSchedule:
        return batch_schedule(self.config)

    @functools.cached_property
    def stream(self) -> Stream:
        """The stream, opened on first use. Raises ConfigError for a run on pairs, and DataError for missing data."""
        data = self.config.data
        if data.pairs is not None:
            raise ConfigError(
                "the run reads sentence pairs (data.pairs), which inspection does not show; batches are in metrics.jsonl"
            )
        config = with_prepared_text(self.config)
        key = repr(dataclasses.replace(data, stages=[], seed=None, validation=[]))
        if key not in self._opened:
            self._opened[key] = open_sources(config)
        for source, fingerprint in zip(self._opened[key], self.start.fingerprints):
            if source.data.fingerprint != fingerprint:
                raise DataError(
                    f"{source.data.path}: steps {self.first} to {self.last} read other data; it was prepared again since: "
                    "restore it to see them"
                )
        return open_stream(config, self._opened[key])

    def consumed(self, step: int) -> int:
        """Samples before the end of a step of this stretch; step `first` - 1 is allowed."""
        return self.schedule.after(self.start.samples, step - self.start.step)

    def step_of(self, position: int) -> int:
        """The step that takes a stream position, which lies at or after the start of the stretch."""
        return self.schedule.step_of(position, self.start.samples, self.start.step)


@dataclass(frozen=True)
class History:
    """A run, or a planned one. `current`: the steps that it has made; `folder`: None for a plan."""

    name: str
    stretches: list[Stretch]
    current: int
    folder: Path | None = None

    @classmethod
    def read(cls, folder: Path) -> History:
        """The history of a run directory. Raises DataError or ConfigError naming what is missing or damaged."""
        if not folder.is_dir():
            raise DataError(f"{folder}: no such run directory")
        starts = _found(_read_starts(folder / STARTS_FILE))
        stretches: list[Stretch] = []
        opened: dict[str, list[Samples]] = {}
        for start in reversed(starts):
            last = stretches[0].start.step if stretches else start.config.run.steps
            if start.step < last:
                stretches.insert(0, Stretch(start, last, opened))
        if not stretches:  # the only start belongs to a run that was finished elsewhere
            stretches = [Stretch(starts[-1], starts[-1].config.run.steps, opened)]
        return cls(str(folder), stretches, _current_step(folder, starts[-1].step), folder)

    @classmethod
    def planned(cls, config: Config, ranks: int | None = None) -> History:
        """A run that has not started, on `ranks` data-parallel ranks (default: as `parallel` says, or one).

        Raises ConfigError if the ranks cannot share the batches.
        """
        ranks = ranks or (config.parallel.replicate or 1) * (config.parallel.shard or 1)
        micro_steps_of(config, ranks)
        data = config.data
        seed = config.run.seed if data.seed is None else data.seed
        config = dataclasses.replace(config, data=dataclasses.replace(data, seed=seed))
        check_data(config)
        name = f"{Path(config.run.dir) / str(config.run.name)} (planned)"
        return cls(name, [Stretch(Start(0, 0, ranks, config), config.run.steps, {})], 0)

    @property
    def last(self) -> int:
        """The run's last step, past or future."""
        return self.stretches[-1].last

    def stretch_of(self, step: int) -> Stretch:
        """The stretch that a step belongs to. Raises DataError for a step that the run does not have."""
        if step < 1:
            raise DataError(f"step {step}: the steps of a run are counted from 1")
        if step > self.last:
            raise DataError(f"step {step} is beyond the last step of {self.name}, {self.last}; the run ends there (run.steps)")
        if step < self.stretches[0].first:
            raise DataError(
                f"step {step}: {self.name} begins at step {self.stretches[0].first}, with a checkpoint of another run; inspect that run"
            )
        return next(stretch for stretch in self.stretches if step <= stretch.last)

    def logged(self, step: int) -> dict[str, Any] | None:
        """The record of a past step in metrics.jsonl; None if it was not logged.

        The file is read from its end: a run that went back logs steps again, and the last record counts.
        """
        path = None if self.folder is None else self.folder / METRICS_FILE
        if path is None or step > self.current or not path.exists():
            return None
        for line in reversed(path.read_bytes().splitlines()):
            record = _record(line, step)
            if record is not None:
                return record if record["step"] == step else None
        return None


def _record(line: bytes, until: int) -> dict[str, Any] | None:
    """The record of a line of metrics.jsonl if its step is at most `until`. Other lines are not decoded: there may be millions."""
    prefix, comma = b'{"step": ', line.find(b",")
    if line.startswith(prefix) and line[len(prefix) : comma].isdigit() and int(line[len(prefix) : comma]) > until:
        return None
    try:
        record = json.loads(line)
    except ValueError:  # torn by a crash; the step comes again
        return None
    return record if isinstance(record, dict) and record.get("step", until + 1) <= until else None


def _read_starts(path: Path) -> list[Start]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; a run directory has it from its first start on "
            "(for a planned run, give --config)"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}): damaged; restore it") from error
    starts = []
    for number, line in enumerate(lines[:-1], start=1):  # text after the last line's end was torn before any step was made
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
            folder = Path(record["folder"])
            config = from_recorded(record["config"], place)
            fingerprints = tuple(record["fingerprints"])
            starts.append(
                Start(record["step"], record["samples"], record["data_size"], _absolute(config, folder), fingerprints)
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: not the record of a start ({error!r})") from error
    if not starts:
        raise DataError(f"{path}: empty: the run has not started; give --config")
    return starts


def _absolute(config: Config, folder: Path) -> Config:
    """The configuration with absolute paths of its data. They were relative to the folder in which the run was started."""
    data = config.data
    cache = dataclasses.replace(data.cache, dir=None if data.cache.dir is None else str(folder / data.cache.dir))
    moved = {
        name: [dataclasses.replace(s, name=source_name(s), path=_placed(s.path, folder)) for s in getattr(data, name)]
        for name in ("sources", "validation")
    }
    text = data.text
    if text.tokenizer is not None:
        own = dataset if (dataset := text.dataset) is None or not (folder / dataset).is_dir() else str(folder / dataset)
        inputs = [_placed(pattern, folder) for pattern in text.input]
        text = dataclasses.replace(text, input=inputs, dataset=own, tokenizer=str(folder / text.tokenizer))
    pairs = None if data.pairs is None else str(folder / data.pairs)
    return dataclasses.replace(config, data=dataclasses.replace(data, cache=cache, text=text, pairs=pairs, **moved))


def _found(starts: list[Start]) -> list[Start]:
    """The starts; a source that was moved since gets the place where later starts had it."""
    places = {f: source.path for start in starts for f, source in zip(start.fingerprints, start.config.data.sources)}

    def moved(start: Start) -> Start:
        data, known = start.config.data, dict(enumerate(start.fingerprints))
        sources = [
            source if is_url(source.path) or Path(source.path).is_dir() else dataclasses.replace(source, path=places[known[i]])
            for i, source in enumerate(data.sources)
        ]
        config = dataclasses.replace(start.config, data=dataclasses.replace(data, sources=sources))
        return dataclasses.replace(start, config=config)

    return [moved(start) if start.fingerprints else start for start in starts]


def _placed(path: str, folder: Path) -> str:
    return path if is_url(path) else str(folder / path)


def _current_step(folder: Path, started: int) -> int:
    """The steps that the run has made, by its status."""
    path = folder / "status.json"
    try:
        return int(json.loads(path.read_bytes())["step"])
    except FileNotFoundError:
        return started
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
