"""What all ranks agree on before each step, by one sum: the step's target tokens and samples, and whether to go on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import torch

from pretrain.data.stream import DIGEST_MODULUS, StepBatch
from pretrain.distributed.mesh import Mesh
from pretrain.distributed.ranks import Ranks
from pretrain.errors import DataError, LostRankError, TrainingError, UserError
from pretrain.observe.logs import TRACEBACKS


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
    waited: float
    """Seconds that the slowest rank waited for its batch."""
    problem: UserError | None
    """What all ranks have to raise instead of the step."""


def read_batch(batches: Iterator[StepBatch], number: int, ranks: Ranks) -> tuple[StepBatch | None, UserError | None]:
    """This rank's share of step `number`, or the reason why it has none. All ranks raise it together, because the others wait for this one."""
    try:
        with ranks.part(f"step {number}: next batch"):
            return next(batches), None
    except (UserError, OSError) as error:
        return None, error if isinstance(error, UserError) else DataError(str(error))
    except Exception as error:  # MemoryError, no page-locked memory, a defect of ours
        logging.getLogger(TRACEBACKS).exception("reading of a batch")
        return None, DataError(
            f"a batch could not be read: {type(error).__name__}: {error}; the traceback is in this rank's log"
        )


def agree_on_step(
    number: int, batch: StepBatch | None, problem: UserError | None, waited: float, wishes: Wishes, sources: int, mesh: Mesh
) -> Verdict:
    """The agreement on step `number`. All ranks call it together.

    `batch`: this rank's share, or None if it has a `problem`. `waited`: the seconds it took. `sources`: of the data, 0 if they are not told apart.
    """
    counts, ranks = batch is not None and mesh.counts_samples, mesh.ranks
    tokens, digest = (batch.target_tokens, batch.digest) if counts else (0, 0)
    by_source = batch.source_tokens if counts else [0] * sources
    waits = [round(waited * 1e6) * (rank == ranks.rank) for rank in range(ranks.world_size)]
    said = torch.tensor([tokens, digest, problem is not None, *astuple(wishes), *by_source, *waits])
    ranks.begin_step(number)
    tokens, digests, problems, stops, ends, saves, writes, *rest = ranks.sum(f"start of step {number}", said).tolist()
    agreed = Wishes(bool(stops), bool(ends), bool(saves), bool(writes))
    first = _first(problem, ranks) if problems else None if tokens else _without_targets(number, batch)
    by_source, waits = rest[: -ranks.world_size], rest[-ranks.world_size :]
    return Verdict(tokens, by_source, f"{digests % DIGEST_MODULUS:013x}", agreed, max(waits) / 1e6, first)


def _first(problem: UserError | None, ranks: Ranks) -> UserError:
    """The problem of the first rank that has one, on all ranks."""

    def tell() -> None:
        if problem is not None:
            raise problem

    try:
        ranks.attempt("reading of a batch", tell, DataError)
    except LostRankError:
        raise
    except UserError as error:
        return error
    raise RuntimeError("a rank had a problem, and none tells it")


def _without_targets(number: int, batch: StepBatch | None) -> TrainingError:
    samples = batch.positions.tolist() if batch else []
    return TrainingError(
        f"step {number}: no target carries a loss (samples {samples[:8]}); prepare documents of two tokens or more, or pack them with "
        "data.boundary_loss=true, by which their first tokens carry one"
    )
