"""Which checkpoint a run continues from: exactly one, verified, of the time line that the run is on.

A file that cannot be read stops the run in the end. From a damaged checkpoint the run falls back to the one before (`verified.py`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pretrain.checkpoint import files
from pretrain.checkpoint.verified import first_damage, on_main_patiently
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, UnreadableError
from pretrain.storage import exists, real

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """A checkpoint to continue from, intact, what its state.json says, and the sha256 of its manifest.

    `damaged`, `abandoned`: the run's own ones that have to be set aside before it goes on. `back`: the run leaves its time line, and goes on
    from an earlier point of it.
    """

    path: Path
    state: dict[str, Any]
    manifest: str
    damaged: tuple[Path, ...] = ()
    abandoned: tuple[Path, ...] = ()
    back: bool = False

    def set_aside(self) -> list[str]:
        """Rename what the run leaves behind, so that no later start takes it for a checkpoint. One line for each; on the main rank only."""
        moves = [(path, "damaged") for path in self.damaged] + [(path, "abandoned") for path in self.abandoned]
        return [f"set aside {path} as {files.set_aside(path, why).name}; nothing of it is deleted" for path, why in moves]


def choose_checkpoint(
    run_directory: Path,
    resume: str,
    ranks: Ranks,
    saved_last: Callable[[], str | None],
    named_before: Callable[[Path], bool],
    content: bool,
    renew: Callable[[Path], bool] = lambda path: False,
) -> Choice | None:
    """The checkpoint to continue from, verified by all ranks together; None for a fresh start.

    What a path in `resume` means, if the run has no checkpoints of its own: it starts from there. If it has some:

        one of its own checkpoints     the run goes back to it
        the run's own directory        it continues from its newest
        where it began                 likewise, so that the same command can be given again (`named_before`: an earlier start gave this path)
        any other path                 an error

    The run falls back from a damaged checkpoint, with a warning, but not from one that was given as a path. If all are damaged, that is an
    error, never a fresh start. `saved_last`: name of the last checkpoint that the run is known to have saved. A start that does not find it
    is refused, unless a path names another of the run's own. Without `content`, only sizes are verified. `renew`: put an intact copy in the place of a
    damaged one of the run's own, from wherever there is one; whether that succeeded.

    Raises UnreadableError where the files cannot be read, and CheckpointError where no checkpoint can be chosen.
    """
    folder = run_directory / "checkpoints"
    # The main rank's view of the directory decides: another node may see it a moment later.
    found = on_main_patiently(ranks, "choice of a checkpoint", lambda: _candidates(folder, resume, saved_last, named_before))
    return _choose_intact(found, folder, ranks, content, renew) if found.paths else None


def choose_weights(path: Path, ranks: Ranks, content: bool) -> Choice:
    """The checkpoint at a path, or the newest intact one of the run there, verified by all ranks together. Raises as choose_checkpoint does."""
    found = on_main_patiently(
        ranks, "choice of weights", lambda: _Candidates(tuple(files.checkpoints_at(path, "run.init_from")))
    )
    return _choose_intact(found, None, ranks, content)


def _choose_intact(
    found: _Candidates, folder: Path | None, ranks: Ranks, content: bool, renew: Callable[[Path], bool] = lambda path: False
) -> Choice:
    """The newest intact one of one or more candidates. `folder`: of the run's own ones, which are set aside where they are damaged."""
    candidates, damaged, renewed = list(found.paths), [], set()
    key = "run.init_from" if folder is None else "run.resume"

    def instead() -> str:
        return f"; to go on from the checkpoint before instead, {key}={candidates[-2]}" if len(candidates) > 1 else ""

    while problem := first_damage(candidates[-1], ranks, content, instead()):
        newest = candidates[-1]
        if newest.parent == folder and newest not in renewed and renew(newest):
            renewed.add(newest)
            continue
        if len(candidates) == 1:
            other = (
                "run.resume names it, so no other one was tried"
                if found.back
                else "no earlier checkpoint is left to fall back to"
            )
            raise CheckpointError(f"{problem}; {other}, and nothing was started afresh")
        bad = candidates.pop()
        if ranks.is_main:
            log.warning("damaged checkpoint: %s; falling back to %s", problem, candidates[-1])
        if bad.parent == folder:
            damaged.append(bad)
    path = candidates[-1]
    state, manifest = on_main_patiently(
        ranks, "state of a checkpoint", lambda: (files.load_state(path), files.manifest_hash(path)), instead()
    )
    if path.parent == folder and state["step"] != files.step_of(path):
        own_name = files.step_name(state["step"])
        remedy = "move it out of this folder" if (folder / own_name).exists() else f"rename it to {own_name}"
        raise CheckpointError(f"{path} is the checkpoint of step {state['step']}, as its state.json says; {remedy}")
    if not found.back:
        on_main_patiently(ranks, "time line of a checkpoint", lambda: _check_line(candidates, state))
    return Choice(path, state, manifest, tuple(damaged), found.abandoned, found.back)


# ---- which --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidates:
    """Checkpoints to try, best last, and those to be set aside where the run goes `back`."""

    paths: tuple[Path, ...]
    abandoned: tuple[Path, ...] = ()
    back: bool = False


def _candidates(
    folder: Path, resume: str, saved_last: Callable[[], str | None], named_before: Callable[[Path], bool]
) -> _Candidates:
    own, incomplete = files.complete_checkpoints(folder), files.incomplete_checkpoints(folder)
    for path in incomplete:
        log.warning("incomplete checkpoint: %s has no %s and is passed over", path, files.MANIFEST)
    if resume == "never" and own:
        raise CheckpointError(
            f"run.resume=never, but {folder.parent} has checkpoints up to {own[-1].name}; "
            "choose another run.name, or run.resume=auto to continue"
        )
    path = None if resume in ("auto", "required", "never") else Path(resume)
    named = next((checkpoint for checkpoint in own if path is not None and real(checkpoint) == real(path)), None)
    if named is not None:  # who names one that is there has chosen among what is seen
        return _going_back(own, named, path)
    # Before any other start: without a sight of its own checkpoints, a run would begin anew and later write over what it has.
    _refuse_lost(folder, own, saved_last(), resume)
    if resume == "required" and not own:
        raise CheckpointError(f"run.resume=required, but {folder} has no complete checkpoint")
    if incomplete and not own:
        raise CheckpointError(
            f"{incomplete[-1]} has no {files.MANIFEST}, and there is no complete checkpoint: a partial copy? "
            "Restore it, or remove it to start afresh"
        )
    if path is None:
        return _Candidates(tuple(own))
    went_back = bool(own) and _went_back(own[-1], folder, path)
    if not went_back:
        _refuse_inside(folder, own, path)
    if not own:
        return _Candidates(tuple(files.checkpoints_at(path, "run.resume")))
    if not (went_back or real(path) == real(folder.parent) or named_before(path)):
        _refuse_another(own, path)
    log.info("run.resume=%s: this run has checkpoints of its own and continues from those", path)
    return _Candidates(tuple(own))


def _refuse_lost(folder: Path, own: list[Path], newest: str | None, resume: str) -> None:
    """Raise UnreadableError where the checkpoint that was saved last is not seen.

    `run.resume=never` is refused at once: a checkpoint that the storage shows later would be refused too.
    """
    if newest is None or exists(folder / newest) or files.was_set_aside(folder / newest):
        return
    # A later one was saved after that was written; it may have retired this one.
    if any((len(p.name), p.name) > (len(newest), newest) for p in own):
        return
    status = folder.parent / "status.json"
    if resume == "never":
        raise CheckpointError(
            f"run.resume=never, but {folder / newest} was saved last, as status.json says, and is not there; choose another run.name, or, "
            f"if it was removed on purpose, remove {status} to start afresh"
        )
    remedy = (
        f"say so by run.resume=PATH of an earlier one, or by removing {status}" if own else f"remove {status} to start afresh"
    )
    raise UnreadableError(
        f"{folder / newest} was saved last, as status.json says, and is not there: shared storage may show it later; if it was removed on "
        f"purpose, {remedy}"
    )


def _refuse_inside(folder: Path, own: list[Path], path: Path) -> None:
    """Raise CheckpointError for a path in the run's own directory that is not one of its checkpoints.

    Whoever gives one wants to go back. If the run went on from its newest checkpoint, retention might soon remove the one that was meant.
    """
    place, *homes = (real(p) for p in (path, folder.parent, folder))  # checkpoints/ may be a link
    if place in homes[:1] or not any(place.is_relative_to(home) for home in homes):
        return
    nested = (p for p in (place, *place.parents) if p != homes[0] and p.is_relative_to(homes[0]))
    if any((p / folder.name).is_dir() for p in nested):  # of another run, as run.name may have several parts
        return
    number = re.search(r"step-(\d{1,18})", path.name)
    nearest = sorted(own, key=lambda c: abs(files.step_of(c) - int(number[1])) if number else -files.step_of(c))[:3]
    has = f"the run has {', '.join(sorted(c.name for c in nearest))} there" if own else "the run has none there"
    remedy = "name one of those, or run.resume=auto continues from the newest" if own else "run.resume=auto starts afresh"
    if exists(path / files.MANIFEST) and number:
        free = folder / files.step_name(int(number[1]))
        move = "" if exists(free) else f"copy it to {free} and name that, "
        remedy = f"to go on from it, {move}{'or ' if move else ''}choose another run.name"
    raise CheckpointError(
        f"run.resume={path} lies in the run's own directory and is not one of its checkpoints in {folder}: {has}; {remedy}"
    )


def _refuse_another(own: list[Path], path: Path) -> NoReturn:
    """Raise CheckpointError for a path outside the run that no start of it gave. Going on from the newest would not be what was asked for."""
    meant = next((checkpoint for checkpoint in own if checkpoint.name == path.name), None)
    remedy = f"for its {meant.name}, set run.resume={meant}" if meant else f"to start from {path}, choose another run.name"
    raise CheckpointError(
        f"run.resume={path} {'is not where this run began' if exists(path) else 'does not exist'}, and the run has checkpoints of its own, up to "
        f"{own[-1]}; run.resume=auto continues from that; {remedy}"
    )


def _went_back(newest: Path, folder: Path, path: Path) -> bool:
    """Whether the run went back to this checkpoint before, which it may have retired since: the same command can be given again."""
    if not files.is_checkpoint_name(path.name) or real(path).parent != real(folder):
        return False
    return _is_after_going_back(newest, files.step_of(path))


def _is_after_going_back(checkpoint: Path, step: int) -> bool:
    """Whether the run had gone back to this step before it saved the checkpoint."""
    return goes_back_to(_peek(checkpoint, needed=True).get("timeline"), step)


def goes_back_to(timeline: Any, step: int) -> bool:
    """Whether a start of this time line went back to a step."""
    return any(back and from_step == step for from_step, _, back in _timeline({"timeline": timeline}) or [])


def _going_back(own: list[Path], named: Path, path: Path) -> _Candidates:
    """What a path to one of the run's own checkpoints means: going back to it, or going on after the run has done so."""
    step = files.step_of(named)
    newer = [checkpoint for checkpoint in own if files.step_of(checkpoint) > step]
    for checkpoint in newer:
        if _is_after_going_back(checkpoint, step):
            log.info(
                "run.resume=%s: the run went back to it before, and continues from what it saved since; to go back once more, move %s to %s away",
                path, newer[0].name, newer[-1].name,
            )  # fmt: skip
            return _Candidates(tuple(own))
    state = _peek(named)
    strays = [c for c in own if files.step_of(c) < step and not is_of_line(c, state)]
    # Also where nothing is newer: the same command, given again, must find that what was saved since goes on from here.
    return _Candidates((named,), (*strays, *newer), back=True)


def _peek(checkpoint: Path, needed: bool = False) -> dict[str, Any]:
    """state.json of a checkpoint that was not verified; empty where it is damaged, and unless it is `needed` where it cannot be read."""
    try:
        return dict(files.load_state(checkpoint))
    except UnreadableError as error:
        if needed and not error.missing:
            raise
    except (CheckpointError, TypeError, ValueError):
        pass
    return {}


def _check_line(candidates: list[Path], state: dict[str, Any]) -> None:
    """Raise CheckpointError unless the newest good checkpoint descends from the one before it."""
    newest, own = candidates[-1], state.get("parent") or {}
    earlier = next(((path, found) for path in reversed(candidates[:-1]) if (found := _peek(path))), None)
    if earlier is None or descends(state, earlier[1]):
        return
    raise CheckpointError(
        f"{newest} does not descend from {earlier[0]}: it goes on from step {own.get('step', 'unknown')}, so they are of two time lines. Say "
        f"which one is continued: run.resume={newest} or run.resume={earlier[0]}; in its own run the other is then set aside, not deleted"
    )


def descends(later: dict[str, Any], earlier: dict[str, Any]) -> bool:
    """Whether the run that saved one state had come through the other. Taken for granted where a state does not say.

    A time line lists the starts of a run, each with the step it went on from. Two states are of one line where the starts before the
    earlier one are the same in both.
    """
    line, until = _timeline(later), earlier.get("step")
    if line is None or until is None:
        return True
    parts = [[start for from_step, start, _ in starts if from_step < until] for starts in (line, _timeline(earlier) or [])]
    return parts[0] == parts[1]


def continues(later: Any, earlier: Any) -> bool:
    """Whether a time line begins with all starts of another one."""
    starts, first = (_timeline({"timeline": line}) or [] for line in (later, earlier))
    return [start for _, start, _ in starts[: len(first)]] == [start for _, start, _ in first]


def is_of_line(checkpoint: Path, state: dict[str, Any]) -> bool:
    """Whether a state descends from a checkpoint, which is not verified (see `descends`)."""
    return descends(state, _peek(checkpoint))


def _timeline(state: dict[str, Any]) -> list[tuple[int, str, bool]] | None:
    """The starts that led to a state: from which step, which, whether it went back there. None where the state does not say."""
    try:
        return [(int(part["from"]), str(part["start"]), bool(part.get("back"))) for part in state["timeline"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
