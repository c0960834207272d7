"""A dry run of the export: whether what a run is going to save can leave for transformers is known in its first minute.

    at once, every start     the weight map against the network itself, config.json there and back
    beside the first steps   names and shapes against transformers' own class, the tokenizer's export and its proof

Training does not import transformers. So the main rank of a new run starts a process of its own for the second part. A failure of the check
ends the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.config.schema import Config
from pretrain.config.written import build_section
from pretrain.errors import UserError, line_of
from pretrain.huggingface.directory import check_round_trip, plan_weights
from pretrain.models.families import family_of

LIMIT_SECONDS = 300.0
NOT_KNOWN = os.EX_TEMPFAIL
"""Exit code of a check that this machine kept from its end, by a full disk for instance."""
_ROOT = Path(__file__).resolve().parents[2]
# Of the launcher and accelerate: the process is no rank, and transformers acts on some of them when it is imported.
_LEFT_OUT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "GROUP_", "ACCELERATE_", "FSDP_", "PARALLELISM_")
_REMEDY = "checkpoint.export_check=false trains without that"


def check_map(model: Model) -> None:
    """The part that needs nothing but our own code. Raises CheckpointError or ConfigError."""
    plan_weights(model)
    check_round_trip(model, family_of(model.family).to_hf(model))


class ExportCheck:
    """The part that needs transformers, in a process beside this one. Close it, or use it as a context."""

    def __init__(
        self,
        model: Model,
        tokenizer: Path,
        added: Sequence[str],
        say: Callable[[str], object],
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self.say, self.limit_seconds = say, limit_seconds
        self.started = time.monotonic()
        self._answer, self._complained = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-m", "pretrain.huggingface.export_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # libraries print there; the answer has a file of its own
            stderr=self._complained,
            pass_fds=[self._answer.fileno()],
            env=environment,
            start_new_session=True,  # a notice of preemption is for the run
        )
        task = {"model": dataclasses.asdict(model), "tokenizer": str(tokenizer.absolute()), "added": list(added)}
        task["answer"] = self._answer.fileno()
        with contextlib.suppress(BrokenPipeError):  # it ended at once, and its exit code says so
            self._process.stdin.write(json.dumps(task).encode())
            self._process.stdin.close()

    def __enter__(self) -> ExportCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def problem(self) -> str | None:
        """What would keep the run from being exported, once it is known; never waits."""
        if self._process is None or (self._process.poll() is None and self._seconds_left() > 0):
            return None
        return self._verdict()

    def finish(self, asked_to_stop: Callable[[], bool] = lambda: False) -> str | None:
        """The same, waited for, unless the run is asked to stop."""
        if self._process is None:
            return None
        while self._process.poll() is None and self._seconds_left() > 0 and not asked_to_stop():
            time.sleep(0.05)
        return self._verdict()

    def close(self) -> None:
        """End the process, whatever it is at."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._answer.close()
        self._complained.close()

    def _seconds_left(self) -> float:
        return self.limit_seconds - (time.monotonic() - self.started)

    def _verdict(self) -> str | None:
        code = self._process.poll()
        if code is None:
            self._process.kill()
            self._process.wait()
        self._process = None
        self._answer.seek(0)
        self._complained.seek(0)
        last = (self._complained.read().decode(errors="replace").strip() or f"exit code {code}").splitlines()[-1]
        if code is None or code < 0 or code == NOT_KNOWN:
            late = f"not done after {self.limit_seconds:g} s" if self._seconds_left() <= 0 else "left, for a request to stop"
            what = late if code is None else last if code == NOT_KNOWN else f"ended by signal {-code}"
            self.say(f"export check: {what}; whether this run can be exported is not known")
            return None
        if code > 0:
            return f"export check: this run could not be exported: {last}; {_REMEDY}"
        answer = json.loads(self._answer.read())
        if answer["problem"]:
            return f"export check: this run could not be exported: {answer['problem']}; {_REMEDY}"
        self.say(f"export check: {answer['said']}")
        return None


def start_export_check(
    config: Config, tokenizer: Path, added: Sequence[str], say: Callable[[str], object], world_size: int = 1
) -> ExportCheck | None:
    """Begin the check of a new run; None, and why is said, where there is nothing to check. `added`: tokens that the export gives the
    tokenizer. `world_size`: ranks that wait for the verdict.
    """
    if not config.checkpoint.export_check:
        say("export check: switched off by checkpoint.export_check=false")
    elif not family_of(config.model.family).has_export:
        say(f"export check: model.family={config.model.family} has no export to transformers")
    elif importlib.util.find_spec("transformers") is None:
        say("export check: transformers is not installed, so names and shapes were not held against its own")
    else:
        # Other ranks wait for the verdict in a collective.
        limit = LIMIT_SECONDS if world_size == 1 else min(LIMIT_SECONDS, config.parallel.timeout_seconds / 2)
        return ExportCheck(config.model, tokenizer, added, say, limit)
    return None


def _check_with_transformers(model: Model, tokenizer: Path, added: Sequence[str]) -> str:
    """What was found good. Raises UserError where something is not."""
    from pretrain.huggingface.export_model import write_description
    from pretrain.huggingface.verification import check_expected

    plan, config = plan_weights(model), family_of(model.family).to_hf(model)
    check_expected(config, plan)
    with tempfile.TemporaryDirectory(prefix="export-check-") as folder:
        _, notes = write_description(Path(folder), model, tokenizer, added)
    found = f"{len(plan.theirs)} tensors and the tokenizer are what transformers' {config['architectures'][0]} expects"
    return "; ".join([found, *notes])


def main() -> None:
    """The process: a task on standard input, the answer in the open file that the task names."""
    os.nice(10)  # training goes first
    try:
        _answer()
    except OSError as error:
        print(line_of(error), file=sys.stderr)
        sys.exit(NOT_KNOWN)


def _answer() -> None:
    task: dict[str, Any] = json.load(sys.stdin)
    started = time.monotonic()
    said, problem = "", None
    try:
        said = _check_with_transformers(build_section(Model, task["model"]), Path(task["tokenizer"]), task["added"])
    except UserError as error:
        problem = str(error)
    with open(task["answer"], "w", encoding="utf-8") as answer:
        json.dump({"said": f"{said} ({time.monotonic() - started:.1f} s)", "problem": problem}, answer)


if __name__ == "__main__":
    main()
