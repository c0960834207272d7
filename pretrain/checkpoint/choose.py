"""Which checkpoint a run continues from: exactly one, verified, of the time line that the run is on.

A file that *cannot be read* (EIO, ESTALE, one that a node does not see yet) says nothing of the checkpoint. It is tried again for a while, and
then the run stops. A file whose *content differs* from its hash is damaged. The run then falls back to the checkpoint before.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pretrain.checkpoint import files
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, UnreadableError
from pretrain.storage import exists, real

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses before a file that cannot be read is tried again."""


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
) -> Choice | None:
    """The checkpoint to continue from, verified by all ranks together; None for a fresh start.

    What a path in `resume` means, if the run has no checkpoints of its own: it starts from there. If it has some:

        one of its own checkpoints     the run goes back to it
        the run's own directory        it continues from its newest
        where it began                 likewise, so that the same command can be given again (`named_before`: an earlier start gave this path)
        any other path                 an error

    The run falls back from a damaged checkpoint, with a warning, but not from one that was given as a path. If all are damaged, that is an
    error, never a fresh start. `saved_last`: name of the last checkpoint that the run is known to have saved. A start that does not find it
    is refused, unless a path names another of the run's own. Without `content`, only sizes are verified.

    Raises UnreadableError where the files cannot be read, and CheckpointError where no checkpoint can be chosen.
    """
    folder = run_directory / "checkpoints"
    # The main rank's view of the directory decides: another node may see it a moment later.
    found = _on_main(ranks, "choice of a checkpoint", lambda: _candidates(folder, resume, saved_last, named_before))
    return _choose_intact(found, folder, ranks, content) if found.paths else None


def choose_weights(path: Path, ranks: Ranks, content: bool) -> Choice:
    """The checkpoint at a path, or the newest intact one of the run there, verified by all ranks together. Raises as choose_checkpoint does."""
    found = _on_main(ranks, "choice of weights", lambda: _Candidates(tuple(files.checkpoints_at(path, "run.init_from"))))
    return _choose_intact(found, None, ranks, content)


def _choose_intact(found: _Candidates, folder: Path | None, ranks: Ranks, content: bool) -> Choice:
    """The newest intact one of one or more candidates. `folder`: of the run's own ones, which are set aside where they are damaged."""
    candidates, damaged = list(found.paths), []
    key = "run.init_from" if folder is None else "run.resume"

    def instead() -> str:
        return f"; to go on from the checkpoint before instead, {key}={candidates[-2]}" if len(candidates) > 1 else ""

    while problem := first_damage(candidates[-1], ranks, content, instead()):
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
    state, manifest = _on_main(
        ranks, "state of a checkpoint", lambda: (files.load_state(path), files.manifest_hash(path)), instead()
    )
    if path.parent == folder and state["step"] != files.step_of(path):
        own_name = files.step_name(state["step"])
        raise CheckpointError(
            f"{path} is the checkpoint of step {state['step']}, as its state.json says; rename it to {own_name}"
        )
    if not found.back:
        _on_main(ranks, "time line of a checkpoint", lambda: _check_line(candidates, state))
    return Choice(path, state, manifest, tuple(damaged), found.abandoned, found.back)


def _on_main(ranks: Ranks, name: str, look: Callable[[], T], instead: str = "") -> T:
    return _patiently(lambda: ranks.on_main(name, look, UnreadableError), instead)


def _patiently(look: Callable[[], T], instead: str) -> T:
    """The result of `look`, which all ranks call together, tried again after growing pauses where it raises UnreadableError on all.

    `instead`: for the message of the last one, what else can be done than wait for the storage.
    """
    said = None
    for seconds in RETRY_SECONDS:
        try:
            return look()
        except UnreadableError as error:
            if str(error) != said:
                said = str(error)
                log.warning("%s; tried again for %g s", error, sum(RETRY_SECONDS))
            time.sleep(seconds)
    try:
        return look()
    except UnreadableError as error:
        raise UnreadableError(
            f"{error}; tried for {sum(RETRY_SECONDS):g} s, nothing was changed: when the storage can be read, the same command continues{instead}"
        ) from error


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
        _refuse_another(folder, own, path)
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


def _refuse_another(folder: Path, own: list[Path], path: Path) -> NoReturn:
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
    return any(back and from_step == step for from_step, _, back in _timeline(_peek(checkpoint, needed=True)) or [])


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


def is_of_line(checkpoint: Path, state: dict[str, Any]) -> bool:
    """Whether a state descends from a checkpoint, which is not verified (see `descends`)."""
    return descends(state, _peek(checkpoint))


def _timeline(state: dict[str, Any]) -> list[tuple[int, str, bool]] | None:
    """The starts that led to a state: from which step, which, whether it went back there. None where the state does not say."""
    try:
        return [(int(part["from"]), str(part["start"]), bool(part.get("back"))) for part in state["timeline"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


# ---- whether it is intact -----------------------------------------------------------------------------------------------


def first_damage(checkpoint: Path, ranks: Ranks, content: bool = True, instead: str = "") -> str | None:
    """The first thing wrong with the content of a checkpoint's files, the ranks sharing the hashing; None when it is intact.

    A file that no rank finds is gone, which is damage. Raises UnreadableError, on all ranks, for one that stays unreadable where it is,
    or that some ranks find and others do not; `instead` ends its message.
    """
    intact = False
    manifest: str | None = None

    def look() -> str | None:
        nonlocal intact, manifest
        # what is wrong; the file that cannot be read; missing?
        found: tuple[str | None, str | None, bool] = (None, None, False)
        try:
            # The others wait for it, and see why. A file may take hours, and the ranks that have none are done at once.
            with ranks.part("hashes of a checkpoint", storage=True), ranks.in_pieces("hashes of a checkpoint") as seen:
                if not intact:
                    files.verify(checkpoint, ranks.rank, ranks.world_size, seen, content)
                    manifest = files.manifest_hash(checkpoint)
            intact = True
        except UnreadableError as error:
            found = str(error), error.path, error.missing
        except CheckpointError as error:
            found = str(error), None, False
        everyone = ranks.gather("hashes of a checkpoint", found)
        if differing := [text for text, path, _ in everyone if text and not path]:
            return differing[0]
        paths = [path for _, path, missing in everyone if missing]
        seen = ranks.gather("sight of a checkpoint's files", [os.path.exists(path) for path in paths]) if paths else []
        for number, path in enumerate(paths):
            if not any(rank[number] for rank in seen):
                return f"{path}: missing"
        for rank, (text, _, missing) in enumerate(everyone):
            if text:
                where = "" if ranks.world_size == 1 else f"rank {rank}: "
                raise UnreadableError(f"{where}{text}" + (" here, and other ranks find it" if missing else ""))
        _check_same(checkpoint, ranks, manifest)
        return None

    return _patiently(look, instead)


def _check_same(checkpoint: Path, ranks: Ranks, manifest: str | None) -> None:
    """Raise CheckpointError, on all ranks, where a path means another checkpoint on another rank: a copy that each node has, say.

    `manifest`: hash of this rank's, which holds the hashes of all files.
    """
    everyone = ranks.gather("manifests of a checkpoint", (manifest, socket.gethostname(), str(checkpoint.absolute())))
    first, main_host, main_path = everyone[0]
    for rank, (other, host, path) in enumerate(everyone):
        if other != first:
            raise CheckpointError(
                f"{checkpoint} is another checkpoint on rank {rank} ({host}: {path}) than on rank 0 ({main_host}: {main_path}); put it on "
                "storage that all nodes share, or an equal copy on each, and give its absolute path"
            )
