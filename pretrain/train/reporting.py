"""What a run tells of its steps, to whoever looks: evaluations, log lines, callbacks. All ranks call it together; the main rank writes.

record of a step --validation, translation, samples, callbacks--> --speed, memory, time--> sinks (metrics.jsonl, TensorBoard, trackers, console)
"""

from __future__ import annotations

import dataclasses
import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from pretrain.config.schema import Config
from pretrain.distributed.mesh import Mesh
from pretrain.distributed.ranks import Ranks
from pretrain.errors import TrainingError
from pretrain.observe.metrics import StepRecord, known_records
from pretrain.observe.sinks import Sinks, evaluation_parts
from pretrain.observe.trackers import own_sinks
from pretrain.observe.writing_thread import WritingThread
from pretrain.parallel.strategy import Strategy
from pretrain.train.callbacks import Callbacks, RunHandle
from pretrain.train.continuation import Continuation, Progress
from pretrain.train.extensions import Extensions
from pretrain.train.measurements import Measurements
from pretrain.train.out_of_memory import explaining_memory
from pretrain.train.plan import Plan
from pretrain.train.run_directory import RunDirectory
from pretrain.train.stop import Stopped, StopPoll
from pretrain.train.validation import Evaluation, on_device

log = logging.getLogger(__name__)


class Reporting:
    """The evaluations, sinks and callbacks of a run. `open` it first; it stays open as long as the stack that it is given."""

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        directory: RunDirectory,
        extensions: Extensions,
        mesh: Mesh,
        strategy: Strategy,
        evaluation: Evaluation,
        measurements: Measurements,
    ) -> None:
        self.plan, self.config, self.ranks, self.directory, self.extensions = plan, plan.config, ranks, directory, extensions
        self.mesh, self.strategy, self.evaluation, self.measurements = mesh, strategy, evaluation, measurements
        self.writer = WritingThread(lambda: ranks.part("log lines that are still to be written", storage=True))
        """Idle on all ranks but the main one."""
        self.communication: dict[int, float] = {}
        """By step of `log.profile`, the share of communication in it."""

    def open(self, stack: ExitStack, progress: Progress, continuation: Continuation) -> None:
        """Open sinks and callbacks until the end of `stack`. They get the records that the run has logged so far."""
        path, step, is_main, config = self.directory.path, progress.step, self.ranks.is_main, self._with_names()
        self.sinks = None
        if is_main:
            self.directory.writer = self.writer
            self.sinks = Sinks(own_sinks(self.config.log), self.extensions.sinks, path, config, step, self.writer)
            stack.push(lambda kind, error, trace: self.sinks.close(failed=kind is not None))
            if continuation.starting_point.own and progress.record:
                self._report_again(StepRecord.from_dict(progress.record))
                self.writer.drain()  # it is read below
        history = known_records(path, step) if is_main and self.extensions.callbacks else []
        tokenizer, came_through = self.plan.data.tokenizer_path, continuation.came_through
        self.run = RunHandle(config, path, history, self.mesh, self._losses, tokenizer, came_through, step)
        self.callbacks = Callbacks(self.extensions.callbacks, self.run)
        stack.callback(self.callbacks.close)
        stack.push(lambda kind, error, trace: self.writer.close(failed=kind is not None))

    def close_callbacks(self) -> None:
        """After the last step: let the callbacks write what they keep, on all ranks together. Raises TrainingError if one of them failed."""
        if not self.extensions.callbacks:
            return
        self.writer.drain()
        self.callbacks.close()
        self.ranks.agree("end of the callbacks", self.callbacks.problem and str(self.callbacks.problem), TrainingError)

    def tell_of_save(self, step: int, checkpoint: Path) -> None:
        """Tell the callbacks of a checkpoint that is complete. Main rank only."""
        with self.ranks.part("callbacks after a save", storage=True):
            self.callbacks.on_save(step, checkpoint)

    def _with_names(self) -> Config:
        """The configuration in which validation sources have the names that records give them."""
        data, opened = self.config.data, self.plan.data.validation
        named = [dataclasses.replace(source, name=one.name) for source, one in zip(data.validation, opened)]
        return dataclasses.replace(self.config, data=dataclasses.replace(data, validation=named))

    @torch.no_grad()
    def _losses(self, **inputs: torch.Tensor) -> torch.Tensor:
        with self.evaluation.weights("losses"):
            return self.strategy.evaluate(**on_device(inputs, self.ranks.device))

    def logs(self, step: int) -> bool:
        """Whether a step has a line in the log of metrics, even if nothing is evaluated after it."""
        chosen = self.config.log
        due = any(every and step % every == 0 for every in (chosen.every_steps, chosen.layers_every_steps))
        return due or step in (1, self.config.run.steps, *chosen.profile)

    def _report_again(self, record: StepRecord) -> None:
        """Log the last step's numbers if the process died between its checkpoint and its line in the log of metrics."""
        step = record.step
        if not self.logs(step):
            return
        logged = known_records(self.directory.path, self.config.run.steps)
        # Step 1 is always logged. So an empty log means that a checkpoint was put into another run's folder.
        if logged[-1].step < step if logged else step == 1:
            self.sinks.write(record)

    def evaluate(self, record: StepRecord, poll: StopPoll) -> bool:
        """Put the evaluations that are due into the record. Return False if a stop request cut them short."""
        due = self.evaluation.due(record.step)
        doing = f"the evaluation after step {record.step}"
        try:
            with explaining_memory(doing, self.plan, self.directory, self.ranks.rank):
                found = self.evaluation.run(due, poll)
        except Stopped:
            if self.ranks.is_main:
                left = " and ".join(due)
                log.info(
                    "asked to stop: the %s of step %d was abandoned, and none of its results is reported", left, record.step
                )
            return False
        record.validation, record.translation = found.get("validation"), found.get("translation")
        record.ema_validation, record.samples = found.get("ema_validation"), found.get("samples")
        if record.samples and self.ranks.is_main:
            for prompt, text in record.samples.items():
                log.info("step %d: %r goes on: %r", record.step, prompt, text)
        record.bits_per_byte = self.evaluation.bits_per_byte(record.validation or {}) or None
        if self.extensions.callbacks:
            with self.ranks.part("callbacks of a step", device=True):
                record.evaluation = self.callbacks.evaluate(record.step) or None
            self.strategy.release()
        return True

    def evaluate_again(self, progress: Progress, poll: StopPoll) -> bool:
        """Evaluate the last step, which was cut short before. Write its line in the log of metrics anew, with the results."""
        logged = known_records(self.directory.path, progress.step)[-1:] if self.ranks.is_main else []
        if logged and logged[0].step == progress.step:
            record = logged[0]
        else:  # the log was lost, or is on another rank
            record = StepRecord.from_dict(progress.record or {"step": progress.step, "tokens": progress.tokens})
        is_whole = self.evaluate(record, poll)
        if is_whole and self.ranks.is_main and evaluation_parts(record):
            self._log(record)
        return is_whole

    def report(self, record: StepRecord, samples: int, useful_seconds: float) -> None:
        """Log a step. `samples`: those of the run up to it. `useful_seconds`: device time of steps that the run still has."""
        self.measurements.fill(record, samples, useful_seconds)
        record.communication = self.communication.pop(record.step, None)
        if self.ranks.is_main:
            self._log(record)
            self.directory.write_status("running", record.step)

    def _log(self, record: StepRecord) -> None:
        """Pass a record to the sinks and to the callbacks, which may ask for a stop or a save. Main rank only."""
        self.sinks.write(record)
        with self.ranks.part("callbacks of a record", storage=True):
            self.callbacks.on_record(record)
