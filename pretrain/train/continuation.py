"""How a run's state leaves a trainer and comes back: saving, resuming, starting from other weights."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from pretrain.checkpoint.load import choose_checkpoint, load_state, load_tensors, saved_names
from pretrain.checkpoint.payload import model_tensors, optimizer_tensors, restore_rng, rng_tensors
from pretrain.checkpoint.save import save_checkpoint
from pretrain.data.text.stream import Cursor, continue_cursors
from pretrain.data.tokenizers.tokenizer import tokenizer_fingerprint
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, ConfigError
from pretrain.observe.metrics import duration
from pretrain.train.identity import check_identity
from pretrain.train.plan import Plan, model_identity
from pretrain.train.run_directory import RunDirectory

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is: optimizer steps, training samples and target tokens so far.

    `cursor`: where this rank's text goes on, of data that is not prepared.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    cursor: list[int] | None = None


class Continuation:
    """The checkpoints of one run, seen from its trainer. All methods are called by all ranks together."""

    def __init__(self, plan: Plan, ranks: Ranks, directory: RunDirectory, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.plan, self.ranks, self.directory = plan, ranks, directory
        self.model, self.optimizer = model, optimizer
        self.last_saved: int | None = None
        self.saved_at = time.monotonic()

    def is_due(self) -> bool:
        """Whether `checkpoint.every_seconds` have passed since the last save; the main rank's clock decides."""
        every = self.plan.config.checkpoint.every_seconds
        return self.ranks.is_main and every > 0 and time.monotonic() - self.saved_at >= every

    def save(self, progress: Progress) -> None:
        """Save the whole state, unless this step is saved already."""
        if self.last_saved == progress.step:
            return
        started = time.monotonic()
        tensors = model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer) | rng_tensors(self.ranks)
        state = {
            **dataclasses.asdict(progress),
            "cursor": self.ranks.gather("cursors of text", progress.cursor),  # of every rank
            "world_size": self.ranks.world_size,
            "layout": self.plan.layout.name,
            "model": dataclasses.asdict(self.plan.config.model),
            "identity": self.plan.identity(progress.samples),
            "torch": torch.__version__,
        }
        attachments = {"config.yaml": self.directory.path / "config.yaml", **self.plan.data.attachments}
        folder, policy = self.directory.checkpoints, self.plan.config.checkpoint
        path = save_checkpoint(folder, progress.step, tensors, state, attachments, policy, self.ranks)
        self.last_saved, self.saved_at = progress.step, time.monotonic()
        if self.ranks.is_main:
            log.info("saved %s (%s)", path, duration(time.monotonic() - started))

    def restore(self) -> Progress:
        """Continue from a checkpoint, start from other weights, or start; what `run.resume` and `run.init_from` say."""
        run = self.plan.config.run
        checkpoint = choose_checkpoint(self.directory.path, run.resume, self.ranks)
        if checkpoint is not None:
            return self._resume(checkpoint)
        if run.init_from is not None:
            self._start_from(Path(run.init_from))
        if self.ranks.is_main:
            log.info("starting at step 0%s", f" with the weights of {run.init_from}" if run.init_from else "")
        return Progress()

    def _resume(self, checkpoint: Path) -> Progress:
        state = load_state(checkpoint)
        if not saved_names(checkpoint, "optim."):
            raise CheckpointError(
                f"{checkpoint} has weights only and cannot be resumed; use run.init_from={checkpoint} for a new run"
            )
        run, data = self.plan.config.run, self.plan.config.data
        # Where weights alone decide the mixture, a stage can leave the past as it was.
        by_weight = not any(source.max_epochs or source.tokens for source in data.sources)
        tokens = state["samples"] * data.sequence_length if by_weight else 0
        check_identity(state["identity"], self.plan.identity(state["samples"]), checkpoint, run.accept_changes, tokens)
        if state["step"] > run.steps:
            raise ConfigError(
                f"run.steps={run.steps} is below the step {state['step']} of {checkpoint}; raise it, or choose another run.name"
            )
        rng = self._generators(checkpoint, state["world_size"])
        load_tensors(checkpoint, model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer) | rng, self.ranks)
        restore_rng(rng, self.ranks)
        own = checkpoint.parent.resolve() == self.directory.checkpoints.resolve()
        self.last_saved = state["step"] if own else None
        if self.ranks.is_main:
            log.info(
                "resumed from %s: step %d, %d samples, saved as %s",
                checkpoint,
                state["step"],
                state["samples"],
                state["layout"],
            )
        return Progress(state["step"], state["samples"], state["tokens"], self._cursor(state["cursor"]))

    def _cursor(self, saved: list[list[int] | None]) -> list[int] | None:
        """Where this rank's text goes on."""
        if saved[0] is None:
            return None
        continued = continue_cursors([Cursor.from_list(values) for values in saved], self.plan.layout.data_size)
        if self.ranks.is_main:
            log.info("data: %s", continued.description)
        return continued.cursors[self.ranks.rank].to_list()

    def _generators(self, checkpoint: Path, world_size: int) -> dict[str, torch.Tensor]:
        # Generators belong to ranks: on another number of them this rank keeps the one it was seeded with. Nothing in training
        # draws from it: dropout is a function of the sample.
        if world_size != self.ranks.world_size:
            return {}
        saved = set(saved_names(checkpoint, "rng."))
        return {name: value for name, value in rng_tensors(self.ranks).items() if name in saved}

    def _start_from(self, path: Path) -> None:
        source = choose_checkpoint(self.directory.path, str(path), self.ranks)  # this run has none of its own
        model = dataclasses.asdict(self.plan.config.model)
        check_identity(model_identity(load_state(source)["model"]), model_identity(model), source, [])
        self._check_tokenizer(source)
        load_tensors(source, model_tensors(self.model), self.ranks)

    def _check_tokenizer(self, source: Path) -> None:
        own = self.plan.data.tokenizer_sha256
        if (source / "tokenizer").is_dir() and tokenizer_fingerprint(source / "tokenizer") != own:
            raise CheckpointError(
                f"run.init_from={source} was trained with another tokenizer than the data; prepare the data with {source / 'tokenizer'}"
            )
