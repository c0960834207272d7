"""One process of a run, from a configuration to an exit code."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import traceback
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from pretrain.checkpoint.stored_run import stored_run
from pretrain.checkpoint.undo import Undo
from pretrain.config.schema import Config
from pretrain.data.data_of_all_ranks import verify_everywhere
from pretrain.distributed import ranks as distributed
from pretrain.distributed.agreement import machine_name, run_facts
from pretrain.distributed.cores import kept_on_cores
from pretrain.distributed.joining import Meeting
from pretrain.distributed.launcher import check_launcher, expected_world_size, ranks_of_host
from pretrain.distributed.ranks import Ranks
from pretrain.distributed.surroundings import describe_surroundings, surroundings
from pretrain.errors import CheckpointError, LaunchError, LostRankError, TrainingError, UserError, line_of, print_error
from pretrain.huggingface.export_check import start_export_check
from pretrain.models.compiling import needs_folder
from pretrain.models.families import family_of
from pretrain.observe.logs import TRACEBACKS, finish_line, log_to_console, log_to_file
from pretrain.observe.metrics import duration
from pretrain.observe.rank_file import RankFile
from pretrain.parallel.explain import explain_ranks
from pretrain.train.attention_kernel import describe_attention, set_attention_kernel
from pretrain.train.description import costs_of_layers, describe, describe_other_devices, describe_threads
from pretrain.train.extensions import NO_EXTENSIONS, Extensions
from pretrain.train.out_of_memory import explaining_memory
from pretrain.train.plan import Plan, check_without_data, make_plan
from pretrain.train.run_directory import RunDirectory, directory_of, utc_now
from pretrain.train.run_lock import SIGHT_SECONDS, sees_token
from pretrain.train.starting_point import StartingPoint, agreed_format, find_starting_point, found_format
from pretrain.train.stop import StopRequest
from pretrain.train.trainer import Trainer

log = logging.getLogger(__name__)


def check(config: Config, processes: int | None = None, explain: bool = False) -> None:
    """Run every check that needs no training. Without a launcher, assume `processes`, or as many as the configuration asks for.
    `explain`: print what each rank has.

    If the plan cannot be made, the checks that need no data are made all the same: configuration, layout, run directory.
    """
    check_launcher(config)
    rank, local_rank, world_size = distributed.launched_ranks()
    if processes is not None and world_size > 1:
        raise LaunchError(
            f"--ranks={processes} is for a check without a launcher, which started {world_size} processes; remove it"
        )
    if world_size == 1:
        world_size = processes or expected_world_size(config) or 1
    device = distributed.choose_device(config, local_rank)
    try:
        plan = make_plan(config, world_size, device, found_format(config, device))
        verify_everywhere(plan.data.holdings, False, Ranks(0, 0, 1, device))
    except UserError as problem:
        _check_the_rest(config, world_size, device, problem, is_first=rank == 0)
        raise
    if rank == 0:
        starting_point, intentions = _check_directory(plan)
        print("\n".join([*describe(plan, world_size, starting_point), *describe_other_devices(plan, device), *intentions]))
        if explain:
            print("\n".join(explain_ranks(plan.layout, plan.config, costs_of_layers(plan))))
        _check_export(plan)
        print("the configuration is valid")


def _check_the_rest(config: Config, world_size: int, device: torch.device, problem: UserError, is_first: bool) -> None:
    """Make the checks that need no data. If they find another problem, print `problem` and raise the other."""
    try:
        check_without_data(config, world_size, device)
        RunDirectory(directory_of(config.run), config.run.lock).check()
    except UserError as found:
        if is_first and str(found) != str(problem):
            print_error(problem)
        raise


def _check_directory(plan: Plan) -> tuple[StartingPoint, list[str]]:
    """The point that a start would continue from, and what it would do. Raises the error that would refuse the start."""
    run = plan.config.run
    directory, stored = RunDirectory(directory_of(run), run.lock), stored_run(plan.config)
    directory.check()
    if stored is not None and (lacking := stored.lacking(directory.checkpoints, run.resume)):
        return StartingPoint(), [
            f"would download {lacking[0].folder} from {stored.shown}, and resume from it if it is intact and of this run"
        ]
    starting_point = find_starting_point(plan, directory, Ranks(0, 0, 1, torch.device("cpu")), content=False)
    return starting_point, _intentions(plan, starting_point)


def _intentions(plan: Plan, starting_point: StartingPoint) -> list[str]:
    if starting_point.resumed is None:
        weights = f" with the weights of {starting_point.weights.path}" if starting_point.weights else ""
        return [f"would start at step 0{weights}", *starting_point.lines]
    aside = [f"would set aside {path}" for path in (*starting_point.resumed.damaged, *starting_point.resumed.abandoned)]
    left = "" if starting_point.step < plan.config.run.steps else ", with no step left to train"
    return [
        f"would resume from step {starting_point.step} of {starting_point.resumed.path}{left} (sizes of its files verified, not their content)",
        *aside,
        *starting_point.lines,
    ]


def _check_export(plan: Plan) -> None:
    export = start_export_check(plan.config, plan.data.tokenizer_path, plan.data.added_tokens, print)
    if export is not None:
        with export:
            if problem := export.finish():
                raise CheckpointError(problem)


def train(config: Config, end: ExitStack, extensions: Extensions = NO_EXTENSIONS) -> None:
    """Train until the run is finished, preempted or stopped. UserError is raised after its status says `failed`. `end` gives the signals back."""
    check_launcher(config)
    rank, local_rank, world_size = distributed.launched_ranks()
    log_to_console(rank == 0)
    prepare_process(config)
    meeting = Meeting(rank, local_rank, world_size, config.parallel.join_seconds, config.parallel.timeout_seconds)
    try:
        device = distributed.choose_device(config, local_rank)
        kept = partial(kept_on_cores, config.run.affinity, device, local_rank, ranks_of_host(world_size))
        with kept():
            choice = agreed_format(config, device, meeting)
        with meeting.doing("plan of the run"):
            plan = make_plan(
                config, world_size, device, choice
            )  # on all cores: it may prepare text, while the other ranks wait
        with kept():
            torch.set_float32_matmul_precision("high" if plan.config.precision.tf32 else "highest")
            directory = RunDirectory(directory_of(plan.config.run), plan.config.run.lock)
            _agree(plan, device, meeting, directory, extensions)
            ranks = distributed.start(plan.config, plan.layout.strategy == "single", meeting)
            _train_together(plan, ranks, directory, extensions, end)
    except BaseException as error:
        meeting.leave(error)
        raise
    distributed.stop()


def prepare_process(config: Config) -> None:
    """Set what holds for this whole process. It must precede the first call of CUDA."""
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.use_deterministic_algorithms(config.run.deterministic)
    except OSError as error:  # it imports the compiler, as optimizers do
        raise TrainingError(needs_folder(error)) from error
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    set_attention_kernel(config.run.attention_kernel, shapes_change=bool(config.data.pairs))


def _agree(plan: Plan, device: torch.device, meeting: Meeting, directory: RunDirectory, extensions: Extensions) -> None:
    """Wait for all ranks, and make sure that all will train the same run."""
    if meeting.world_size == 1:
        return

    def keep(differences: list[str]) -> None:
        log_to_file(directory.path / "logs", meeting.rank)
        for line in differences:
            logging.getLogger(TRACEBACKS).error("%s", line)

    packages = family_of(plan.config.model.family).packages
    facts = run_facts(dataclasses.asdict(plan.config), device.type, plan.facts() | extensions.facts(), list(packages))
    for note in meeting.join(facts, machine_name(str(device)), keep):
        log.warning(note)


def _train_together(plan: Plan, ranks: Ranks, directory: RunDirectory, extensions: Extensions, end: ExitStack) -> None:
    trainer, stop = None, StopRequest(alone=ranks.world_size == 1)

    def record(error: BaseException) -> None:
        _record_failure(directory, trainer, ranks, error)

    if ranks.monitor is not None:

        def end_with(line: str) -> None:
            finish_line()
            record(LostRankError(line))
            directory.release()

        ranks.monitor.keep_record(directory.path / "logs", end_with)
    rank_file = RankFile(directory.path)
    try:
        verify_everywhere(plan.data.holdings, False, ranks)  # before a directory is made for a run that cannot start
        _claim(directory, ranks)
        ranks.tell_of_ranks(rank_file.put)
        starting_point = _fetch_and_find(plan, directory, ranks)
        place = surroundings(ranks)
        if ranks.is_main:
            lines = [
                *describe(plan, ranks.world_size, starting_point),
                *describe_surroundings(place),
                f"attention {describe_attention(plan.config, ranks.device)}",
                *describe_threads(ranks, plan.config.run.affinity),
            ]
            for line in [*lines, *starting_point.lines]:
                log.info(line)
        _hash_data(plan, ranks)
        what = "construction of the model"
        with ranks.part(what, device=True), explaining_memory(f"the {what}", plan, directory, ranks.rank):
            trainer = Trainer(plan, ranks, directory, starting_point, extensions)
        evaluated = ranks.on_main("status of the run", lambda: directory.status().get("state") == "finished", CheckpointError)
        _begin(directory, plan, ranks, trainer, place)
        # Until the process ends: a second notice from the scheduler must not end a rank that reports success.
        end.enter_context(stop)
        with ExitStack() as stack:
            export = None
            if ranks.is_main and trainer.progress.step == 0:
                export = start_export_check(
                    plan.config, plan.data.tokenizer_path, plan.data.added_tokens, log.info, ranks.world_size
                )
                stack.callback(lambda: export and export.close())
            outcome = trainer.fit(stop, export, evaluated)
            ranks.barrier("end of the run")
            if ranks.is_main:
                directory.write_status(outcome, trainer.progress.step, trainer.end_reason or _REASONS.get(outcome))
                said = f" ({trainer.end_reason})" if trainer.end_reason else ""
                log.info("%s at step %d: %s%s", outcome, trainer.progress.step, directory.path, said)
            trainer.continuation.wait_for_removal()
            stop.ignore()
    except BaseException as error:
        record(error)
        raise
    finally:
        ranks.tell_of_ranks(None)
        rank_file.close()
        directory.release()


_REASONS = {"preempted": "asked to stop by a signal; the same command continues"}


def _fetch_and_find(plan: Plan, directory: RunDirectory, ranks: Ranks) -> StartingPoint:
    """The starting point, after a download of what the run directory does not have. What was downloaded for nothing is removed again."""
    stored, undo = stored_run(plan.config), Undo()
    try:
        if stored is not None:
            stored.fetch(directory.path, plan.config.run.resume, ranks, undo)
        return find_starting_point(plan, directory, ranks)
    except UserError:
        undo.run(ranks)
        raise


def _claim(directory: RunDirectory, ranks: Ranks) -> None:
    ranks.on_main("claim of the run directory", directory.claim, CheckpointError)
    token = ranks.gather("owner of the run directory", directory.token)[0]
    ranks.agree(
        "sight of the run directory",
        None
        if sees_token(directory.path, token)
        else f"{directory.path} is not the main rank's (looked for {SIGHT_SECONDS:g} s); run.dir must be on storage that all nodes share",
        CheckpointError,
    )
    log_to_file(directory.path / "logs", ranks.rank)


def _begin(directory: RunDirectory, plan: Plan, ranks: Ranks, trainer: Trainer, place: dict[str, Any]) -> None:
    """Nothing can refuse the start any more: what the run leaves behind is set aside, and the start is recorded."""
    # First in the object store: where only the run directory had left a time line, a start that follows would download it again.
    trainer.continuation.take_over_copies()
    ranks.on_main("record of a start", lambda: _record_start(directory, plan, ranks, trainer, place), CheckpointError)
    trainer.continuation.begin_uploads()


def _record_start(directory: RunDirectory, plan: Plan, ranks: Ranks, trainer: Trainer, place: dict[str, Any]) -> None:
    # Written only now: a refused start must not change what the directory says about its run.
    trainer.continuation.set_aside()
    start = {
        "step": trainer.progress.step,
        "samples": trainer.progress.samples,
        "time": utc_now(),
        "world_size": ranks.world_size,
        "data_size": plan.layout.data_size,
        "folder": os.getcwd(),
        "environment": place,
        "fingerprints": plan.data.fingerprints,
        "config": dataclasses.asdict(plan.config),
    }
    directory.devices = ranks.world_size
    directory.record_start(plan.identity(0), plan.written_config, start)
    directory.write_status("running", trainer.progress.step)


def _hash_data(plan: Plan, ranks: Ranks) -> None:
    started = time.monotonic()
    if plan.config.data.verify == "full" and verify_everywhere(plan.data.holdings, True, ranks) and ranks.is_main:
        log.info("data: every shard matches its sha256 (%s)", duration(time.monotonic() - started))


def _record_failure(directory: RunDirectory, trainer: Trainer | None, ranks: Ranks, error: BaseException) -> None:
    line = str(error).splitlines()[0] if str(error) else line_of(error)
    logging.getLogger(TRACEBACKS).error("%s\n%s", line, "".join(traceback.format_exception(error)))
    # If this start never took over the directory, the run there keeps its status.
    if ranks.is_main and directory.is_held and (trainer is not None or not directory.has_status):
        directory.write_status("failed", trainer.settled_step if trainer else 0, line)
