"""Saving a run's state from a trainer, and restoring what `find_starting_point` chose."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pretrain.checkpoint.choose import is_of_line
from pretrain.checkpoint.files import MANIFEST, complete_checkpoints, step_name, step_of
from pretrain.checkpoint.host_copies import HostCopies
from pretrain.checkpoint.payload import Payload, first_nonfinite, model_tensors, optimizer_tensors, restore_rng, rng_tensors
from pretrain.checkpoint.retention import retire
from pretrain.checkpoint.save import AgreedPlan, Saving
from pretrain.checkpoint.stored_run import stored_run
from pretrain.checkpoint.uploads import Uploads
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, TrainingError, line_of
from pretrain.observe.metrics import duration
from pretrain.optim.optimizer import OptimizerSet
from pretrain.train.plan import Plan
from pretrain.train.run_directory import RunDirectory
from pretrain.train.starting_point import StartingPoint

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """The progress of a run: optimizer steps, training samples and target tokens so far, and how many steps were skipped, the last of them in a
    row.

    `loads`: positions that each expert of each layer got in the last step, if a balancing loss needs them. `record`: the numbers
    of the last step, for a log of metrics that lacks them. `useful_seconds`: time in steps that were not skipped, times the devices that made them.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    loads: list[list[int]] | None = None
    record: dict[str, Any] | None = None
    useful_seconds: float = 0.0


class Continuation:
    """The checkpoints of one run, seen from its trainer. All methods are called by all ranks together.

    `last`: the newest good checkpoint of this run, or the one it continues from; None before the first.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        directory: RunDirectory,
        starting_point: StartingPoint,
        model: nn.Module,
        optimizer: OptimizerSet,
        replicas: DeviceMesh | None = None,
    ) -> None:
        self.plan, self.ranks, self.directory, self.starting_point, self.replicas = (
            plan,
            ranks,
            directory,
            starting_point,
            replicas,
        )
        self.model, self.optimizer = model, optimizer
        self.last = starting_point.resumed and starting_point.resumed.path
        self.saved_at = self._started = time.monotonic()
        self.host_copies, self._agreed = HostCopies(), AgreedPlan()
        self._saving: Saving | None = None
        self._removal: threading.Thread | None = None
        self._retire: Callable[..., threading.Thread] | None = None
        self._held_up = ""
        source = starting_point.resumed or starting_point.weights
        self._saved_step = starting_point.step if starting_point.own else None
        self._parent = _identify(source.path, source.state["step"], source.manifest) if source else None
        self._timeline = [*(starting_point.resumed.state.get("timeline", []) if starting_point.resumed else []), self._start()]
        self._uploads: Uploads | None = None
        if (stored := stored_run(plan.config)) is not None and ranks.is_main:
            self._uploads = Uploads(stored, directory.path, plan.config.checkpoint, self._timeline[-1]["start"])

    def _start(self) -> dict[str, Any]:
        """This start's entry in the time line. A checkpoint that has it descends from this start."""
        back = {"back": True} if self.starting_point.resumed and self.starting_point.resumed.back else {}
        return {"from": self.starting_point.step, "start": uuid.uuid4().hex[:12], **back}

    def came_through(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is of the time line that this start continues. Taken for granted where its state does not say."""
        return is_of_line(checkpoint, {"timeline": self._timeline})

    def is_due(self) -> bool:
        """Whether `checkpoint.every_seconds` have passed since the last save; the main rank's clock decides."""
        every = self.plan.config.checkpoint.every_seconds
        return self.ranks.is_main and every > 0 and time.monotonic() - self.saved_at >= every

    def has(self, step: int) -> bool:
        """Whether there is nothing to save after a step: it is saved, or this start began with it."""
        return step in (self._saved_step, self.starting_point.step)

    def begin_save(self, progress: Progress) -> None:
        """Begin to save the whole state, unless this step is saved already. `finish_save` has to follow.

        Raises TrainingError if the state is not finite.
        """
        if self._saved_step == progress.step:
            return
        started = time.monotonic()
        self.wait_for_removal()
        if self.ranks.is_main:
            self.directory.restore_record()
        with self._model():
            tensors = model_tensors(self.model) | optimizer_tensors(self.optimizer)
            self._check_finite(progress.step, tensors)
            # The file in the run directory is not used: somebody may be editing it for the next start.
            attachments = {"config.yaml": self.plan.written_config, **self.plan.data.attachments}
            state, target = self._state(progress, tensors), self.directory.checkpoints / step_name(progress.step)
            saving = Saving(target, tensors | rng_tensors(self.ranks), state, attachments, self.ranks, agreed=self._agreed)
            with self._explained(progress.step):
                saving.begin()
                if self.plan.config.checkpoint.asynchronous:
                    saving.hold(self.host_copies)
                    saving.write_beside()
                    self._held_up = f", which held training up for {duration(time.monotonic() - started)}"
                else:
                    saving.write_now()
        self._saving, self._started, self._saved_step, self.saved_at = saving, started, progress.step, time.monotonic()

    @contextmanager
    def _model(self) -> Iterator[None]:
        """Inside, parameters and state are what a checkpoint has of them."""
        with self.optimizer.model():
            yield
            if self.optimizer.model_is_mean:
                self.host_copies.hold_back()  # what is copied must not change places before that

    @property
    def is_writing(self) -> bool:
        """Whether a save has begun of which this rank still writes its part."""
        return self._saving is not None and not self._saving.is_written

    def wait(self, problem: BaseException | None = None) -> None:
        """Let what this rank still writes come to an end. A process that ends while it writes would be aborted by torch's threads.

        `problem`: what ends the run. A process that is alone logs it, and then lets an upload come to an end. Others would keep the ranks waiting.
        """
        seconds = self.plan.config.parallel.timeout_seconds
        if self._saving is not None and self._saving.thread is not None:
            self._saving.thread.join(seconds)
        is_alone = self.ranks.world_size == 1
        if is_alone and isinstance(problem, Exception) and self._uploads is not None and self._uploads.is_busy:
            log.error("%s", line_of(problem))
            self._uploads.wait(seconds)

    def take_over_copies(self) -> None:
        """Say in the object store that this start may write there. Raises CheckpointError on all ranks if it cannot be written to."""
        stored = stored_run(self.plan.config)
        if stored is None:
            return

        def take_over() -> None:
            if self.ranks.is_main:
                stored.take_over(self._timeline[-1]["start"], self._timeline, self.starting_point.step)

        name = "start of uploads"
        self.ranks.attempt(name, lambda: self.ranks.while_alive(name, take_over), CheckpointError)

    def begin_uploads(self) -> None:
        """Copy what the object store does not have, beside the training."""
        if self._uploads is not None and self.starting_point.own:
            self._uploads.offer(self.last)

    def finish_uploads(self) -> None:
        """Wait until the newest checkpoint is copied. Raises CheckpointError on all ranks if that failed."""
        if not self.plan.config.checkpoint.upload:
            return
        with self.ranks.part("upload of checkpoints", storage=True), self.ranks.in_pieces("upload of checkpoints") as seen:
            while self._uploads is not None and not self._uploads.wait(1.0):
                seen(0)
        self.ranks.agree("upload of checkpoints", self._uploads and self._uploads.problem, CheckpointError)
        if self._uploads is not None and self._retire is not None:
            self.wait_for_removal()
            self._removal = self._retire()  # what was on its way at the last save

    def wait_for_removal(self) -> None:
        """Let the removal of older checkpoints come to an end, before another start may find them. No other rank has to wait for it."""
        if self._removal is not None:
            with self.ranks.part("removal of older checkpoints", storage=True):
                self._removal.join()

    def finish_save(self, before: Callable[[], None] = lambda: None) -> int | None:
        """Make the checkpoint that was begun visible, on all ranks together. Return its step, or None if none was begun.

        `before` is called before that. Older checkpoints that are no longer kept are removed.
        """
        if self._saving is None:
            return None
        before()
        saving, self._saving, step = self._saving, None, self._saved_step
        with self._explained(step):
            manifest = saving.finish()
        self.last = saving.target
        self._parent, self.directory.newest = _identify(self.last, step, manifest), self.last.name
        if self.ranks.is_main:
            skipped, uploads = saving.state["skipped_in_a_row"], self._uploads
            if uploads is not None:
                uploads.offer(self.last)
            with self.ranks.part("removal of older checkpoints", storage=True):
                self._retire = partial(retire, self.last, self.plan.config.checkpoint, skipped)
                self._removal = self._retire(in_use=uploads and uploads.in_use)
            log.info("saved %s (%s%s)", self.last, duration(time.monotonic() - self._started), self._held_up)
        return step

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            good = "there is no earlier checkpoint"
            if self.last is not None:
                good = f"{self.last} {'stays good' if os.path.exists(self.last / MANIFEST) else 'cannot be found'}"
            raise CheckpointError(f"checkpoint of step {step} could not be saved: {error}; {good}") from error

    def _state(self, progress: Progress, tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {
            **dataclasses.asdict(progress),
            "world_size": self.ranks.world_size,
            "layout": self.plan.layout.name,
            "model": dataclasses.asdict(self.plan.config.model),
            "identity": self.plan.identity(progress.samples),
            "parent": self._parent,
            "timeline": self._timeline,
            "torch": torch.__version__,
            "has_optimizer": any(name.startswith("optim.") for name in tensors),
        }

    def _check_finite(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Refuse a state that holds NaN: a run would continue from it, and it would retire the good checkpoints before it."""
        own = first_nonfinite(tensors)
        # With its place: another stage of a pipeline does not have the name.
        found = self.ranks.gather("finiteness of the state", None if own is None else (list(tensors).index(own), own))
        bad = [(one[0], rank, one[1]) for rank, one in enumerate(found) if one is not None]
        if bad:
            _, rank, name = min(bad)
            raise TrainingError(
                f"step {step}: {name} is not finite (rank {rank}), so the state was not saved; {self.describe_last()}: lower optim.lr or "
                "raise optim.eps, then run again"
            )

    def describe_last(self) -> str:
        """The newest good checkpoint, for a message."""
        return f"the last checkpoint is {self.last}" if self.last else "there is no checkpoint yet"

    def ways_out(self, step: int, skipped: int) -> str:
        """What to do about a step that was refused after `skipped` steps in a row, for a message. All ranks call it together."""
        remedy = "lower optim.lr or look at the samples, then run again"
        if not skipped:
            return f"; {self.describe_last()}: {remedy}"
        taken = step - skipped - 1  # its update may have ruined the weights, which are in every checkpoint since

        def look() -> Path | None:
            found = complete_checkpoints(self.last.parent) if self.last else []
            return next((path for path in reversed(found) if step_of(path) < taken), None)

        before = self.ranks.on_main("checkpoints from before skipped steps", look, CheckpointError, storage=True)
        back = (
            f"; if that step ruined the weights, set run.resume={before}"
            if before
            else "; no checkpoint from before that step is left"
        )
        return f", after {skipped} in a row that were skipped; the weights are those of step {taken}: {remedy}{back}"

    def restore(self) -> Progress:
        """Read the starting point of the run into model, optimizer and generators."""
        resumed, weights = self.starting_point.resumed, self.starting_point.weights
        if resumed is not None:
            return self._resume(resumed.path, resumed.state)
        said = ""
        if weights is not None:
            payload = Payload(weights.path)
            payload.load(model_tensors(self.model), self.ranks, converts=True, replicas=self.replicas)
            said = f" with the weights of {weights.path}"
            if payload.names("optim.ema."):
                said += (
                    ", and not with their running mean (optim.ema_decay); for that, convert_checkpoint.py to-hf --weights ema, then from-hf, "
                    "makes a checkpoint of it"
                )
        if self.ranks.is_main:
            log.info("starting at step 0%s", said)
        return Progress()

    def set_aside(self) -> None:
        """Set aside the checkpoints that this start leaves behind. Call it when nothing can refuse the start any more."""
        if self.ranks.is_main:
            for line in self.starting_point.resumed.set_aside() if self.starting_point.resumed else []:
                log.warning("%s", line)
            self.directory.newest = self.last.name if self.starting_point.own else None

    def _resume(self, checkpoint: Path, state: dict[str, Any]) -> Progress:
        payload = Payload(checkpoint)
        rng = self.ranks.attempt(
            "generators of a checkpoint", lambda: self._generators(payload, state["world_size"]), CheckpointError
        )
        begins_mean = self.ranks.attempt("means of a checkpoint", lambda: self._begins_mean(payload), CheckpointError)
        state_of_optimizer = optimizer_tensors(self.optimizer)
        if begins_mean:
            state_of_optimizer = {
                name: tensor for name, tensor in state_of_optimizer.items() if not name.startswith("optim.ema.")
            }
        with self.optimizer.model():
            payload.load(model_tensors(self.model) | state_of_optimizer, self.ranks, replicas=self.replicas)
        self.ranks.attempt(
            "state of the optimizer", lambda: self._check_nothing_left(payload, state_of_optimizer), CheckpointError
        )
        if begins_mean:
            self.optimizer.begin_means()
        payload.load(rng, self.ranks)
        restore_rng(rng, self.ranks)
        if self.ranks.is_main:
            step, samples, layout = state["step"], state["samples"], state["layout"]
            log.info("resumed from %s: step %d, %d samples, saved as %s", checkpoint, step, samples, layout)
            if begins_mean:
                log.info(
                    "the running mean of the weights (optim.ema_decay) begins with those of step %d, which was saved without one",
                    step,
                )
        progress = Progress(**{field.name: state[field.name] for field in dataclasses.fields(Progress) if field.name in state})
        # The seconds of another run do not count here.
        return progress if self.starting_point.own else dataclasses.replace(progress, useful_seconds=0.0)

    def _check_nothing_left(self, payload: Payload, state: dict[str, Tensor]) -> None:
        """Raise CheckpointError if the checkpoint has state of this rank's parameters that `state` has no place for."""
        for name in payload.names("optim."):
            _, kind, parameter = name.split(".", 2)
            if name not in state and kind != "ema" and parameter in self.optimizer.parameters:
                raise CheckpointError(
                    f"{payload.checkpoint}: has {name}, which the optimizer does not create before its first step, so it would be lost; "
                    "add it to the optimizer's create_state"
                )

    def _begins_mean(self, payload: Payload) -> bool:
        return self.optimizer.ema_decay is not None and not payload.names("optim.ema.")

    def _generators(self, payload: Payload, world_size: int) -> dict[str, Tensor]:
        # Generators belong to ranks: on another number of ranks, this rank keeps the one from its seed. Nothing in training
        # draws from it: dropout is a function of the sample.
        if world_size != self.ranks.world_size:
            return {}
        saved = set(payload.names("rng."))
        return {name: value for name, value in rng_tensors(self.ranks).items() if name in saved}


def _identify(checkpoint: Path, step: int, manifest: str) -> dict[str, Any]:
    """The entry for a checkpoint that the next one records as its parent."""
    return {"path": str(checkpoint), "step": step, "manifest": manifest}
