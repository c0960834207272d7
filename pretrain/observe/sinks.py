"""Where the records of a run go: metrics.jsonl, TensorBoard, the console, and sinks of your own. The main rank writes them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from pretrain.config.schema import Config
from pretrain.config.written import flatten
from pretrain.observe.logs import PASSING, Tolerated, finish_line
from pretrain.observe.metrics import FIRST_EXPONENT, METRICS_FILE, StepRecord, duration, number_or_dash
from pretrain.observe.writing_thread import WritingThread
from pretrain.storage import append_line, plain

log = logging.getLogger(__name__)

DECIDING = ("model", "data", "batch", "loss", "optim", "schedule", "parallel", "precision", "run")
"""Sections whose settings TensorBoard compares between runs."""


class Sink:
    """A place for records. `run.main(sinks=[...])` adds yours to the run's own. All methods are called on the main rank only.

    A sink only observes: an exception in `open`, `write` or `close` becomes a warning, and the run goes on.
    """

    failed = False
    """Whether the run ends by an error. It is set before `close`."""

    name = ""
    """The sink in warnings; by default its class."""
    beside = False
    """Whether `write` is called in the thread that writes beside training (writing_thread.py), so that slow storage does not hold up a step."""

    def open(self, directory: Path, config: Config, step: int) -> None:
        """Called before the first record. `directory`: the run's directory; `step`: the step that this start continues from.

        If it fails, `close` is called, and before the next record `open` again.
        """

    def write(self, record: StepRecord) -> None:
        """Called with each logged step. A run that went back to a checkpoint logs the repeated steps again."""
        raise NotImplementedError

    def close(self) -> None:
        """Called after the last record, even if the run failed, and when `open` fails."""


def open_whole(sink: Sink, directory: Path, config: Config, step: int) -> None:
    """Open a sink. If that fails, close it, so that it keeps nothing that it took before."""
    try:
        sink.open(directory, config, step)
    except Exception:
        with contextlib.suppress(Exception):
            sink.close()
        raise


class Sinks:
    """All sinks of a run. `own` are this program's: only their OSErrors are tolerated, so that defects of ours are not hidden.

    `writer`: the thread for those that write `beside` training. Close it first.
    """

    def __init__(
        self,
        own: Sequence[Sink],
        yours: Sequence[Sink],
        directory: Path,
        config: Config,
        step: int,
        writer: WritingThread | None = None,
    ) -> None:
        self._writer = writer
        self._sinks: list[tuple[Sink, Tolerated]] = []
        self._opened: set[int] = set()
        self._start = directory, config, step
        for sink in (*own, *yours):
            place = {JsonLines: directory / METRICS_FILE, TensorBoard: directory / "tensorboard"}.get(type(sink))
            kind = OSError if sink in own else Exception
            tolerated = Tolerated(str(place or sink.name or f"the sink {type(sink).__name__}"), kind)
            self._sinks.append((sink, tolerated))
            tolerated.attempt(lambda sink=sink: self._open(sink))

    def _open(self, sink: Sink) -> None:
        if id(sink) in self._opened:
            return
        open_whole(sink, *self._start)
        self._opened.add(id(sink))

    def write(self, record: StepRecord) -> None:
        """Give every sink a record. A sink that could not be opened is opened again first."""
        if self._writer is not None:
            kept = copy.deepcopy(record)  # a callback or a sink may change what it is given
            self._writer.put(lambda: self._give([pair for pair in self._sinks if pair[0].beside], kept))
        self._give([pair for pair in self._sinks if self._writer is None or not pair[0].beside], record)

    def _give(self, sinks: list[tuple[Sink, Tolerated]], record: StepRecord) -> None:
        for sink, tolerated in sinks:
            tolerated.attempt(lambda sink=sink: (self._open(sink), sink.write(record)))

    def close(self, failed: bool = False) -> None:
        """Close every sink that was opened, and warn of records that were lost until the end. `failed`: the run ends by an error."""
        for sink, tolerated in self._sinks:
            sink.failed = failed
            try:
                if id(sink) in self._opened:
                    sink.close()
            except tolerated.kind as error:
                tolerated.fail(error)
            tolerated.close()


class JsonLines(Sink):
    """metrics.jsonl: one JSON object per record. Numbers that are not finite are null."""

    beside = True

    def open(self, directory: Path, config: Config, step: int) -> None:
        self.path = directory / METRICS_FILE

    def write(self, record: StepRecord) -> None:
        append_line(self.path, json.dumps(plain(record.to_dict()), allow_nan=False))


class TensorBoard(Sink):
    """TensorBoard: a curve per number, samples as text, sizes of gradients as histograms, and of each start the configuration and its hyperparameters."""

    beside = True

    def __init__(self) -> None:
        self._board, self._thread_hook = None, threading.excepthook

    def open(self, directory: Path, config: Config, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.directory, self.config, self.step = directory, config, step
        path = directory / "tensorboard"
        # On a full disk a writer leaves an empty file behind at each try.
        path.mkdir(parents=True, exist_ok=True)
        (path / ".probe").write_bytes(bytes(1 << 16))
        (path / ".probe").unlink()
        self._board = SummaryWriter(str(path), purge_step=step + 1)
        threading.excepthook = self._on_thread_failure
        if (configuration := directory / "config.yaml").is_file():
            lines = configuration.read_text(encoding="utf-8").splitlines()
            # Written after the step, or the purge would remove it. Indented, because TensorBoard shows texts as Markdown.
            self._board.add_text("config", "\n".join(f"    {line}" for line in lines), step + 1)
        self._add_hyperparameters(config)

    def write(self, record: StepRecord) -> None:
        if self._board is None:
            self.open(self.directory, self.config, self.step)
        try:
            for name, value in record.numbers().items():
                self._board.add_scalar(name, value, record.step)
            for prompt, text in (record.samples or {}).items():
                self._board.add_text(f"samples/{prompt}", f"    {prompt}{text}".replace("\n", "\n    "), record.step)
            for layer, counts in (record.gradient_sizes or {}).items():
                self._add_histogram(f"gradient_sizes/{layer}", counts, record.step)
        except OSError:
            # The writing thread has ended with this error; a new one must take its place.
            self._board, self.step = None, record.step
            raise

    def _add_hyperparameters(self, config: Config) -> None:
        """The table of TensorBoard's tab HPARAMS: settings that decide results, and the numbers to compare by."""
        from torch.utils.tensorboard.summary import hparams

        settings = {
            name: value for name, value in flatten(dataclasses.asdict(config)).items() if name.partition(".")[0] in DECIDING
        }
        plain_values = {
            n: v if isinstance(v, (bool, int, float, str)) else str(v) for n, v in settings.items() if v is not None
        }
        names = [f"validation/{source.name}" for source in config.data.validation]
        for summary in hparams(plain_values, dict.fromkeys(["loss", *names], 0.0)):
            self._board.file_writer.add_summary(summary)

    def _add_histogram(self, name: str, counts: list[int], step: int) -> None:
        """Counts by exponent of 2; the x-axis is the exponent."""
        edges = [FIRST_EXPONENT + place + 1.0 for place in range(len(counts))]
        middles = [edge - 0.5 for edge in edges]
        total = sum(n * x for n, x in zip(counts, middles))
        squares = sum(n * x * x for n, x in zip(counts, middles))
        self._board.add_histogram_raw(name, FIRST_EXPONENT, edges[-1], sum(counts), total, squares, edges, counts, step)

    def close(self) -> None:
        threading.excepthook = self._thread_hook
        if self._board is not None:
            self._board.close()

    def _on_thread_failure(self, failure: threading.ExceptHookArgs) -> None:
        # TensorBoard writes in a thread of its own. Its errors are raised again at the next line, and reported in one line there.
        of_board = failure.thread is not None and type(failure.thread).__module__.startswith("tensorboard")
        if not (of_board and issubclass(failure.exc_type, OSError)):
            self._thread_hook(failure)


class Console(Sink):
    """A line per record, on the console and in the main rank's log. On a terminal one line is updated, and lines with evaluations stay."""

    def open(self, directory: Path, config: Config, step: int) -> None:
        self.steps = config.run.steps

    def write(self, record: StepRecord) -> None:
        stays = record.step in (1, self.steps) or evaluation_parts(record)
        log.info(progress_line(record, self.steps), extra=None if stays else PASSING)

    def close(self) -> None:
        finish_line()


def progress_line(record: StepRecord, steps: int) -> str:
    """A step for the console; `steps`: the number of steps of the whole run."""
    parts = [
        f"step {record.step:>{len(str(steps))}}/{steps}",
        f"loss {number_or_dash(record.loss, '.4f')}",
        *([f"objective {number_or_dash(record.objective, '.4f')}"] if record.objective is not None else []),
        f"grad {number_or_dash(record.grad_norm, '.3f')}",
        f"lr {number_or_dash(record.lr, '.2e')}",
        f"{_short(record.tokens_per_second)} tok/s",
    ]
    if record.mfu is not None:
        parts.append(f"mfu {record.mfu:.1%}")
    if record.skipped is not None:
        parts.append(f"skipped {record.skipped}")
    return "  ".join([*parts, *evaluation_parts(record), f"eta {duration(record.seconds_left)}"])


def evaluation_parts(record: StepRecord) -> list[str]:
    """The results beside the training loss, for the console."""
    parts = [f"validation {name} {loss:.4f}" for name, loss in (record.validation or {}).items()]
    parts += [f"with mean weights {name} {loss:.4f}" for name, loss in (record.ema_validation or {}).items()]
    for name, scores in (record.translation or {}).items():
        parts.append(
            f"translation {name} BLEU {scores['bleu']:.2f} chrF {scores['chrf']:.2f} CER {scores['cer']:.1f} WER {scores['wer']:.1f}"
        )
    return [*parts, *(f"{name} {value:.4g}" for name, value in (record.evaluation or {}).items())]


def _short(number: float | None) -> str:
    if number is None:
        return "-"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
