"""The training loop. It never asks which strategy it runs.

batch of the step (this rank's share) --micro-step by micro-step--> gradients, summed over ranks and micro-steps
--> norm and clipping --> optimizer --> metrics, validation, checkpoint
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch

from pretrain.checkpoint.export_check import ExportCheck
from pretrain.data.loader import StepBatch
from pretrain.data.pairs.prepared import PreparedPairs
from pretrain.data.samples import Samples
from pretrain.data.stream import DIGEST_MODULUS
from pretrain.data.training_data import build_loader
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, DataError, TrainingError
from pretrain.models.network import build_network
from pretrain.observe.flops import peak_flops
from pretrain.observe.metrics import Metrics, Window, progress_line
from pretrain.optim.clip import clip_gradients
from pretrain.optim.optimizer import build_optimizer
from pretrain.optim.schedule import learning_rate
from pretrain.parallel.initialise import initialise
from pretrain.parallel.strategy import DTYPES, build_strategy, prepare_blocks
from pretrain.train.balancing import ExpertLoads
from pretrain.train.continuation import Continuation
from pretrain.train.gradients import write_gradients
from pretrain.train.plan import Plan
from pretrain.train.run_directory import RunDirectory
from pretrain.train.stop import StopRequest
from pretrain.train.translation import translate_and_score
from pretrain.train.validation import validate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What the ranks agree on before a step."""

    target_tokens: int
    digest: str
    stop: bool
    save: bool


class Trainer:
    """A run from its plan: builds everything, continues from a checkpoint if there is one, and trains."""

    def __init__(self, plan: Plan, ranks: Ranks, directory: RunDirectory) -> None:
        self.plan, self.ranks, self.directory = plan, ranks, directory
        self.config = plan.config
        self._build()
        self.continuation = Continuation(plan, ranks, directory, self.model, self.optimizer)
        self.progress = self.continuation.restore()
        self.loader = build_loader(
            plan.config,
            plan.data,
            plan.objective,
            plan.schedule,
            self.strategy.data_rank,
            plan.layout.data_size,
            self.progress.cursor,
            pin=ranks.device.type == "cuda",
        )

    def _build(self) -> None:
        config = self.config
        torch.manual_seed(config.run.seed + self.ranks.rank)
        self.strategy = build_strategy(config, self.plan.layout, self.ranks)
        with torch.device("meta"):
            self.model = build_network(config.model, config.loss)
        prepare_blocks(self.model, config)
        self.call = self.strategy.place(self.model, lambda model: initialise(model, config.run.seed))
        self.optimizer = build_optimizer(self.model, config.optim)
        self.expert_loads = ExpertLoads(self.model, config.model, self.ranks)
        stored = {p.dtype for p in self.model.parameters()}
        if stored != {DTYPES[config.precision.master]}:
            raise RuntimeError(f"parameters are stored as {stored}, not as precision.master={config.precision.master}")
        peak = peak_flops(self.ranks.device, config.precision.compute)
        self.peak_flops = peak * self.ranks.world_size if peak else None
        self.flops_per_token = self.plan.flops_per_token

    # ---- the step -----------------------------------------------------------------------------------------------------

    def step(self, batch: StepBatch, target_tokens: int) -> dict[str, Any]:
        """One optimizer step on this rank's share of the global batch; the numbers to report, equal on all ranks."""
        config, number = self.config, self.progress.step + 1
        rate = learning_rate(config.schedule, config.optim.lr, config.run.steps, number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        micro_steps = batch.micro_steps(config.batch.micro_sequences)
        losses = [self._micro_step(batch, i, i == micro_steps - 1, target_tokens) for i in range(micro_steps)]
        if number in config.log.gradients_at:
            write_gradients(self.directory.path, number, self.model, self.ranks)
        grad_norm = float(clip_gradients(self.model.parameters(), config.optim.clip))
        loss = float(self.ranks.sum("loss of a step", torch.cat(losses).double().sum())) / target_tokens
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._refuse_step(number, batch, torch.cat(losses), loss, grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        routers = self.expert_loads.after_step(target_tokens)
        self.progress.step = number
        self.progress.samples += batch.sequences
        self.progress.cursor = batch.cursor
        self.progress.tokens += target_tokens
        return {"step": number, "tokens": self.progress.tokens, "loss": loss, "grad_norm": grad_norm, "lr": rate, **routers}

    def _micro_step(self, batch: StepBatch, index: int, last: bool, target_tokens: int) -> torch.Tensor:
        inputs = batch.micro(index, self.config.batch.micro_sequences, self.ranks.device)
        with self.strategy.micro_step(last=last):
            losses_B = self.call(**inputs)
            (losses_B.sum() / target_tokens).backward()
        return losses_B.detach()

    def _refuse_step(self, number: int, batch: StepBatch, losses: torch.Tensor, loss: float, grad_norm: float) -> None:
        # The update is not made: the weights are those after the step before.
        bad = batch.positions[~torch.isfinite(losses).cpu().numpy()].tolist()
        everywhere = self.ranks.gather("samples of a refused step", bad)
        where = "; ".join(f"rank {rank}: samples {positions[:8]}" for rank, positions in enumerate(everywhere) if positions)
        raise TrainingError(
            f"step {number}: loss {loss}, gradient norm {grad_norm}: the step was not taken ({where or 'every loss is finite'}); "
            f"the last checkpoint is of step {self.continuation.last_saved}: lower optim.lr or look at the samples, then run again"
        )

    # ---- the loop -----------------------------------------------------------------------------------------------------

    def fit(self, stop: StopRequest, export: ExportCheck | None = None) -> str:
        """Train to the last step. Returns `finished`, or `preempted` when a stop was asked for; both leave a checkpoint.

        `export`: a check that goes on beside the first steps, on the main rank; the run ends when it finds something.
        """
        config, progress = self.config, self.progress
        with ExitStack() as stack:
            batches = stack.enter_context(closing(self.loader.batches(progress.samples)))
            self.metrics = Metrics(self.directory.path, config.log.tensorboard, progress.step) if self.ranks.is_main else None
            stack.callback(lambda: self.metrics and self.metrics.close())
            self.window = Window()
            while progress.step < config.run.steps:
                started = time.monotonic()
                batch, problem = self._next(batches, export)
                waited = time.monotonic() - started
                verdict = self._agree(batch, problem, stop)
                if verdict.stop or verdict.save:
                    self.continuation.save(progress)
                if verdict.stop:
                    return "preempted"
                record = self.step(batch, verdict.target_tokens) | {"batch": verdict.digest}
                self.window.add(time.monotonic() - started, waited, verdict.target_tokens)
                self._after_step(record)
            self.continuation.save(progress)
            self.ranks.agree("end of the export check", export.finish() if export else None, CheckpointError)
        return "finished"

    def _next(self, batches: Iterator[StepBatch], export: ExportCheck | None) -> tuple[StepBatch | None, str | None]:
        try:
            return next(batches), export.problem() if export else None
        except (DataError, OSError) as error:
            return None, str(error)

    def _agree(self, batch: StepBatch | None, problem: str | None, stop: StopRequest) -> Verdict:
        """One sum over ranks in each step: target tokens, the samples' digest, and whether a rank failed, must stop or save."""
        tokens, digest = (batch.target_tokens, batch.digest) if batch else (0, 0)
        said = torch.tensor([tokens, digest, problem is not None, stop.reason is not None, self.continuation.is_due()])
        tokens, digests, problems, stops, saves = self.ranks.sum("start of a step", said).tolist()
        if problems:
            self.ranks.agree("reading of a batch", problem, DataError)
        if not tokens:
            samples = batch.positions.tolist() if batch else []
            raise TrainingError(
                f"step {self.progress.step + 1}: none of its targets carries a loss (samples {samples[:8]}); set data.boundary_loss=true, "
                "or prepare longer documents"
            )
        return Verdict(tokens, f"{digests % DIGEST_MODULUS:013x}", bool(stops), bool(saves))

    def _after_step(self, record: dict[str, Any]) -> None:
        config, step = self.config, record["step"]
        last = step == config.run.steps
        every = config.validation.every_steps
        if self.plan.validation and (last or (every and step % every == 0)):
            record["validation"] = {source.name: self._validate(source) for source in self.plan.validation}
        every = config.validation.translation.every_steps
        if every and (last or step % every == 0):
            record["translation"] = {source.name: self._translate(source) for source in self.plan.validation}
        if step % config.log.every_steps == 0 or last or step == 1 or "validation" in record or "translation" in record:
            self._report(record)
        if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0:
            self.continuation.save(self.progress)

    def _validate(self, source: Samples | PreparedPairs) -> float:
        batch, rows = self.config.batch, self.config.batch.micro_sequences
        if isinstance(source, PreparedPairs):
            rows = max(1, (batch.micro_tokens or batch.tokens) // sum(source.longest))
        try:
            return validate(self.call, source, self.config.validation.sequences, rows, self.loader, self.ranks)
        finally:
            self.strategy.release()

    def _translate(self, source: PreparedPairs) -> dict[str, float] | None:
        try:
            return translate_and_score(self.call, source, self.config, self.ranks)
        finally:
            self.strategy.release()

    def _report(self, record: dict[str, Any]) -> None:
        speed = self.window.take()
        achieved = speed["tokens_per_second"] * self.flops_per_token
        record |= speed | {"mfu": achieved / self.peak_flops if self.peak_flops else None}
        if shares := self.plan.data.shares(self.progress.samples):
            record["shares"] = shares
        record |= self.expert_loads.take()
        if self.ranks.is_main:
            self.metrics.write(record)
            left = (self.config.run.steps - record["step"]) * record["seconds"]
            log.info(progress_line(record, self.config.run.steps, left))
            self.directory.write_status("running", record["step"])
