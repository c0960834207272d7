"""Your own code in a run: callbacks that measure, stop the run or keep checkpoints. A script that starts the run passes them.

A configuration cannot name code, so that nothing that is read is executed. docs/extending.md shows the script.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pretrain.checkpoint import files
from pretrain.config.schema import Config
from pretrain.distributed.mesh import Mesh
from pretrain.errors import CheckpointError, ConfigError, TrainingError, UserError, line_of, shown
from pretrain.observe.logs import TRACEBACKS
from pretrain.observe.metrics import StepRecord
from pretrain.storage import copy_tree, exists, flush

log = logging.getLogger(__name__)


@dataclass
class RunHandle:
    """A run as a callback sees it, with the requests that a callback may make."""

    config: Config
    """The resolved configuration (`Plan.config`). Some keys may still be null or `auto`, such as `parallel.strategy`."""
    directory: Path
    """The run's directory, on storage that all nodes share."""
    history: list[StepRecord]
    """The logged steps up to the one that this start continues from. A callback restores its state from them. Only the main rank has them."""
    mesh: Mesh
    """This rank's place: `mesh.data_rank` of `mesh.data_size` ranks that see different samples, and sums over them."""
    losses: Callable[..., Tensor]
    """`losses(tokens_BT=..., targets_BT=...)`: the summed loss of each sample in nats, without gradients, in the layout of the run. Every rank
    must make the same number of calls, because all ranks gather sharded weights together."""
    tokenizer_path: Path | str
    """The tokenizer of the run's data; of targets, if it translates."""
    came_through: Callable[[Path], bool]
    """Whether a checkpoint of this run, or a copy of one, is of the time line that this start continues."""
    step: int = 0
    """The step that this start continues from."""
    stop_reason: str | None = None
    wants_save: bool = False
    folders: set[Path] = field(default_factory=set)
    """Folders in which a callback keeps files of its own."""

    @property
    def is_main(self) -> bool:
        return self.mesh.ranks.is_main

    def stop(self, reason: str) -> None:
        """End the run in order before the next step: it is saved, its status is `stopped`, and its exit code is 0."""
        self.stop_reason = self.stop_reason or reason

    def save(self) -> None:
        """Save a checkpoint before the next step, unless this step is saved already."""
        self.wants_save = True


class Callback:
    """Subclass it and override what you need. An exception in a method ends the run on all ranks."""

    def start(self, run: RunHandle) -> None:
        """Called on all ranks, before the first step of this start. Raise ConfigError if the callback does not fit the run."""

    def evaluate(self, run: RunHandle, step: int) -> dict[str, float]:
        """Called on all ranks together, after each step. Return numbers by name for `evaluation` of the record, or {} if nothing is due."""
        return {}

    def on_record(self, run: RunHandle, record: StepRecord) -> None:
        """Called on the main rank, after a step was logged."""

    def on_save(self, run: RunHandle, step: int, checkpoint: Path) -> None:
        """Called on the main rank, after a checkpoint was saved."""

    def close(self) -> None:
        """Called on all ranks, after the last step, even if the run failed."""


class Callbacks:
    """The callbacks of a run, called one after the other.

    A failure becomes `problem`, and no callback is called any more. All ranks raise it together before the next step, so that none waits
    for this one in vain. Only a failure in `evaluate`, where several ranks compute together, ends this rank at once, and the others with it.
    """

    def __init__(self, callbacks: Sequence[Callback], run: RunHandle) -> None:
        self.run = run
        self.problem: UserError | None = None
        self.started: list[Callback] = []
        for callback in callbacks:
            self._try(callback, "start", lambda one: one.start(run))
            if self.problem is not None:
                return
            self.started.append(callback)

    def evaluate(self, step: int) -> dict[str, float]:
        """The numbers of all callbacks."""
        found: dict[str, float] = {}

        def measure(callback: Callback) -> None:
            measured = _numbers_of(callback, callback.evaluate(self.run, step))
            if twice := found.keys() & measured.keys():
                raise ConfigError(f"two callbacks measure '{min(twice)}'; give one of the numbers another name")
            found.update(measured)

        # Also after the main rank's failure in `on_save`, of which the others do not know yet: they compute together here.
        for callback in self.started:
            if not self._try(callback, "evaluate", measure):
                # At once: the others may be in a collective of this callback, and would take this rank's next one for it.
                ranks = self.run.mesh.ranks
                if ranks.world_size > 1:
                    raise self.problem.on_rank(ranks.rank)
                return {}
        return found

    def on_record(self, record: StepRecord) -> None:
        self._each("on_record", lambda one: one.on_record(self.run, record))

    def on_save(self, step: int, checkpoint: Path) -> None:
        self._each("on_save", lambda one: one.on_save(self.run, step, checkpoint))

    def close(self) -> None:
        """Close what was started, once, even after a failure: a callback may hold files."""
        started, self.started = self.started, []
        for callback in started:
            self._try(callback, "close", lambda one: one.close())

    def _each(self, method: str, call: Callable[[Callback], None]) -> None:
        for callback in self.started:
            if self.problem is None:
                self._try(callback, method, call)

    def _try(self, callback: Callback, method: str, call: Callable[[Callback], None]) -> bool:
        """Call it; the first failure is the problem. Whether it succeeded."""
        name = f"{type(callback).__name__}.{method}"
        try:
            call(callback)
            return True
        except UserError as error:
            self.problem = self.problem or error
        except SystemExit:  # the other ranks would wait for this one
            line = f"the callback {name} called sys.exit; call run.stop(reason), which ends the run in order on all ranks"
            self.problem = self.problem or TrainingError(line)
        except Exception as error:
            logging.getLogger(TRACEBACKS).exception("%s", name)
            line = f"the callback {name}: {type(error).__name__}: {error}; the traceback is in this rank's log"
            self.problem = self.problem or TrainingError(line)
        return False


def _numbers_of(callback: Callback, returned: Any) -> dict[str, float]:
    """What `evaluate` returned, as numbers by name."""
    where = f"the callback {type(callback).__name__}.evaluate"
    if not isinstance(returned, (dict, type(None))):
        raise ConfigError(f"{where} returned {shown(returned)}; return numbers by name, such as {{'accuracy': 0.5}}, or {{}}")
    if odd := [name for name in returned or {} if not isinstance(name, str) or not name]:
        raise ConfigError(f"{where} returned a number under {shown(odd[0])}; its name must be a str that is not empty")
    return {name: _number(value, f"{where} returned", name) for name, value in (returned or {}).items()}


def _number(value: Any, where: str, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: of torch
        raise ConfigError(f"{where} {shown(value)} under '{name}', which is no number: {line_of(error)}") from error


# ---- callbacks that many runs need ------------------------------------------------------------------------------------


class Watched:
    """A number of the records: `loss`, `evaluation/NAME`, `translation/SOURCE/bleu` (or another score), and those that validation measures.

    Numbers by source are `validation/SOURCE`, `ema_validation/SOURCE` and `bits_per_byte/SOURCE`; without `/SOURCE` it is the mean over the sources.
    """

    SCORES = ("bleu", "chrf", "cer", "wer")

    def __init__(self, metric: str, mode: str) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"mode={mode} must be min or max")
        self.metric, self.sign = metric, 1 if mode == "min" else -1
        self.was_seen = False

    def check(self, config: Config) -> None:
        """Raise ConfigError for a number that cannot be watched in this run."""
        sources = [source.name for source in config.data.validation]
        groups = ["validation", "ema_validation", "bits_per_byte"] if sources else []
        if config.optim.ema_decay is None and groups:
            groups.remove("ema_validation")
        scores = self.SCORES if config.validation.translation.every_steps else ()
        have = ["loss", *(f"{group}/{source}" for group in groups for source in sources)]
        have += [f"translation/{source}/{score}" for source in sources for score in scores]
        if self.metric not in [*have, *groups] and not (self.metric.startswith("evaluation/") and self.metric != "evaluation/"):
            raise ConfigError(
                f"the metric {self.metric} cannot be watched in this run; choose one of {', '.join([*groups, *have, 'evaluation/NAME'])}"
            )

    def of(self, record: StepRecord) -> float | None:
        """Its value in a record, with a sign so that lower is better. None if it is missing or not finite."""
        numbers = record.numbers()
        group = getattr(record, self.metric, None)
        if isinstance(group, dict) and None in group.values():  # a loss that was not finite, read back
            return None
        found = [value for name, value in numbers.items() if name == self.metric or name.startswith(f"{self.metric}/")]
        mean = sum(found) / len(found) if found else math.nan
        self.was_seen |= bool(found)
        return self.sign * mean if math.isfinite(mean) else None

    def warn_if_unseen(self, run: RunHandle, callback: Callback) -> None:
        """Warn of a metric that no record has: with a wrong name the callback has no effect."""
        if run.is_main and not self.was_seen:
            log.warning("%s did nothing: no record of this start has %s", type(callback).__name__, self.metric)


class EarlyStopping(Callback):
    """End the run when a number has not improved by more than `min_delta` for `patience` measurements in a row.

    `metric`: see `Watched`. A resumed run counts the measurements in its metrics.jsonl.
    """

    def __init__(self, patience: int, metric: str = "validation", mode: str = "min", min_delta: float = 0.0) -> None:
        if patience < 1 or min_delta < 0:
            raise ConfigError(f"EarlyStopping: patience={patience} must be at least 1, and min_delta={min_delta} at least 0")
        self.patience, self.min_delta, self.watched = patience, min_delta, Watched(metric, mode)

    def start(self, run: RunHandle) -> None:
        self.watched.check(run.config)
        self.run, self.best, self.since = run, math.inf, 0
        for record in run.history:
            self.on_record(run, record)

    def on_record(self, run: RunHandle, record: StepRecord) -> None:
        value = self.watched.of(record)
        if value is None:
            return
        if value < self.best - self.min_delta:
            self.best, self.since = value, 0
            return
        self.since += 1
        if self.since >= self.patience:
            best = self.watched.sign * self.best
            run.stop(f"{self.watched.metric} has not improved on {best:.6g} in {self.since} measurements")

    def close(self) -> None:
        self.watched.warn_if_unseen(self.run, self)


MEASURED = "measured.json"
"""In a copy of KeepBest: the metric and its value. It is no part of the checkpoint, and so the manifest does not list it."""


class KeepBest(Callback):
    """Keep the `count` best checkpoints in `folder` of the run directory, apart from those that `checkpoint.keep_last` removes.

    `metric`: see `Watched`. They are hard links if the storage has them, and take no space while the original exists. Each is a complete
    checkpoint, for `run.init_from=RUN/best/step-N` or `--checkpoint` of the tools. A step among the best is saved if it was not.

    Each copy holds its value, so that the best are known without metrics.jsonl. A copy of unknown value is never removed. One of a time line
    that the run has left is set aside, as its checkpoint is.
    """

    def __init__(self, count: int = 1, metric: str = "validation", mode: str = "min", folder: str = "best") -> None:
        if count < 1:
            raise ConfigError(f"KeepBest: count={count} must be at least 1")
        if Path(folder).name != folder or not folder.startswith("best"):  # other names are those of the run's own files
            raise ConfigError(f"KeepBest: folder={folder} must be a name that begins with best")
        self.count, self.watched, self.name = count, Watched(metric, mode), folder

    def start(self, run: RunHandle) -> None:
        self.watched.check(run.config)
        self.run, self.folder = run, run.directory / self.name
        if self.folder in run.folders:
            raise ConfigError(f"two KeepBest keep their checkpoints in {self.name}/; give one another folder=best-NAME")
        run.folders.add(self.folder)
        measured = {record.step: self.watched.of(record) for record in run.history}
        self.values = {step: value for step, value in measured.items() if value is not None}
        self.unknown: set[int] = set()
        """Steps of copies whose value nobody knows."""
        if run.is_main:
            files.discard_unfinished(self.folder)
            self._read_copies()
            self._keep_history(run.directory / "checkpoints")

    def _read_copies(self) -> None:
        """Take the values of copies that are missing in the history: metrics.jsonl may be lost. Other time lines' copies are set aside."""
        for copy in files.complete_checkpoints(self.folder):
            step = files.step_of(copy)
            if not self.run.came_through(copy):
                aside = files.set_aside(copy, "abandoned").name
                log.warning("KeepBest: the run has left the time line of %s; set aside as %s", copy, aside)
            elif step not in self.values:
                value = self._value_of(copy)
                if value is None:
                    self.unknown.add(step)
                else:
                    self.values[step] = value
        if self.unknown:
            steps, metric = sorted(self.unknown), self.watched.metric
            log.warning(
                "KeepBest: %s of steps %s in %s is unknown, so they stay there and do not count", metric, steps, self.folder
            )

    def _value_of(self, copy: Path) -> float | None:
        """The value that a copy holds, signed as in `values`; None if it has none of this metric."""
        try:
            said = files.read_json(copy / MEASURED)
        except CheckpointError:  # damaged
            return None
        value = said.get("value") if isinstance(said, dict) and said.get("metric") == self.watched.metric else None
        return self.watched.sign * value if isinstance(value, (int, float)) and math.isfinite(value) else None

    def _keep_history(self, checkpoints: Path) -> None:
        """Steps before this start count only if they have a copy, or a checkpoint to make one of."""
        wanted = self._best()
        names = {step: files.step_name(step) for step in self.values}
        kept = {step for step, name in names.items() if exists(self.folder / name) or exists(checkpoints / name)}
        self.values = {step: value for step, value in self.values.items() if step in kept}
        if lost := [step for step in wanted if step not in kept]:
            log.warning("KeepBest: steps %s were among the best, but their checkpoints are gone, so they do not count", lost)
        for step in self._best():
            if exists(checkpoints / names[step]):
                self._keep(checkpoints / names[step])

    def on_record(self, run: RunHandle, record: StepRecord) -> None:
        value = self.watched.of(record)
        if value is None:
            return
        self.values[record.step] = value
        self.unknown.discard(record.step)
        checkpoint = run.directory / "checkpoints" / files.step_name(record.step)
        if record.step in self._best() and checkpoint.is_dir():
            self._keep(checkpoint)
        elif record.step in self._best():
            run.save()

    def on_save(self, run: RunHandle, step: int, checkpoint: Path) -> None:
        if step in self._best():
            self._keep(checkpoint)

    def close(self) -> None:
        self.watched.warn_if_unseen(self.run, self)

    def _best(self) -> list[int]:
        """Steps of the best measurements, the best first; of equal ones the earlier counts."""
        return sorted(self.values, key=lambda step: (self.values[step], step))[: self.count]

    def _keep(self, checkpoint: Path) -> None:
        target = self.folder / checkpoint.name
        if not exists(target) or files.manifest_hash(target) != files.manifest_hash(checkpoint):
            writing = files.writing_directory_of(target)
            files.remove(writing)
            copy_tree(checkpoint, writing, _link, MEASURED)
            value = self.watched.sign * self.values[files.step_of(checkpoint)]
            files.write_json(writing / MEASURED, {"metric": self.watched.metric, "value": value})
            flush(writing)
            files.put_in_place(writing, target)
            log.info("kept %s: %s %.6g", target, self.watched.metric, value)
        best = self._best()
        for other in files.complete_checkpoints(self.folder):
            if files.step_of(other) not in best and files.step_of(other) not in self.unknown:
                files.discard(other)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # storage without hard links
        shutil.copyfile(source, target)
        flush(target)
