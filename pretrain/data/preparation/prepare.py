"""Text -> tokens -> shards: from any corpus to a prepared directory, in pieces that may be interrupted and distributed.

    inputs ──plan──▶ units of work ──N processes, M machines: read, tokenize──▶ parts ──assemble──▶ verified shards

One process reads, tokenizes and writes each unit into its own file (`unit_work`, `parts`). A later start finds and keeps these
files (`work_directory`). The shards are then put together from them (`assemble`). The order of documents is that of the sorted
files and of the rows in them, and every cut depends only on that order. So the output is the same byte for byte for any number of
processes, machines and interruptions. Memory is a batch per process, plus the largest document.

A document goes to the validation split when the hash of its text, read as a number in [0, 1), is below the fraction. Nothing else
decides: adding data never moves a document, duplicates land on the same side, and a larger fraction only adds to validation. A
few plain text files would be too few documents for that: the end of each is the validation split.

Unusable rows (not UTF-8, not JSON, no text, ids or characters that the tokenizer lacks) are left out, up to `max_invalid` in the
whole preparation. They are counted in the manifest and listed in invalid.jsonl.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.data.preparation.assemble import Selection, assemble, find_duplicates
from pretrain.data.preparation.encode import Encoder
from pretrain.data.preparation.inputs import InputFile, find_inputs, folders_taken
from pretrain.data.preparation.parts import PartSummary, UnitParts
from pretrain.data.preparation.preparation_plan import PreparationPlan, Settings
from pretrain.data.preparation.process_pool import ProcessPool
from pretrain.data.preparation.unit_work import UnitJob, do_unit, sample_texts
from pretrain.data.preparation.work_directory import WorkDirectory
from pretrain.data.shards.manifest import INVALID_NAME, SPLITS, Manifest, read_manifest
from pretrain.data.tokenizers.engine import choose_engine
from pretrain.data.tokenizers.tokenizer import Tokenizer, identity_of, load_tokenizer
from pretrain.errors import ConfigError, DataError, say
from pretrain.progress import MEGABYTE, CorpusProgress
from pretrain.storage import real, refuse_existing

_COUNTS = ("empty_documents", "duplicate_documents", "invalid_documents", "byte_order_marks")


@dataclass(frozen=True)
class PreparedSplit:
    """The content of one prepared directory."""

    path: Path
    documents: int
    tokens: int
    shards: int

    def __str__(self) -> str:
        shards = f"{self.shards:,} shard" + "s" * (self.shards != 1)
        return f"{self.path} ({self.documents:,} documents, {self.tokens:,} tokens, {shards})"


@dataclass(frozen=True)
class Preparation:
    """The outcome of `prepare` or `merge`; `str()` of it is the closing line of the tool.

    The counts cover the whole preparation; `byte_order_marks` were removed. `seconds` and the rate (MB of text) cover
    this start, and are 0 if it tokenized nothing. `repeated`: the same command had made the output before.
    """

    splits: tuple[PreparedSplit, ...]
    empty_documents: int
    duplicate_documents: int
    invalid_documents: int
    byte_order_marks: int
    seconds: float
    repeated: bool = False
    megabytes_per_second: float = 0.0

    def __str__(self) -> str:
        where = " and ".join(str(split) for split in self.splits)
        left_out = f"{self.empty_documents} empty documents skipped"
        if self.duplicate_documents:
            left_out += f", {self.duplicate_documents} duplicates removed"
        if self.invalid_documents:
            left_out += f", {self.invalid_documents} invalid rows left out (see {self.splits[0].path / INVALID_NAME})"
        if self.byte_order_marks:
            left_out += f", {self.byte_order_marks} byte order marks removed"
        if self.repeated:
            return f"nothing to do: the same command has prepared {where}; {left_out}"
        text = f"prepared {where}; {left_out}; {self.seconds:.1f} s"
        return f"{text}, {self.megabytes_per_second:.1f} MB/s" if self.megabytes_per_second else text


@dataclass(frozen=True)
class FinishedTask:
    """The outcome of `prepare` for one task of several."""

    task: int
    tasks: int
    units: int
    work: Path
    seconds: float

    def __str__(self) -> str:
        return (
            f"finished task {self.task} of {self.tasks} ({self.units} units of work in {self.work}) in {self.seconds:.1f} s;"
            " when all have, run: prepare_data.py merge --output DIR"
        )


def prepare(
    inputs: Sequence[str] | Sequence[InputFile],
    tokenizer: str | Path,
    output: str | Path,
    *,
    workers: int = 1,
    task: int | None = None,
    tasks: int = 1,
    restart: bool = False,
    unit_bytes: int | None = None,
    **options: object,
) -> Preparation | FinishedTask:
    """Tokenize `inputs` (files, globs, folders; or files found by `dataset_files`) into the prepared directory `output`.

    The `options` are those of `Settings`. With a `validation_fraction` above 0, `output` holds two prepared directories, `train`
    and `validation`, which appear together. With `workers` above 1 that many spawned processes do the work, so the calling script
    needs a main guard. With a `task` only the units with `number % tasks == task` are done, and left for `merge`.

    If the process is killed or fails, finished work stays in a hidden directory beside `output`. The next call with the same
    arguments finds it; `restart` deletes it first. `workers` changes no byte of the output. `unit_bytes` is for tests.

    Raises ConfigError for an argument out of range. Raises DataError for a problem with the files, an output that exists, and
    work that was begun with other inputs or options. `output` appears complete or not at all.
    """
    settings = Settings(**options)
    settings.check()
    _check_division(workers, task, tasks, restart)
    _check_place(inputs, output)
    begin = time.monotonic()
    if manifests := _manifests(output):
        plan, _ = _planned(inputs, tokenizer, settings, unit_bytes)
        return _repeated(manifests, output, plan, tidy=task is None)
    own = None if task is None else (task, tasks)
    with WorkDirectory.locked(output, own) as directory:
        refuse_existing(directory.output)
        if restart:
            directory.restart()
        plan, loaded = _planned(inputs, tokenizer, settings, unit_bytes)
        directory.agree(plan, loaded.save)
        parts = directory.parts(plan)
        with ProcessPool(workers) as pool:
            units = range(task or 0, len(plan.units), tasks)
            try:
                done = _do_units(plan, parts, pool, units, str(tokenizer))
            except DataError:
                if task is None and not parts.finished():
                    directory.restart()  # nothing is lost, and another attempt can begin
                raise
            if task is not None:
                return FinishedTask(task, tasks, len(units), directory.path, time.monotonic() - begin)
            result = _assembled(directory, plan, parts, pool, settings.max_invalid)
    seconds = time.monotonic() - begin
    rate = sum(summary.bytes for summary in done) / MEGABYTE / max(seconds, 1e-9)
    return dataclasses.replace(result, seconds=seconds, megabytes_per_second=rate)


def merge(output: str | Path, *, workers: int = 1, max_invalid: int | None = None) -> Preparation:
    """Put the tasks' work together into the output. `max_invalid`: by default that of the first task.

    Raises DataError naming the tasks that have not finished, and in the cases in which `prepare` does.
    """
    _check_division(workers, None, 1, False)
    begin = time.monotonic()
    if manifests := _manifests(output):
        return _repeated(manifests, output, None, tidy=True)
    with WorkDirectory.locked(output) as directory:
        refuse_existing(directory.output)
        plan = directory.read_plan()
        parts = directory.parts(plan)
        missing = sorted(set(range(len(plan.units))) - parts.finished().keys())
        if missing:
            tasks = directory.tasks()
            named = sorted({unit % tasks for unit in missing}) if tasks else []
            which = f"; run again, or wait for, task {', '.join(map(str, named))} of {tasks}" if named else ""
            raise DataError(f"{directory.path}: {len(missing)} of {len(plan.units)} units of work are not finished{which}")
        with ProcessPool(workers) as pool:
            limit = plan.settings.max_invalid if max_invalid is None else max_invalid
            result = _assembled(directory, plan, parts, pool, limit)
    return dataclasses.replace(result, seconds=time.monotonic() - begin)


def _check_division(workers: int, task: int | None, tasks: int, restart: bool) -> None:
    if workers < 1:
        raise ConfigError(f"--workers {workers}: expected at least 1")
    if tasks < 1:
        raise ConfigError(f"--tasks {tasks}: expected at least 1")
    if task is not None and not 0 <= task < tasks:
        raise ConfigError(f"--task {task}: expected 0 to {tasks - 1}, below --tasks {tasks}")
    if task is None and tasks != 1:
        raise ConfigError(f"--tasks {tasks}: say which one this is with --task")
    if task is not None and restart:
        raise ConfigError("--restart: not together with --task, which others may be working beside; remove the work directory")


def _check_place(inputs: Sequence[str] | Sequence[InputFile], output: str | Path) -> None:
    """Refuse an output that the same command, or another task, would take for input."""
    place = real(Path(output))
    for folder in (folder for item in inputs if isinstance(item, str) for folder in folders_taken(item)):
        if place.is_relative_to(real(Path(folder))):
            raise ConfigError(
                f"--output {output} lies in the input folder {folder}, and the next start would take it for input; choose a place outside of it"
            )


def _planned(
    inputs: Sequence[str] | Sequence[InputFile], tokenizer: str | Path, settings: Settings, unit_bytes: int | None
) -> tuple[PreparationPlan, Tokenizer]:
    loaded = load_tokenizer(tokenizer)
    Encoder(loaded, settings.fim_rate, settings.fim_spm_rate)  # refuses a tokenizer without their tokens
    named = [item for item in inputs if isinstance(item, str)]
    files = find_inputs(named) if named else list(inputs)
    return PreparationPlan.make(settings, identity_of(loaded), files, unit_bytes), loaded


def _manifests(output: str | Path) -> dict[Path, Manifest]:
    """The manifests of an output, which appears in one step; empty if it does not exist."""
    names = next((names for names in ((".",), SPLITS) if (Path(output) / names[0] / "manifest.json").is_file()), ())
    return {Path(output) / name: read_manifest(Path(output) / name) for name in names}


def _repeated(manifests: dict[Path, Manifest], output: str | Path, plan: PreparationPlan | None, tidy: bool) -> Preparation:
    """The existing output of the same `plan` (None: of the plan in the remaining work, if any). `tidy`: remove the work.

    Raises DataError for an output of another plan.
    """
    made_by = {manifest.plan_sha256 for manifest in manifests.values()}
    left = WorkDirectory(Path(output))
    if plan is None and left.begun:
        plan = left.read_plan()
    if None in made_by or (plan is not None and made_by != {plan.sha256}):
        which = _why_not_repeated(plan, next(iter(manifests.values()))) if plan else ""
        raise DataError(f"{output}: already exists{which} and was left as it is; choose another output or remove it first")
    if tidy and left.path.exists():
        # The work remains if a start was killed between its last two steps. A process that holds it removes it itself.
        with contextlib.suppress(DataError), WorkDirectory.locked(output) as directory:
            if directory.begun and directory.read_plan().sha256 in made_by:
                directory.remove()
    return dataclasses.replace(_outcome(manifests), repeated=True)


def _why_not_repeated(plan: PreparationPlan, before: Manifest) -> str:
    """The difference between `plan` and that of an output, as far as the output's manifest shows it."""
    if before.plan_sha256:
        for option, value, now in plan.settings.changes(before.preparation):
            return f", prepared with {option} {value!r} instead of {now!r},"
    return ", prepared from other inputs, or from these before one was modified, or with other options or another version of this program,"


def _outcome(manifests: dict[Path, Manifest]) -> Preparation:
    splits = [PreparedSplit(path, own.documents, own.tokens, len(own.shards)) for path, own in manifests.items()]
    counts = next(iter(manifests.values())).preparation
    return Preparation(tuple(splits), **{name: int(counts[name] or 0) for name in _COUNTS}, seconds=0.0)


def _assembled(
    directory: WorkDirectory, plan: PreparationPlan, parts: UnitParts, pool: ProcessPool, max_invalid: int
) -> Preparation:
    """Put the output together from the finished parts, and publish it."""
    settings = plan.settings
    found = parts.finished()
    summaries = [found[unit] for unit in range(len(plan.units))]
    documents = sum(summary.documents for summary in summaries)
    if not documents:
        directory.restart()
        raise DataError("the corpus is empty: the input files hold no document with any text")
    refuse_invalid(summaries, max_invalid)
    duplicates, count = find_duplicates(parts, summaries, directory.path / "deduplicate") if settings.deduplicate else (None, 0)
    total = {name: sum(getattr(summary, name) for summary in summaries) for name in ("empty", "invalid", "marks", "tokens")}
    counts = dict(zip(_COUNTS, (total["empty"], count, total["invalid"], total["marks"])))
    preparation = {**dataclasses.asdict(settings), **counts}
    root = directory.begin_assembly()
    names = SPLITS if settings.validation_fraction else (".",)
    manifests = {}
    with CorpusProgress("assembling", 2 * total["tokens"], " tokens") as progress:
        on_tokens = functools.partial(progress.add, 0, 0, 0)
        for number, name in enumerate(names):
            selection = Selection(parts, bool(number) if len(names) > 1 else None, duplicates)
            manifest = assemble(root / name, selection, plan, summaries, directory.copy_tokenizer, preparation, pool, on_tokens)
            if manifest is None:
                directory.restart()
                raise DataError(_empty_split(name, documents, plan))
            manifests[directory.output / name] = manifest
    directory.publish(root)
    return _outcome(manifests)


def _empty_split(name: str, documents: int, plan: PreparationPlan) -> str:
    if plan.cuts_tail:
        part = "end" if name == SPLITS[1] else "beginning"
        return f"the {name} split is empty: the {part} of every text file is too short, blank, invalid or a duplicate; choose another --validation-fraction"
    return (
        f"the {name} split is empty: none of the {documents} documents falls into it with --validation-fraction "
        f"{plan.settings.validation_fraction}; add data, cut text files into more documents with --documents line, or give one file of plain "
        "text, whose end is then the validation split"
    )


def refuse_invalid(summaries: Sequence[PartSummary], most: int) -> None:
    """Raise DataError if more rows are unusable than may be left out."""
    count = sum(summary.invalid for summary in summaries)
    if count > most:
        where, reason = next(row for summary in summaries for row in summary.invalid_rows)
        raise DataError(
            f"{count} rows cannot be used, more than --max-invalid {most}, the first of them {where}: {reason}; finished work is kept: "
            "correct the input, or start again with a larger number"
        )


def _do_units(
    plan: PreparationPlan, parts: UnitParts, pool: ProcessPool, units: Sequence[int], tokenizer: str
) -> list[PartSummary]:
    """Do the `units` that are not finished. Return what was done."""
    if plan.cuts_tail:
        share = f"{plan.settings.validation_fraction:.4g}"
        where = "from the next line on, or else from the next word or character"
        _say(
            f"too few text files for a share of {share} of them: the end of each, so much of it, is the validation split, {where}"
        )
    parts.remove_leftovers(units)
    settings, finished, done = plan.settings, parts.finished(), []
    todo = {unit: pieces for unit, pieces in enumerate(plan.pieces) if unit in units and unit not in finished}
    chosen = "library"
    if todo and not settings.ids_field:
        sample = sample_texts(list(todo.values()), settings, plan.tokenizer.eod_id)
        chosen = choose_engine(tokenizer, sample).engine
    if finished:
        _say(f"continuing: {len(finished)} of {len(plan.units)} units of work are finished")
    jobs = [
        UnitJob(unit, pieces, settings, tokenizer, plan.tokenizer, chosen, plan.cuts_tail, parts.directory)
        for unit, pieces in todo.items()
    ]
    total = sum(piece.size for pieces in todo.values() for piece in pieces)
    with CorpusProgress("preparing", total=total) as progress:
        for _, summary in pool.run(do_unit, jobs, lambda work: progress.add(*work)):
            done.append(summary)
            refuse_invalid([*finished.values(), *done], settings.max_invalid)
    return done


def _say(line: str) -> None:
    say(line, to_errors=True)
