"""What all ranks agree on before each step, by one sum: the step's target tokens and samples, and whether to go on."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from pretrain.data.stream import DIGEST_MODULUS, StepBatch
from pretrain.distributed.mesh import Mesh
from pretrain.errors import DataError, TrainingError, UserError


@dataclass(frozen=True)
class Wishes:
    """What a rank has to say before a step, or what any of them said."""

    stop: bool
    """It was asked to stop by a signal."""
    end: bool
    """A callback ends the run."""
    save: bool
    """A save is due by time, or by a callback."""
    writes: bool
    """It still writes its part of a save that was begun."""


@dataclass(frozen=True)
class Verdict:
    """The ranks' agreement before a step."""

    target_tokens: int
    source_tokens: list[int]
    """By source; empty for data with one source."""
    digest: str
    wishes: Wishes


def agree_on_step(
    number: int, batch: StepBatch | None, problem: UserError | None, wishes: Wishes, sources: int, mesh: Mesh
) -> Verdict:
    """The agreement on step `number`. All ranks call it together.

    `batch`: this rank's share, or None if it has a `problem`, which all ranks then raise. `sources`: of the data, 0 if they are not told apart.
    """
    counts, ranks = batch is not None and mesh.counts_samples, mesh.ranks
    tokens, digest = (batch.target_tokens, batch.digest) if counts else (0, 0)
    by_source = batch.source_tokens if counts else [0] * sources
    said = torch.tensor([tokens, digest, problem is not None, *astuple(wishes), *by_source])
    ranks.begin_step(number)
    tokens, digests, problems, stops, ends, saves, writes, *by_source = ranks.sum(f"start of step {number}", said).tolist()
    if problems:
        ranks.attempt("reading of a batch", lambda: _raise(problem), DataError)
    if not tokens:
        samples = batch.positions.tolist() if batch else []
        raise TrainingError(
            f"step {number}: no target carries a loss (samples {samples[:8]}); set data.boundary_loss=true, or prepare longer documents"
        )
    agreed = Wishes(bool(stops), bool(ends), bool(saves), bool(writes))
    return Verdict(tokens, by_source, f"{digests % DIGEST_MODULUS:013x}", agreed)


def _raise(error: UserError | None) -> None:
    if error is not None:
        raise error
