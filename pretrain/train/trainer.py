"""The training loop. No step asks which strategy it runs.

batch of the step (this rank's share) --micro-step by micro-step--> gradients, summed over ranks and micro-steps
--> norm and clipping --> optimizer --> metrics, validation, checkpoint
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext

import torch

from pretrain.data.sources import consumed_after
from pretrain.data.stream import StepBatch
from pretrain.distributed.mesh import Mesh
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, ExportError, LostRankError, TrainingError, UserError, line_of
from pretrain.huggingface.export_check import ExportCheck
from pretrain.models import network_without_values
from pretrain.observe.metrics import StepRecord
from pretrain.optim.optimizer import OptimizerSet
from pretrain.optim.schedule import learning_rate
from pretrain.parallel.blocks import DTYPES
from pretrain.parallel.pipeline_order import loss_rank
from pretrain.parallel.strategy import Strategy
from pretrain.train.balancing import ExpertLoads
from pretrain.train.continuation import Continuation
from pretrain.train.extensions import NO_EXTENSIONS, Extensions
from pretrain.train.garbage import GarbageCollection
from pretrain.train.gradients import refuse_untrained, write_gradients
from pretrain.train.layer_statistics import LayerStatistics
from pretrain.train.measurements import Measurements
from pretrain.train.out_of_memory import explaining_memory, remember_allocations
from pretrain.train.plan import Plan
from pretrain.train.queued_step import Figures, QueuedStep, runs_ahead
from pretrain.train.reporting import Reporting
from pretrain.train.run_directory import RunDirectory
from pretrain.train.starting_point import StartingPoint
from pretrain.train.stop import StopPoll, StopRequest
from pretrain.train.validation import Evaluation
from pretrain.train.verdict import Verdict, Wishes, agree_on_step, read_batch

log = logging.getLogger(__name__)


class Trainer:
    """A run from its plan: it builds everything, continues from its starting point, and trains."""

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        directory: RunDirectory,
        starting_point: StartingPoint,
        extensions: Extensions = NO_EXTENSIONS,
    ) -> None:
        self.plan, self.ranks, self.directory, self.extensions = plan, ranks, directory, extensions
        self.config = plan.config
        self._build()
        self.continuation = Continuation(plan, ranks, directory, starting_point, self.model, self.optimizer, self.mesh.replicas)
        self.progress = self.continuation.restore()
        self.expert_loads.restore(self.progress.loads)
        self.loader = plan.data.loader(self.mesh.data_rank, self.mesh.data_size, pin=ranks.device.type == "cuda")
        self.evaluation = Evaluation(plan.config, plan.data, self.strategy, self.loader, ranks, self._averaged)
        self.measurements = Measurements(plan, ranks, directory, self.strategy, self.progress.samples)
        self.reporting = Reporting(
            plan, ranks, directory, extensions, self.mesh, self.strategy, self.evaluation, self.measurements
        )
        # On a GPU a step is settled when the next one is queued, so that the device never waits for the host. Callbacks are asked at once.
        self.runs_ahead = runs_ahead(ranks.device) and not extensions.callbacks
        self.ahead: QueuedStep | None = None
        self.settled_step = self.progress.step
        self.end_reason: str | None = None
        """Why a callback ended the run."""

    def _build(self) -> None:
        config = self.config
        torch.manual_seed(config.run.seed + self.ranks.rank)
        remember_allocations(config, self.ranks.device)
        self.mesh = Mesh(self.plan.layout.axes, self.ranks, loss_rank(self.plan.config.parallel))
        self.strategy = Strategy(self.plan.layout.strategy, config, self.mesh)
        self.model = network_without_values(config)
        names = [name for name, _ in self.model.named_parameters()]
        self.strategy.place(self.model)
        self.optimizer = OptimizerSet(
            self.model,
            config.optim,
            self.strategy.counts,
            self.strategy.sum_over_layers,
            DTYPES[config.precision.compute],
            self.strategy.sharing_replicas,
            DTYPES[config.precision.moments],
        )
        self.expert_loads = ExpertLoads(self.model, config.model, self.mesh)
        stored = {p.dtype for p in self.model.parameters() if p.requires_grad and p.dim() > 1}
        if stored != {DTYPES[config.precision.master]}:
            raise RuntimeError(f"matrices are stored as {stored}, not as precision.master={config.precision.master}")
        self.layers = LayerStatistics(names, self.model, self.optimizer, self.mesh, config)
        self.consumed_after = consumed_after(config)

    # ---- the step -----------------------------------------------------------------------------------------------------

    def step(self, batch: StepBatch, target_tokens: int, digest: str = "", source_tokens: Sequence[int] = ()) -> QueuedStep:
        """Make one optimizer step on this rank's share of the global batch, or queue it on a GPU, which the host does not wait for.

        `target_tokens`: those of the global batch. For the record: the `digest` of its samples, and `source_tokens`, its target tokens by source.
        """
        config, number = self.config, self.progress.step + 1
        rate = learning_rate(config.schedule, config.optim.lr, config.run.steps, number, self.consumed_after)
        with self.ranks.part(f"step {number}: forward and backward", device=True, exchanges=True):
            with self.layers.watching(number):
                losses = self.strategy.forward_backward(batch, target_tokens)
            if not self.optimizer.has_state:
                refuse_untrained(self.model, config.data.sequence_length)
            if number in config.log.gradients_at:
                write_gradients(self.directory.path, number, self.model, self.mesh)
            self.layers.before_update(number)
            grad_norm = self.optimizer.clip(config.optim.clip)
        with self.ranks.part(f"loss of step {number}", device=True, exchanges=True):
            summed = torch.stack([part.double().sum() for part in losses])
            if batch.sources_B is not None:
                by_source = torch.zeros(len(batch.source_tokens), dtype=torch.float64, device=summed.device)
                sources_B = batch.sources_B.to(summed.device, non_blocking=True)
                summed = torch.cat([summed, by_source.index_add_(0, sources_B, losses.cross_entropy_B.double())])
            grad_norm = grad_norm.to(summed.device, non_blocking=True)  # `parallel.offload` has it on the host
            added = self.mesh.add_over_loss(summed, of_all_ranks=(~torch.isfinite(grad_norm)).double())
            objective, loss, by_source, spoilt = added.split([1, 1, len(batch.source_tokens), 1])
            objective, loss = objective[0] / target_tokens, loss[0] / target_tokens
            # A device that computes wrongly may be alone with its norm. All ranks refuse the step, or none.
            grad_norm = torch.where((spoilt[0] > 0) & torch.isfinite(grad_norm), math.nan, grad_norm)
            taken = torch.isfinite(objective) & torch.isfinite(grad_norm)
        self.continuation.host_copies.hold_back()
        with self.ranks.part(f"optimizer of step {number}", device=True, exchanges=True):
            self.optimizer.step(rate, taken, number)
        with self.ranks.part(f"statistics of layers in step {number}", device=True, exchanges=True):
            by_layer = self.layers.after_update(number)
        with self.ranks.part(f"loads of experts in step {number}", device=True, exchanges=True):
            routers = self.expert_loads.after_step(target_tokens, taken)
        self.optimizer.zero_grad()
        self.progress.step = number
        self.progress.samples += batch.sequences
        self.progress.tokens += target_tokens
        figures = {"objective": objective, "loss": loss, "grad_norm": grad_norm, "source_losses": by_source}
        return QueuedStep(
            number=number,
            tokens=self.progress.tokens,
            samples=self.progress.samples,
            rate=rate,
            digest=digest,
            positions=batch.positions.repeat(batch.rows_per_sample).tolist(),
            losses_B=losses.objective_B,
            figures=Figures(figures | routers | by_layer),
            source_tokens=list(source_tokens),
        )

    def settle(self, step: QueuedStep) -> StepRecord:
        """Wait for the figures of a step. Return the numbers to report, equal on all ranks.

        Raises TrainingError if its update was refused, and no more steps may be skipped.
        """
        with self.ranks.part(f"figures of step {step.number}", device=True, exchanges=True):  # a GPU's host waits here
            figures, router_loss = step.figures.read(), None
        self.settled_step, self.settled_samples = step.number, step.samples
        if step.is_finite(figures):
            router_loss = self.expert_loads.settle(figures)
            self.progress.skipped_in_a_row = 0
            self.measurements.count_sources(step, figures)
        else:
            self._skip_step(step, figures)
        self.progress.loads = self.expert_loads.last
        objective, loss = float(figures["objective"]), float(figures["loss"])
        return StepRecord(
            step=step.number,
            tokens=step.tokens,
            loss=loss,
            objective=None if objective == loss or math.isnan(loss) else objective,
            grad_norm=float(figures["grad_norm"]),
            lr=step.rate,
            skipped=self.progress.skipped or None,
            router_loss=router_loss,
            batch=step.digest,
            **self.layers.settle(figures),
        )

    def _skip_step(self, step: QueuedStep, figures: dict[str, torch.Tensor]) -> None:
        """Count a step whose update the device left out. Raises TrainingError if no more may be skipped."""
        finite = torch.isfinite(step.losses_B).tolist()
        bad = [position for position, is_finite in zip(step.positions, finite) if not is_finite]
        everywhere = self.ranks.gather("samples of a refused step", bad if self.mesh.counts_losses else [])
        where = "; ".join(f"rank {rank}: samples {positions[:8]}" for rank, positions in enumerate(everywhere) if positions)
        what = (
            f"step {step.number}: loss {float(figures['objective'])}, gradient norm {float(figures['grad_norm'])} "
            f"({where or 'every loss is finite'})"
        )
        self.progress.skipped_in_a_row += 1
        allowed = self.config.optim.skip_nonfinite
        if self.progress.skipped_in_a_row > allowed:
            self._finish_save()  # it retires nothing but what was saved among skipped steps
            raise TrainingError(
                f"{what}: the step was not taken{self.continuation.ways_out(step.number, self.progress.skipped_in_a_row - 1)}; "
                "optim.skip_nonfinite=N leaves out up to N such steps in a row"
            )
        self.progress.skipped += 1
        if self.ranks.is_main:
            log.warning("%s: skipped, %d in a row of at most %d", what, self.progress.skipped_in_a_row, allowed)

    # ---- the loop -----------------------------------------------------------------------------------------------------

    def fit(self, stop: StopRequest, export: ExportCheck | None = None, evaluated: bool = True) -> str:
        """Train to the last step. Returns `finished`, `preempted` after a stop request, or `stopped` by a callback; all leave a checkpoint.

        `export`: a check that runs beside the first steps on the main rank; the run ends if it finds a problem. `evaluated`: for a
        run without further steps, whether the last one was evaluated.
        """
        with ExitStack() as stack:
            self.garbage = stack.enter_context(GarbageCollection())
            batches = stack.enter_context(closing(self.loader.batches(self.progress.samples)))
            self.reporting.open(stack, self.progress, self.continuation)
            stack.push(lambda kind, error, trace: self.continuation.wait(error))
            try:
                outcome = self._take_steps(batches, stop, export, evaluated)
            except Exception as error:
                self._leave_save(error)
                raise
            if outcome == "finished":
                found = export.finish(lambda: stop.reason is not None) if export else None
                self.ranks.agree("end of the export check", found, CheckpointError)
            self.reporting.close_callbacks()
            self.continuation.finish_uploads()
        return outcome

    def _take_steps(self, batches: Iterator[StepBatch], stop: StopRequest, export: ExportCheck | None, evaluated: bool) -> str:
        progress, poll = self.progress, StopPoll(stop, self.ranks)
        steps, sources = self.config.run.steps, len(self.plan.data.source_names)
        self.measurements.begin()
        if progress.step == steps and not evaluated:
            evaluated = self.reporting.evaluate_again(progress, poll)
        while progress.step < steps:
            started = time.monotonic()
            batch, problem = self._next(batches, export)
            waited = time.monotonic() - started
            verdict = agree_on_step(progress.step + 1, batch, problem, waited, self._wishes(stop), sources, self.mesh)
            if verdict.problem is not None:
                self._save_before_end(verdict.problem, poll)
                raise verdict.problem
            agreed = verdict.wishes
            if not agreed.writes:
                self._finish_save()
            if agreed.stop or agreed.save or agreed.end:
                self._settle_ahead(poll)
                self._save(waits=agreed.stop or agreed.end)
            if agreed.stop:
                return "preempted"
            if agreed.end:
                reasons = self.ranks.gather("end by a callback", self.reporting.run.stop_reason)
                self.end_reason = next(reason for reason in reasons if reason is not None)
                return "stopped"
            evaluated = self._advance(batch, verdict, waited, poll)
        self._save()
        return "finished" if evaluated else "preempted"

    def _advance(self, batch: StepBatch, verdict: Verdict, waited: float, poll: StopPoll) -> bool:
        """Take a step and settle the one before it, while a GPU computes. Settle this one as well if something is due after it.

        `waited`: seconds that this rank's batch took. Return whether no evaluation was cut short.
        """
        started, flops = time.monotonic(), verdict.target_tokens * self.measurements.flops_of_a_token(self.progress.samples)
        number = self.progress.step + 1
        explaining = explaining_memory(f"step {number}", self.plan, self.directory, self.ranks.rank)
        with self._profile(number, waited), explaining:
            before, self.ahead = self.ahead, self.step(batch, verdict.target_tokens, verdict.digest, verdict.source_tokens)
        self.garbage.after_step(self.progress.step)
        record = self.settle(before) if before else None
        seconds = time.monotonic() - started
        if record:
            self._after_step(record, poll)
        if self.runs_ahead and not self._is_due(self.progress.step):
            self._count_time(seconds, verdict, flops)
            return True
        started = time.monotonic()
        record, self.ahead = self.settle(self.ahead), None
        self._count_time(seconds + time.monotonic() - started, verdict, flops)
        return self._after_step(record, poll)

    def _count_time(self, seconds: float, verdict: Verdict, flops: float) -> None:
        self.measurements.clock.add(seconds, verdict.waited, verdict.target_tokens, flops)
        if not self.progress.skipped_in_a_row:  # the step that was settled last was taken
            self.progress.useful_seconds += seconds * self.ranks.world_size

    def _profile(self, number: int, waited: float) -> AbstractContextManager:
        """What records a step, if `log.profile` has its number."""
        if number not in self.config.log.profile:
            return nullcontext()
        from pretrain.observe.profile import Recorded, profiled  # imports the profiler

        ranks, optimizers, means = self.ranks, self.optimizer.optimizers, list(self.optimizer.means.values())

        def tell(share: float) -> None:
            self.reporting.communication[number] = share

        return profiled(
            Recorded(self.directory.path, number, ranks.rank, ranks.device, waited, self.strategy, optimizers, means, tell)
        )

    def _is_due(self, step: int) -> bool:
        """Whether a step is saved or evaluated, and so is settled before the next one."""
        return bool(self._saves(step) or self.evaluation.due(step))

    def _saves(self, step: int) -> bool:
        """Whether a step is saved whatever the time: the last one, and those of the two intervals in steps."""
        intervals = (self.config.checkpoint.every_steps, self.config.checkpoint.keep_every_steps)
        return step == self.config.run.steps or any(every and step % every == 0 for every in intervals)

    def _settle_ahead(self, poll: StopPoll) -> None:
        """Settle the last step that was queued, if that is still to be done."""
        if self.ahead is not None:
            before, self.ahead = self.ahead, None
            self._after_step(self.settle(before), poll)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Exchange weights and their running means. A save that was begun copies them first."""
        self.continuation.host_copies.hold_back()
        with self.optimizer.averaged():
            yield

    def _save(self, waits: bool = True) -> None:
        """Save this step, unless it is saved already. With `checkpoint.asynchronous`, it may be written beside the next steps, unless it `waits`."""
        self.reporting.run.wants_save = False  # the wish of a callback is granted
        self._finish_save()
        self.continuation.begin_save(self.progress)
        if waits or not self.config.checkpoint.asynchronous:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for the save that was begun, if there is one, and tell the callbacks."""
        # A resume makes up only for the log line of the checkpoint's own step. So earlier lines must be written before the checkpoint is visible.
        step = self.continuation.finish_save(before=self.reporting.writer.drain)
        if step is not None and self.ranks.is_main:
            self.reporting.tell_of_save(step, self.continuation.last)

    def _save_before_end(self, problem: UserError, poll: StopPoll) -> None:
        """Save the steps since the last save, which are good, before all ranks end the run for a `problem` between two steps."""
        if isinstance(problem, ExportError):
            return  # what mends it is another model or tokenizer, with which a checkpoint of this one could not go on
        try:
            self._settle_ahead(poll)
            if not self.continuation.has(self.progress.step):
                self._save()
        except LostRankError:
            log.error("%s", problem)
            raise
        except Exception as another:
            log.error("the steps before the failure could not be saved: %s", line_of(another))

    def _leave_save(self, error: Exception) -> None:
        """Before a failed run ends: complete the save that was begun, which is of a good step, if all ranks fail alike."""
        is_alike = isinstance(error, UserError) and not isinstance(error, LostRankError) and error.rank is None
        try:
            if is_alike or self.ranks.world_size == 1:
                self._finish_save()
        except CheckpointError as another:
            log.error("%s", another)

    def _wishes(self, stop: StopRequest) -> Wishes:
        is_due, ends = self.continuation.is_due() or self.reporting.run.wants_save, self.reporting.run.stop_reason is not None
        return Wishes(stop.reason is not None, ends, is_due, self.continuation.is_writing)

    def _next(self, batches: Iterator[StepBatch], export: ExportCheck | None) -> tuple[StepBatch | None, UserError | None]:
        """The next batch, and what keeps this rank from going on."""
        batch, problem = read_batch(batches, self.progress.step + 1, self.ranks)
        if problem is None and export is not None and (found := export.problem()):
            problem = ExportError(found)
        return batch, problem or self.reporting.callbacks.problem

    def _after_step(self, record: StepRecord, poll: StopPoll) -> bool:
        """Save, evaluate and report, if each is due. The checkpoint comes first, because a stop may cut the rest short.

        Return whether nothing was cut short.
        """
        step = record.step
        self.progress.record = record.to_dict()
        if self._saves(step):
            self._save(waits=step == self.config.run.steps)
        is_whole = self.reporting.evaluate(record, poll)
        is_evaluated = record.validation or record.translation or record.evaluation
        if is_evaluated or self.reporting.logs(step):
            record.experts, record.expert_load = self.expert_loads.take()
            self.reporting.report(record, self.settled_samples, self.progress.useful_seconds)
        return is_whole
