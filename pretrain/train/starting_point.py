"""The point that a start of a run continues from, decided before anything is built. `--check` asks the same.

run directory, run.resume --choose--> checkpoint --compare--> same model, optimizer and data? same settings, or accepted? steps left?
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from pretrain.checkpoint.choose import Choice, choose_checkpoint, choose_weights
from pretrain.checkpoint.files import checkpoints_at, complete_checkpoints, model_of
from pretrain.checkpoint.payload import Payload
from pretrain.checkpoint.stored_run import stored_run
from pretrain.config.read import parse, read_file
from pretrain.config.schema import Config
from pretrain.config.written import from_recorded, model_identity
from pretrain.data.sources import batch_schedule
from pretrain.data.tokenizers.tokenizer import copy_difference
from pretrain.distributed.joining import Meeting
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, ConfigError, LaunchError
from pretrain.models.families import family_of
from pretrain.optim.schedule import goes_by_tokens
from pretrain.parallel.blocks import DTYPES
from pretrain.train.identity import IN_STEPS, check_changes, check_model, difference_lines, identity_changes, setting_changes
from pretrain.train.number_format import FormatChoice, chosen_format, has_bf16
from pretrain.train.plan import Plan
from pretrain.train.run_directory import RunDirectory, directory_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartingPoint:
    """The point that a run continues from: a checkpoint, the weights of one, or (neither) initial weights.

    `lines`: text for a person, with the difference of the configurations. `own`: whether the checkpoint belongs to this run.
    """

    resumed: Choice | None = None
    weights: Choice | None = None
    own: bool = False
    lines: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps before it."""
        return self.resumed.state["step"] if self.resumed else 0

    @property
    def samples(self) -> int:
        """Training samples before it."""
        return self.resumed.state["samples"] if self.resumed else 0


def found_format(config: Config, device: torch.device) -> FormatChoice:
    """The number format to compute in. `auto` keeps that of a run that goes on; for a new one this process measures."""
    begun_in = _format_begun_in(config) if config.precision.compute == "auto" else None
    return chosen_format(config.precision.compute, device, begun_in)


def agreed_format(config: Config, device: torch.device, meeting: Meeting) -> FormatChoice:
    """The number format that the main rank finds. Raises LaunchError if this rank's device lacks it."""
    if config.precision.compute != "auto":
        return FormatChoice(config.precision.compute)
    choice = FormatChoice(*meeting.from_main("number format", lambda: found_format(config, device)))
    if choice.format == "bf16" and not has_bf16(device):
        raise LaunchError(
            f"precision.compute=auto is bf16, because {choice.reason}, and {torch.cuda.get_device_name(device)} of rank {meeting.rank} has none; "
            "set precision.compute=fp32"
        )
    return choice


def _format_begun_in(config: Config) -> str | None:
    """The number format that the run to go on with has computed in, by what it recorded; None for a new run."""
    resume, own = config.run.resume, RunDirectory(directory_of(config.run), config.run.lock)
    if resume == "never":
        return None
    path = own.config() if resume == "auto" or complete_checkpoints(own.checkpoints) else None
    uploaded = stored_run(config).config_of_newest() if path is None and config.checkpoint.upload else None
    if uploaded is not None:
        try:
            saved = from_recorded(parse(uploaded.decode("utf-8", "replace"), "config.yaml").values, "config.yaml")
        except ConfigError:  # it is damaged, which the download finds out
            return None
    else:
        if path is None and resume not in ("auto", "required"):
            path = checkpoints_at(Path(resume), "run.resume")[-1] / "config.yaml"
        saved = _config_of(path) if path is not None else None
    recorded = saved and saved.precision.compute
    return recorded if isinstance(recorded, str) and recorded in DTYPES else None


def find_starting_point(plan: Plan, directory: RunDirectory, ranks: Ranks, content: bool = True) -> StartingPoint:
    """The starting point that `run.resume` and `run.init_from` give. All ranks call it together. Nothing is changed, but for a damaged checkpoint of
    which the run has an uploaded copy.

    Without `content`, only the sizes of a checkpoint's files are verified, and all of it stays as it is. Raises CheckpointError or ConfigError if
    the run cannot be continued.
    """
    run, saved_last, named_before = plan.config.run, directory.saved_last, directory.was_resumed_from
    stored = stored_run(plan.config) if content else None
    resumed = choose_checkpoint(
        directory.path,
        run.resume,
        ranks,
        saved_last,
        named_before,
        content,
        lambda path: stored is not None and stored.renew(path, ranks),
    )
    weights = None
    if resumed is None and run.init_from is not None:
        weights = choose_weights(Path(run.init_from), ranks, content)

    def judge() -> list[str]:
        if resumed is not None:
            return _judge_checkpoint(plan, directory, resumed)
        lines = _judge_directory(plan, directory)
        if weights is not None:
            _judge_weights(plan, weights)
        return lines

    lines = ranks.on_main("comparison with a checkpoint", judge, CheckpointError)
    own = resumed is not None and resumed.path.parent == directory.checkpoints
    starting_point = StartingPoint(resumed, weights, own, tuple(lines))
    plan.data.check_suffices(starting_point.step, starting_point.samples)
    return starting_point


def _judge_checkpoint(plan: Plan, directory: RunDirectory, choice: Choice) -> list[str]:
    config, state, path = plan.config, choice.state, choice.path
    # Of thousands of ranks, the table of contents is gigabytes, and the others would wait for the main rank to read it.
    if not state.get("has_optimizer") and not Payload(path).names("optim."):
        raise CheckpointError(f"{path} has weights only and cannot be resumed; use run.init_from={path} for a new run")
    if state.get("identity") is None or state.get("layout") is None:
        raise CheckpointError(
            f"{path} does not say which run it is of, so it cannot be resumed; use run.init_from={path} for a new run"
        )
    if state["step"] > config.run.steps:
        raise ConfigError(
            f"run.steps={config.run.steps} is below the step {state['step']} of {path}; raise it, or choose another run.name"
        )
    saved = _config_of(path / "config.yaml")
    # Before the changes: another batch makes another schedule of a number of tokens, and accepting that would not help.
    _check_tokens(plan, choice, saved)
    settings = setting_changes(saved, config, state["step"]) if saved else []
    identity = identity_changes(state["identity"], plan.identity(state["samples"]))
    # If weights alone decide the mixture, a stage can keep the past as it was.
    by_weight = not any(source.max_epochs or source.tokens for source in config.data.sources)
    tokens = state["samples"] * config.data.sequence_length if by_weight else 0
    own = path.parent == directory.checkpoints
    check_changes(path, identity, settings, config.run.accept_changes, tokens, other_name=own)
    return _difference(saved, plan, path)


def _check_tokens(plan: Plan, choice: Choice, saved: Config | None) -> None:
    """Raise ConfigError if steps before the checkpoint had another batch than numbers of tokens are counted with."""
    step, taken = choice.state["step"], choice.state["samples"]
    counted = plan.data.samples_after(0, step)
    by_tokens = goes_by_tokens(plan.config.schedule)
    if counted == taken or not (plan.tokens or by_tokens):
        return
    schedule, length = plan.config.schedule, plan.config.data.sequence_length
    found = {
        "schedule.warmup_tokens": saved and saved.schedule.warmup_steps,  # the past stays as it was
        "schedule.decay_tokens": schedule.decay_steps,  # of today's batch, which the last steps have
    }
    if "run.tokens" in plan.tokens:
        found["run.tokens"] = batch_schedule(plan.config).step_of(-(-plan.tokens["run.tokens"] // length) - 1, taken, step)
    steps = [f"{IN_STEPS[key]}={found[key]} in place of {key}" for key in plan.tokens if found.get(key) is not None]
    if not plan.tokens:
        steps = ["by_tokens=false in the schedule"]
    given = " and ".join(f"{key}={tokens}" for key, tokens in plan.tokens.items()) or "a schedule that goes by tokens"
    raise ConfigError(
        f"{given} count{'s' if len(plan.tokens) <= 1 else ''} {counted} samples in the first {step} steps, as the batch is now, and {choice.path} "
        f"has taken {taken}; count in steps from here on{': ' if steps else ''}{', '.join(steps)}{_as_stage(plan, saved, step, taken)}"
    )


def _as_stage(plan: Plan, saved: Config | None, step: int, taken: int) -> str:
    """How to say of a past whose steps all had one batch that it had this one, and today's batch from here on."""
    sequences, size = saved.batch.sequences if saved else 0, plan.config.batch.sequences
    if plan.config.batch.ramp or step * sequences != taken:
        return ""
    return f"; or keep the tokens: batch.ramp=[{{until_tokens: {taken * plan.config.data.sequence_length}, sequences: {sequences}}}] and batch.sequences={size}"


def _judge_directory(plan: Plan, directory: RunDirectory) -> list[str]:
    """Check a run without a checkpoint. Perhaps it started before, and ended before it saved one."""
    held, config = directory.identity(), directory.config()
    if held is not None:
        # No step of the earlier start is left, so other changes do not matter.
        check_changes(directory.path, identity_changes(held, plan.identity(0)), [], plan.config.run.accept_changes)
    return _difference(_config_of(config), plan, directory.path) if config is not None else []


def _judge_weights(plan: Plan, source: Choice) -> None:
    own, theirs = plan.config.model, model_of(source.path, source.state)
    telling = {f"model.{name}" for model in (own, theirs) for name in family_of(model.family).smallest_section(model)}
    check_model(source.path, model_identity(source.state["model"]), model_identity(dataclasses.asdict(own)), telling)
    tokenizer = source.path / "tokenizer"
    if tokenizer.is_dir() and (difference := copy_difference(tokenizer, plan.data.tokenizer)):
        raise CheckpointError(
            f"run.init_from={source.path} was trained with another tokenizer than the data: {difference}; prepare the data with "
            f"{tokenizer}"
        )


def _config_of(path: Path) -> Config | None:
    """The configuration that a run recorded; None if a checkpoint has none."""
    return from_recorded(read_file(path).values, str(path)) if path.is_file() else None


def _difference(saved: Config | None, plan: Plan, holder: Path) -> list[str]:
    """The changes of the configuration: one line for each key."""
    changed = difference_lines(saved, plan.config) if saved else []
    return [f"configuration since {holder}, {len(changed)} different:", *(f"  {line}" for line in changed)] if changed else []
