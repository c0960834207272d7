"""The training loop. It never asks which strategy it runs.

batch of the step (this rank's share) --micro-step by micro-step--> gradients, summed over ranks and micro-steps
--> norm and clipping --> optimizer --> metrics, validation, checkpoint
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain.checkpoint.load import check_identity, choose_checkpoint, load_state, load_tensors, saved_names
from pretrain.checkpoint.payload import model_tensors, optimizer_tensors, restore_rng, rng_tensors
from pretrain.checkpoint.save import save_checkpoint
from pretrain.data.loader import Loader, StepBatch
from pretrain.data.stream import DIGEST_MODULUS
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, DataError, TrainingError
from pretrain.models.decoder import Decoder
from pretrain.observe.flops import flops_per_token, peak_flops
from pretrain.observe.metrics import Metrics, duration, progress_line
from pretrain.optim.clip import clip_gradients
from pretrain.optim.optimizer import build_optimizer
from pretrain.optim.schedule import learning_rate
from pretrain.parallel.initialise import initialise
from pretrain.parallel.strategy import DTYPES, build_strategy, prepare_blocks
from pretrain.train.gradients import write_gradients
from pretrain.train.plan import Plan
from pretrain.train.run_directory import RunDirectory
from pretrain.train.stop import StopRequest
from pretrain.train.validation import validate

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far the run is: optimizer steps, training samples and target tokens so far."""

    step: int = 0
    samples: int = 0
    tokens: int = 0


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
        self.progress = Progress()
        self.last_saved: int | None = None
        self.saved_at = time.monotonic()
        self._build()
        self._restore()

    def _build(self) -> None:
        config = self.config
        torch.manual_seed(config.run.seed + self.ranks.rank)
        self.strategy = build_strategy(config, self.plan.layout, self.ranks)
        with torch.device("meta"):
            self.model = Decoder(config.model)
        prepare_blocks(self.model, config)
        self.call = self.strategy.place(self.model, lambda model: initialise(model, config.run.seed))
        self.optimizer = build_optimizer(self.model, config.optim)
        stored = {p.dtype for p in self.model.parameters()}
        if stored != {DTYPES[config.precision.master]}:
            raise RuntimeError(f"parameters are stored as {stored}, not as precision.master={config.precision.master}")
        self.loader = Loader(
            stream=self.plan.stream,
            sequences=config.batch.sequences,
            data_rank=self.strategy.data_rank,
            data_size=self.plan.layout.data_size,
            workers=config.data.workers,
            pin_memory=self.ranks.device.type == "cuda",
        )
        peak = peak_flops(self.ranks.device, config.precision.compute)
        self.peak_flops = peak * self.ranks.world_size if peak else None
        self.flops_per_token = flops_per_token(config.model, config.data.sequence_length)

    # ---- the step -----------------------------------------------------------------------------------------------------

    def step(self, batch: StepBatch, target_tokens: int) -> dict[str, Any]:
        """One optimizer step on this rank's share of the global batch; the numbers to report, equal on all ranks."""
        config, number = self.config, self.progress.step + 1
        rate = learning_rate(config.schedule, config.optim.lr, config.run.steps, number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = [self._micro_step(batch, i, target_tokens) for i in range(self.plan.layout.micro_steps)]
        if number in config.log.gradients_at:
            write_gradients(self.directory.path, number, self.model, self.ranks)
        grad_norm = float(clip_gradients(self.model.parameters(), config.optim.clip))
        loss = self._sum_over_ranks(torch.cat(losses)) / target_tokens
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._refuse_step(number, batch, torch.cat(losses), loss, grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step = number
        self.progress.samples += config.batch.sequences
        self.progress.tokens += target_tokens
        return {"step": number, "tokens": self.progress.tokens, "loss": loss, "grad_norm": grad_norm, "lr": rate}

    def _micro_step(self, batch: StepBatch, index: int, target_tokens: int) -> torch.Tensor:
        tokens_BT, targets_BT = batch.micro(index, self.config.batch.micro_sequences, self.ranks.device)
        with self.strategy.micro_step(last=index == self.plan.layout.micro_steps - 1):
            losses_B = self.call(tokens_BT, targets_BT)
            (losses_B.sum() * (self.strategy.gradient_scale / target_tokens)).backward()
        return losses_B.detach()

    def _sum_over_ranks(self, losses: torch.Tensor) -> float:
        total = losses.double().sum()
        if self.ranks.control is not None:
            total = total.cpu()
            dist.all_reduce(total, group=self.ranks.control)
        return float(total)

    def _refuse_step(self, number: int, batch: StepBatch, losses: torch.Tensor, loss: float, grad_norm: float) -> None:
        # The update is not made: the weights are those after the step before.
        bad = batch.positions[~torch.isfinite(losses).cpu().numpy()].tolist()
        everywhere = self.ranks.gather(bad)
        where = "; ".join(f"rank {rank}: samples {positions[:8]}" for rank, positions in enumerate(everywhere) if positions)
        raise TrainingError(
            f"step {number}: loss {loss}, gradient norm {grad_norm}: the step was not taken ({where or 'every loss is finite'}); "
            f"the last checkpoint is of step {self.last_saved}: lower optim.lr or look at the samples, then run again"
        )

    # ---- the loop -----------------------------------------------------------------------------------------------------

    def fit(self, stop: StopRequest) -> str:
        """Train to the last step. Returns `finished`, or `preempted` when a stop was asked for; both leave a checkpoint."""
        config, progress = self.config, self.progress
        with ExitStack() as stack:
            batches = stack.enter_context(closing(self.loader.batches(progress.samples)))
            self.metrics = Metrics(self.directory.path, config.log.tensorboard) if self.ranks.is_main else None
            stack.callback(lambda: self.metrics and self.metrics.close())
            self.window = Window()
            while progress.step < config.run.steps:
                started = time.monotonic()
                batch = self._next(batches)
                waited = time.monotonic() - started
                verdict = self._agree(batch, stop)
                if verdict.stop or verdict.save:
                    self.save()
                if verdict.stop:
                    return "preempted"
                record = self.step(batch, verdict.target_tokens) | {"batch": verdict.digest}
                self.window.add(time.monotonic() - started, waited, verdict.target_tokens)
                self._after_step(record)
            if self.last_saved != progress.step:
                self.save()
        return "finished"

    def _next(self, batches: Iterator[StepBatch]) -> StepBatch:
        try:
            return next(batches)
        except DataError as error:
            raise error.on_rank(self.ranks.rank) from error

    def _agree(self, batch: StepBatch, stop: StopRequest) -> Verdict:
        every = self.config.checkpoint.every_seconds
        due = self.ranks.is_main and every > 0 and time.monotonic() - self.saved_at >= every
        said = torch.tensor([batch.target_tokens, batch.digest, int(stop.reason is not None), int(due)])
        if self.ranks.control is not None:
            dist.all_reduce(said, group=self.ranks.control)
        tokens, digests, stops, saves = said.tolist()
        return Verdict(tokens, f"{digests % DIGEST_MODULUS:013x}", bool(stops), bool(saves))

    def _after_step(self, record: dict[str, Any]) -> None:
        config, step = self.config, record["step"]
        last = step == config.run.steps
        every = config.validation.every_steps
        if every and (step % every == 0 or last):
            record["validation"] = {
                source.name: validate(self.call, source, config.validation.sequences, config.batch.micro_sequences, self.ranks)
                for source in self.plan.validation
            }
        if step % config.log.every_steps == 0 or last or step == 1 or "validation" in record:
            self._report(record)
        if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0:
            self.save()

    def _report(self, record: dict[str, Any]) -> None:
        speed = self.window.take()
        achieved = speed["tokens_per_second"] * self.flops_per_token
        record |= speed | {"mfu": achieved / self.peak_flops if self.peak_flops else None}
        if self.ranks.is_main:
            self.metrics.write(record)
            left = (self.config.run.steps - record["step"]) * record["seconds"]
            log.info(progress_line(record, self.config.run.steps, left))
            self.directory.write_status("running", record["step"])

    # ---- checkpoints --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the whole state; on all ranks."""
        if self.last_saved == self.progress.step:
            return
        started = time.monotonic()
        tensors = model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer) | rng_tensors(self.ranks)
        state = {
            "step": self.progress.step,
            "samples": self.progress.samples,
            "tokens": self.progress.tokens,
            "world_size": self.ranks.world_size,
            "layout": self.plan.layout.name,
            "model": dataclasses.asdict(self.config.model),
            "identity": self.plan.identity(),
            "torch": torch.__version__,
        }
        attachments = {"config.yaml": self.directory.path / "config.yaml", "tokenizer": self.plan.tokenizer}
        path = save_checkpoint(
            self.directory.checkpoints, self.progress.step, tensors, state, attachments, self.config.checkpoint, self.ranks
        )
        self.last_saved, self.saved_at = self.progress.step, time.monotonic()
        if self.ranks.is_main:
            log.info("saved %s (%s)", path, duration(time.monotonic() - started))

    def _restore(self) -> None:
        run = self.config.run
        checkpoint = choose_checkpoint(self.directory.path, run.resume, self.ranks)
        if checkpoint is not None:
            self._resume(checkpoint)
        elif run.init_from is not None:
            self._start_from(Path(run.init_from))

    def _resume(self, checkpoint: Path) -> None:
        state = load_state(checkpoint)
        check_identity(state.get("identity", {}), self.plan.identity(), checkpoint)
        if not saved_names(checkpoint, "optim."):
            raise CheckpointError(
                f"{checkpoint} has weights only and cannot be resumed; start a new run with run.init_from={checkpoint}"
            )
        rng = rng_tensors(self.ranks)
        # Another world size or device has other generators; nothing in training draws from them unless dropout is in the model.
        rng = {name: value for name, value in rng.items() if name in set(saved_names(checkpoint, "rng."))}
        if state["world_size"] != self.ranks.world_size:
            rng = {}
        tensors = model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer) | rng
        load_tensors(checkpoint, tensors, self.ranks)
        restore_rng(rng, self.ranks)
        self.progress = Progress(state["step"], state["samples"], state["tokens"])
        inside = checkpoint.parent.resolve() == self.directory.checkpoints.resolve()
        self.last_saved = state["step"] if inside else None
        if self.ranks.is_main:
            log.info(
                "resumed from %s: step %d, %d samples, saved as %s",
                checkpoint,
                state["step"],
                state["samples"],
                state["layout"],
            )

    def _start_from(self, checkpoint: Path) -> None:
        source = choose_checkpoint(self.directory.path, str(checkpoint), self.ranks)
        load_tensors(source, model_tensors(self.model), self.ranks)
        if self.ranks.is_main:
            log.info("weights from %s", source)


class Window:
    """Speed since the last report: steps, their seconds, the seconds spent waiting for data."""

    def __init__(self) -> None:
        self.steps, self.seconds, self.waited, self.tokens = 0, 0.0, 0.0, 0

    def add(self, seconds: float, waited: float, tokens: int) -> None:
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds
        self.waited, self.tokens = self.waited + waited, self.tokens + tokens

    def take(self) -> dict[str, float]:
        """Tokens per second over all ranks, seconds per step, share of the time spent waiting for data; starts anew."""
        speed = {
            "tokens_per_second": self.tokens / self.seconds,
            "seconds": self.seconds / self.steps,
            "data_wait": self.waited / self.seconds,
        }
        self.__init__()
        return speed
