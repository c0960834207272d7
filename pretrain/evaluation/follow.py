"""Evaluation beside a run: a process of its own evaluates each checkpoint that the run saves, and adds a line to evaluations.jsonl."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pretrain.checkpoint import files
from pretrain.errors import CheckpointError, DataError, UnreadableError
from pretrain.observe.metrics import EVALUATIONS_FILE, STARTS_FILE, read_lines
from pretrain.observe.run_story import unix_seconds
from pretrain.storage import append_line, plain, read_object

ENDED = ("finished", "failed", "stopped", "preempted")
SILENT_SECONDS = 600.0
"""A run that says it is running, and has logged nothing for so long, may have been killed."""


def follow(
    run: Path,
    evaluate: Callable[[Path], dict[str, Any]],
    on: list[str],
    settings: dict[str, Any],
    wait_seconds: float,
    tell: Callable[[str], None],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Evaluate the run's checkpoints, oldest first, also those to come, until the run has ended. Yields (step, results) of each.

    `on`: what they are evaluated on; `settings`: the options that decide the results, as JSON values. A checkpoint that has a line with both is
    not evaluated again. Another one of the same step is evaluated: the run made it after it went back. A checkpoint that the run removes meanwhile (`checkpoint.keep_last`) is left out. `tell` is
    given a line when the run has been silent for long, once for each silence.
    """
    if not (run / STARTS_FILE).is_file():
        raise DataError(f"{run}: no run has started there ({STARTS_FILE} is missing)")
    told = None
    while True:
        status = read_object(run / "status.json")  # asked before looking: what was saved until then is found below
        has_ended, updated = status.get("state") in ENDED, status.get("updated")
        if not has_ended and updated and updated != told and time.time() - unix_seconds(updated) > SILENT_SECONDS:
            told = updated
            tell(
                f"{run}: running by its status.json, but silent since {updated}; was it killed? Start it again, or end this by Ctrl-C"
            )
        lines = list(read_lines(run / EVALUATIONS_FILE)) if (run / EVALUATIONS_FILE).is_file() else []
        known = {line.get("checkpoint") for line in lines if line.get("on") == on and line.get("settings") == settings}
        found = {_identity(path): path for path in files.complete_checkpoints(run / "checkpoints")}
        new = {identity: path for identity, path in found.items() if identity and identity not in known}
        for identity, checkpoint in new.items():
            step = files.step_of(checkpoint)
            try:
                results, tokens = evaluate(checkpoint), files.load_state(checkpoint)["tokens"]
            except (CheckpointError, DataError, OSError):
                if checkpoint.is_dir():
                    raise
                continue
            line = {
                "step": step,
                "tokens": tokens,
                "on": on,
                "settings": settings,
                "checkpoint": identity,
                "evaluation": results,
            }
            append_line(run / EVALUATIONS_FILE, json.dumps(plain(line), allow_nan=False))
            yield step, results
        if has_ended and not new:
            return
        if not new:
            time.sleep(wait_seconds)


def _identity(checkpoint: Path) -> str | None:
    """The sha256 of the manifest, which names every file with its own; None if the checkpoint is gone."""
    try:
        return files.manifest_hash(checkpoint)
    except UnreadableError:
        return None
