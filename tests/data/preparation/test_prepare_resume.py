"""Preparation that is interrupted, raced, shared out or out of disk: the same bytes in the end, or one line that says why not."""

import errno
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from running import tool

from pretrain.data.preparation import parts
from pretrain.data.preparation.prepare import FinishedTask, merge, prepare
from pretrain.data.preparation.work_directory import WorkDirectory
from pretrain.data.shards.reader import PreparedData
from pretrain.data.shards.writer import ShardWriter
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError, DataError
from pretrain.storage import copy_tree

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = {"validation_fraction": 0.2, "deduplicate": True, "shard_tokens": 3000, "unit_bytes": 1500}
DRIVER = """
import sys, json
from pretrain.data.preparation.prepare import prepare
if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    prepare(arguments.pop("inputs"), arguments.pop("tokenizer"), arguments.pop("output"), **arguments)
"""


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, texts) -> list[str]:
    """The texts twice, over a large file that is cut and small ones that are grouped."""
    root = tmp_path_factory.mktemp("inputs")
    lines = [json.dumps({"text": text}) + "\n" for text in [*texts[:150], "", *texts[100:200]]]
    (root / "a.jsonl").write_text("".join(lines))
    (root / "small").mkdir()
    for number, text in enumerate(texts[180:]):
        (root / "small" / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return [str(root)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory, inputs, trained) -> dict[str, bytes]:
    """The files of a preparation in one go, by one process."""
    output = tmp_path_factory.mktemp("straight") / "out"
    result = prepare(inputs, trained["bpe"], output, **OPTIONS)
    assert (result.empty_documents, result.duplicate_documents) == (1, 70)
    assert sum(split.documents for split in result.splits) == 216
    assert os.listdir(output.parent) == ["out"]
    return files_of(output)


# However the work is shared out.


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_bytes(inputs, trained, straight, tmp_path, workers):
    prepare(inputs, trained["bpe"], tmp_path / "out", workers=workers, **OPTIONS)
    assert files_of(tmp_path / "out") == straight
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("tasks", [1, 2, 3, 100])
def test_any_number_of_tasks_and_a_merge_give_the_same_bytes(inputs, trained, straight, tmp_path, tasks):
    for task in reversed(range(tasks)):
        done = prepare(inputs, trained["bpe"], tmp_path / "out", task=task, tasks=tasks, **OPTIONS)
        assert isinstance(done, FinishedTask) and not (tmp_path / "out").exists()
    result = merge(tmp_path / "out", workers=1)
    assert files_of(tmp_path / "out") == straight
    assert os.listdir(tmp_path) == ["out"]
    assert result.duplicate_documents == 70 and "70 duplicates removed" in str(result)


def test_tasks_that_start_at_once_agree_on_one_plan(inputs, trained, straight, tmp_path):
    arguments = {"inputs": inputs, "tokenizer": str(trained["bpe"]), "output": str(tmp_path / "out"), **OPTIONS, "tasks": 3}
    processes = [start({**arguments, "task": task}) for task in range(3)]
    for process in processes:
        assert process.wait() == 0, process.stderr.read()
        process.stderr.close()
    merge(tmp_path / "out")
    assert files_of(tmp_path / "out") == straight


def test_a_merge_before_the_tasks_have_finished_names_the_missing(inputs, trained, tmp_path):
    with pytest.raises(DataError, match="no preparation was begun there; run the tasks first"):
        merge(tmp_path / "out")
    assert os.listdir(tmp_path) == []
    for task in (0, 2):
        prepare(inputs, trained["bpe"], tmp_path / "out", task=task, tasks=4, **OPTIONS)
    with pytest.raises(DataError, match=r"\d+ of \d+ units of work are not finished; run again, or wait for, task 1, 3 of 4$"):
        merge(tmp_path / "out")
    prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)  # whoever starts without a task does the rest
    assert os.listdir(tmp_path) == ["out"]


def test_the_command_line_divides_the_work(inputs, trained, tmp_path, capsys):
    main = tool("prepare_data").main
    common = ["--output", str(tmp_path / "out"), "--workers", "1"]
    command = ["--input", *inputs, "--tokenizer", str(trained["bpe"]), *common]
    for task in range(2):
        assert main([*command, "--task", str(task), "--tasks", "2"]) == 0
        assert re.match(rf"finished task {task} of 2 \(\d units? of work in ", capsys.readouterr().out)
    assert main(["merge", *common]) == 0
    assert re.match(rf"prepared {tmp_path}/out \(286 documents, ", capsys.readouterr().out)
    for options, message in (
        (["--task", "2", "--tasks", "2"], "--task 2: expected 0 to 1"),
        (["--tasks", "2"], "--tasks 2: say which one this is with --task"),
        (["--task", "0", "--tasks", "2", "--restart"], "--restart: not together with --task"),
    ):
        assert main([*command, *options]) == 2
        assert message in capsys.readouterr().err


def test_the_shards_are_those_of_a_writer_that_gets_the_documents_one_by_one(inputs, trained, tmp_path):
    options = {"shard_tokens": 900, "unit_bytes": 700}
    prepare(inputs, trained["bpe"], tmp_path / "out", **options)
    data = PreparedData.open(tmp_path / "out")
    with ShardWriter.create(tmp_path / "reference", load_tokenizer(trained["bpe"]), 900) as writer:
        for start, end in map(data.document_span, range(data.documents)):
            writer.add(data.read(start, end - start), np.array([end - start]))
    ours, reference = files_of(tmp_path / "out"), files_of(tmp_path / "reference")
    names = [name for name in reference if name.endswith((".bin", ".idx"))]
    assert len(names) > 20 and all(ours[name] == reference[name] for name in names)
    assert {name for name in ours if name.startswith("shard")} == {name for name in reference if name.startswith("shard")}


# Interruption.


def start(arguments: dict) -> subprocess.Popen:
    """A preparation in a process group of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DRIVER, json.dumps(arguments)]
    return subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)


def kill_until_done(arguments: dict, kills: int, seed: int, longest: float) -> int:
    """Kill the preparation with SIGKILL, workers and all, at random moments, then let it end; how many kills hit it alive."""
    moments = random.Random(seed)
    hits = 0
    for _ in range(kills):
        process = start(arguments)
        # From the first sign of life on, so that the kills spread over the work and not over Python's start.
        work = Path(arguments["output"]).parent / f".{Path(arguments['output']).name}.preparing"
        while process.poll() is None and not work.exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, longest))
        if process.poll() is None:
            hits += 1
            # Sometimes the parent alone, whose orphans must not disturb the next start.
            (os.kill if moments.random() < 0.3 else os.killpg)(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
        if Path(arguments["output"]).exists() and not work.exists():
            return hits
    process = start(arguments)
    assert process.wait() == 0, process.stderr.read()
    process.stderr.close()
    return hits


@pytest.mark.parametrize("whole_group", [pytest.param(True, marks=pytest.mark.slow), False])
def test_killed_preparations_go_on_and_end_in_the_same_bytes(inputs, trained, straight, tmp_path, whole_group):
    """Killed by SIGKILL at three stages, with the workers or alone: the orphans of one start must not disturb the next."""
    arguments = {"inputs": inputs, "tokenizer": str(trained["bpe"]), "output": str(tmp_path / "out"), **OPTIONS, "workers": 2}
    work = tmp_path / ".out.preparing"
    for enough in (1, 12, 25):
        process = start(arguments)
        while len(list(work.glob("parts-*/*.part"))) < enough:
            assert process.poll() is None, process.stderr.read()
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.stderr.close()
        assert not (tmp_path / "out").exists()
    prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)
    assert files_of(tmp_path / "out") == straight
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.slow
def test_a_campaign_of_kills_changes_no_byte(inputs, trained, straight, tmp_path):
    """python -m pytest tests/data/preparation/test_prepare_resume.py -m slow -k campaign -s"""
    arguments = {"inputs": inputs, "tokenizer": str(trained["bpe"]), **OPTIONS, "workers": 2}
    begin = time.monotonic()
    process = start({**arguments, "output": str(tmp_path / "timed")})
    assert process.wait() == 0, process.stderr.read()
    process.stderr.close()
    longest = time.monotonic() - begin  # of a run in one go on this machine: kills fall anywhere in it
    hits = runs = 0
    while hits < 30:
        output = tmp_path / f"out-{runs}"
        hits += kill_until_done({**arguments, "output": str(output)}, kills=5, seed=runs, longest=longest * 0.7)
        assert files_of(output) == straight, runs
        runs += 1
        assert runs < 60
    print(f"{hits} kills of live preparations in {runs} runs, each with the same bytes")
    assert sorted(os.listdir(tmp_path)) == sorted(["timed", *(f"out-{run}" for run in range(runs))])


class Stopped(BaseException):
    """What stands for a kill inside this process."""


STEPS = [
    "PartWriter.finish",
    "find_duplicates",
    "write_shard",
    "write_manifest",
    "verify_shard",
    "flush_tree",
    "rename_into_place",
    "remove",
]


@pytest.mark.parametrize("step", STEPS)
def test_a_stop_at_any_step_is_made_good_by_the_next_start(inputs, trained, straight, tmp_path, monkeypatch, step):
    place = {
        "PartWriter.finish": "pretrain.data.preparation.parts.PartWriter.finish", "find_duplicates": "pretrain.data.preparation.prepare.find_duplicates",
        "write_shard": "pretrain.data.preparation.assemble.write_shard", "write_manifest": "pretrain.data.preparation.assemble.write_manifest",
        "verify_shard": "pretrain.data.preparation.assemble.verify_shard", "flush_tree": "pretrain.data.preparation.work_directory.flush_tree",
        "rename_into_place": "pretrain.data.preparation.work_directory.rename_into_place",
        "remove": "pretrain.data.preparation.work_directory.WorkDirectory.remove",
    }[step]  # fmt: skip
    calls = []

    def stop(*arguments, **options):
        calls.append(1)
        if len(calls) == {"flush_tree": 2, "PartWriter.finish": 3}.get(step, 1):
            raise Stopped
        return original(*arguments, **options)

    module, _, name = place.rpartition(".")
    with monkeypatch.context() as patch:
        original = eval_place(place)
        patch.setattr(place, stop)
        with pytest.raises(Stopped):
            prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)
    assert (tmp_path / "out").exists() == (step == "remove")
    result = prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)
    assert (result.duplicate_documents, sum(split.documents for split in result.splits)) == (70, 216)
    assert files_of(tmp_path / "out") == straight
    assert os.listdir(tmp_path) == ["out"]


def eval_place(place: str):
    import pkgutil

    return pkgutil.resolve_name(place)


def test_finished_units_are_not_done_again(inputs, trained, tmp_path, monkeypatch, capsys):
    done = []
    original = parts.PartWriter.finish

    def finish(self, **counts):
        done.append(self._file.name)
        if len(done) == 5:
            raise Stopped
        return original(self, **counts)

    monkeypatch.setattr(parts.PartWriter, "finish", finish)
    with pytest.raises(Stopped):
        prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)
    prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)
    assert len(set(done[:4])) == 4 and not set(done[:4]) & set(done[5:])
    assert re.search(r"continuing: 4 of \d+ units of work are finished", capsys.readouterr().err)


def interrupted(inputs, trained, output, monkeypatch, **options) -> None:
    """A work directory with two finished units."""
    with monkeypatch.context() as patch:
        finished = []
        original = parts.PartWriter.finish

        def finish(self, **counts):
            if len(finished) == 2:
                raise Stopped
            finished.append(1)
            return original(self, **counts)

        patch.setattr(parts.PartWriter, "finish", finish)
        with pytest.raises(Stopped):
            prepare(inputs, trained["bpe"], output, **{**OPTIONS, **options})


def test_a_damaged_part_is_done_again(inputs, trained, straight, tmp_path, monkeypatch):
    interrupted(inputs, trained, tmp_path / "out", monkeypatch)
    first, second = sorted((tmp_path / ".out.preparing").glob("parts-*/*.part"))
    first.write_bytes(first.read_bytes()[:-100])
    second.write_bytes(b"")
    prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)
    assert files_of(tmp_path / "out") == straight


@pytest.mark.parametrize(
    "change, message",
    [
        ({"validation_fraction": 0.3}, r"--validation-fraction was 0\.2 and is 0\.3; go back"),
        ({"text_mode": "line"}, "--documents was 'file' and is 'line'"),
        ({"deduplicate": False, "shard_tokens": 5000}, r"--deduplicate was True and is False \(and 1 more differences\)"),
        ({"unit_bytes": 2000}, "the cut into units has changed"),
    ],
)
def test_other_options_than_the_work_was_begun_with_are_refused(inputs, trained, tmp_path, monkeypatch, change, message):
    interrupted(inputs, trained, tmp_path / "out", monkeypatch)
    with pytest.raises(DataError, match=message) as caught:
        prepare(inputs, trained["bpe"], tmp_path / "out", **{**OPTIONS, **change})
    assert "--restart" in str(caught.value) and "\n" not in str(caught.value)
    prepare(inputs, trained["bpe"], tmp_path / "out", **{**OPTIONS, **change}, restart=True)
    assert os.listdir(tmp_path) == ["out"]


def test_other_inputs_than_the_work_was_begun_with_are_refused(trained, tmp_path, monkeypatch, texts):
    root = tmp_path / "in"
    root.mkdir()
    for number, text in enumerate(texts[:40]):
        (root / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    output = tmp_path / "out"
    interrupted([str(root)], trained, output, monkeypatch, unit_bytes=300)

    def refusal(tokenizer="bpe") -> str:
        with pytest.raises(DataError) as caught:
            prepare([str(root)], trained[tokenizer], output, **{**OPTIONS, "unit_bytes": 300})
        return str(caught.value)

    assert "the tokenizer has changed" in refusal("unigram")
    (root / "x.txt").write_text("new")
    assert f"{root}/x.txt is new" in refusal()
    (root / "x.txt").unlink()
    os.utime(root / "03.txt", ns=(1, 1))
    assert f"{root}/03.txt was modified" in refusal()
    (root / "03.txt").write_text("short")
    assert f"{root}/03.txt had" in refusal() and "and has 5" in refusal()
    (root / "03.txt").unlink()
    assert f"{root}/03.txt is gone" in refusal()


def test_a_file_that_changes_while_it_is_read_is_named(trained, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text")
    from pretrain.data.preparation import unit_work

    original = unit_work.PieceReader.documents

    def documents(self):
        yield from original(self)
        with open(tmp_path / "a.txt", "a") as file:
            file.write("!")

    monkeypatch.setattr(unit_work.PieceReader, "documents", documents)
    monkeypatch.setattr("pretrain.data.preparation.prepare.sample_texts", lambda *_: iter(()))
    with pytest.raises(DataError, match=r"a\.txt: was changed during the preparation"):
        prepare([str(tmp_path / "a.txt")], trained["bpe"], tmp_path / "out")


def test_a_tokenizer_that_is_replaced_meanwhile_is_noticed(inputs, trained, tmp_path):
    from pretrain.data.preparation.encode import load_encoder

    with pytest.raises(DataError, match="the tokenizer was changed during the preparation"):
        load_encoder(str(trained["bpe"]), "0" * 64, "library", 0.0, 0.5)


# Races.


def test_of_two_preparations_for_one_output_the_second_is_refused_and_the_first_unharmed(
    inputs, trained, straight, tmp_path, monkeypatch
):
    original = parts.PartWriter.finish
    reached, go_on = threading.Event(), threading.Event()

    def finish(self, **counts):
        reached.set()
        assert go_on.wait(60)
        return original(self, **counts)

    monkeypatch.setattr(parts.PartWriter, "finish", finish)
    first = threading.Thread(target=prepare, args=(inputs, trained["bpe"], tmp_path / "out"), kwargs=OPTIONS)
    first.start()
    try:
        assert reached.wait(60)
        own = rf"being prepared by another process \(process {os.getpid()} on "
        for attempt in (
            lambda: prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS),
            lambda: prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS, restart=True),
            lambda: prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS, task=0, tasks=2),
            lambda: merge(tmp_path / "out"),
        ):
            with pytest.raises(DataError, match=own) as caught:
                attempt()
            assert "\n" not in str(caught.value)
    finally:
        go_on.set()
        first.join()
    assert files_of(tmp_path / "out") == straight


def test_two_of_the_same_task_are_refused_but_different_ones_are_not(inputs, trained, tmp_path):
    prepare(inputs, trained["bpe"], tmp_path / "out", task=0, tasks=2, **OPTIONS)
    with open(tmp_path / ".out.preparing" / "task-00000-of-00002") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"task-00000-of-00002 of .*out: is being prepared by another process"):
            prepare(inputs, trained["bpe"], tmp_path / "out", task=0, tasks=2, **OPTIONS)
        prepare(inputs, trained["bpe"], tmp_path / "out", task=1, tasks=2, **OPTIONS)


def test_the_same_command_again_is_a_success_and_another_is_refused(inputs, trained, tmp_path, capsys):
    """D-D8: a job that is requeued after it has succeeded does not fail; another plan into the same output does."""
    result = prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)
    before = files_of(tmp_path / "out")
    for attempt in (
        lambda: prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS),
        lambda: prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS, workers=2, max_invalid=5),
        lambda: prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS, restart=True),
        lambda: prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS, task=0, tasks=3),
        lambda: merge(tmp_path / "out"),
    ):
        again = attempt()
        assert again.repeated and again.splits == result.splits and again.duplicate_documents == 70
        assert str(again).startswith(f"nothing to do: the same command has prepared {tmp_path}/out/train (")
    for changed, message in (
        ({"validation_fraction": 0.3}, "prepared with --validation-fraction 0.2 instead of 0.3, and was left as it is"),
        ({"unit_bytes": 1499}, "prepared from other inputs, or from these before one was modified, or with other options or another version of this program, and was left as it is"),
    ):
        for own in ({}, {"restart": True}, {"task": 0}):
            with pytest.raises(DataError, match=rf"out: already exists, {message}; choose another output or remove it first"):
                prepare(inputs, trained["bpe"], tmp_path / "out", **{**OPTIONS, **changed, **own})
    assert files_of(tmp_path / "out") == before
    assert os.listdir(tmp_path) == ["out"]


def test_an_output_of_an_input_that_was_touched_or_changed_since_is_refused(trained, tmp_path):
    """R9: after `touch`, the same command was told of other inputs or options only, though it was the time of modification alone."""
    file = tmp_path / "a.txt"
    file.write_text("some text")
    prepare([str(file)], trained["bpe"], tmp_path / "out")
    before = files_of(tmp_path / "out")
    os.utime(file, ns=(1, 1))
    message = "out: already exists, prepared from other inputs, or from these before one was modified, or with other options or another version of this program, and was left"
    with pytest.raises(DataError, match=message):
        prepare([str(file)], trained["bpe"], tmp_path / "out")
    with pytest.raises(
        DataError, match="out: already exists, prepared with --text-field 'text' instead of 'body', and was left"
    ):
        prepare([str(file)], trained["bpe"], tmp_path / "out", text_field="body")
    file.write_text("some other text")
    with pytest.raises(DataError, match=message):
        prepare([str(file)], trained["bpe"], tmp_path / "out")
    assert files_of(tmp_path / "out") == before


def test_an_output_among_the_inputs_is_refused_before_anything_is_written(trained, tmp_path):
    """The first command succeeded, and the same one again said that the output was prepared from other inputs."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("some text\n")
    (tmp_path / "link").symlink_to(corpus)
    for folder, output in ((corpus, corpus / "deep" / "out"), (corpus, tmp_path / "link" / "out"), (tmp_path / "link", corpus / "out"), (corpus, corpus)):
        for pattern in ("", "/**", "/**/*"):
            with pytest.raises(ConfigError, match=f"--output {output} lies in the input folder {folder}/?, .* choose a place outside of it"):
                prepare([f"{folder}{pattern}"], trained["bpe"], output)
    assert [path.name for path in corpus.iterdir()] == ["a.txt"]
    prepare([str(corpus / "*.txt")], trained["bpe"], corpus / "out")  # a pattern that no file of it matches
    prepare([str(corpus / "*.txt")], trained["bpe"], corpus / "out")


def test_an_output_of_something_else_is_refused(inputs, trained, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    for attempt in (
        lambda: prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS),
        lambda: prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS, restart=True),
    ):
        with pytest.raises(DataError, match="out: already exists; choose another output or remove it first"):
            attempt()
    assert files_of(tmp_path) == {"out/mine": b"keep"}
    with ShardWriter.create(tmp_path / "old", load_tokenizer(trained["bpe"])) as writer:
        writer.add(np.array([5, writer._tokenizer.eod_id]), np.array([2]))
    with pytest.raises(DataError, match="old: already exists, prepared from other inputs, or from these before one was modified, or with other options or another version of this program, and"):
        prepare(inputs, trained["bpe"], tmp_path / "old", **OPTIONS)


# Damage to what lies between tasks and their merge.


def one_task(inputs, trained, output) -> list[Path]:
    """The finished parts of a preparation that is left to be merged."""
    prepare(inputs, trained["bpe"], output, **OPTIONS, task=0, tasks=1)
    return sorted((output.parent / f".{output.name}.preparing").glob("parts-*/*.part"))


@pytest.mark.parametrize("seed", range(12))
def test_a_part_with_a_flipped_bit_is_refused_and_made_anew(inputs, trained, straight, tmp_path, seed):
    """D-D3: wherever the bit is: tokens, records, counts."""
    parts_found = one_task(inputs, trained, tmp_path / "out")
    chosen = random.Random(seed)
    part = chosen.choice(parts_found)
    content = bytearray(part.read_bytes())
    place = chosen.randrange(len(content)) if seed > 3 else [0, len(content) // 2, len(content) - 60, len(content) - 3][seed]
    content[place] ^= 1 << chosen.randrange(8)
    part.write_bytes(content)
    with pytest.raises(DataError, match=rf"{part.name}: damaged: .* set aside|units of work are not finished") as caught:
        merge(tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)
    assert files_of(tmp_path / "out") == straight and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("bpe", "tokenizer.model", "tokenizer.model has other content"),
        ("byte", "tokenizer_config.json", "tokenizer_config.json has other content"),
        ("byte", "files.sha256.json", "do not match its seal|Expecting|delimiter"),
    ],
)
def test_a_tokenizer_that_is_damaged_between_tasks_and_merge_is_refused(inputs, trained, tmp_path, kind, name, words):
    """D-D3: the copy that goes into the output is checked as well, every file of it."""
    prepare(inputs, trained[kind], tmp_path / "out", **OPTIONS, task=0, tasks=1)
    copy = tmp_path / ".out.preparing" / "tokenizer" / name
    content = bytearray(copy.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    with pytest.raises(DataError, match=rf"tokenizer: damaged \(.*({words}).*start again with --restart"):
        merge(tmp_path / "out")
    copy.unlink()
    if name != "files.sha256.json":
        with pytest.raises(DataError, match=rf"tokenizer: damaged \(.*{name}.*start again with --restart"):
            merge(tmp_path / "out")


def test_files_that_nfs_leaves_in_the_work_directory_stop_nobody(inputs, trained, straight, tmp_path):
    """D-D6: NFS renames what is removed while it is open to .nfsXXXX."""
    prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS, task=0, tasks=2)
    work = tmp_path / ".out.preparing"
    for folder in (work, *work.glob("parts-*"), work / "tokenizer"):
        (folder / ".nfs00000000012e5d8c00000a1f").write_bytes(b"x")
    prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS, task=1, tasks=2)
    merge(tmp_path / "out")
    found = {name: content for name, content in files_of(tmp_path / "out").items() if ".nfs" not in name}
    assert found == straight


def test_what_lies_beside_the_output_is_kept(inputs, trained, tmp_path):
    work = tmp_path / "mine"
    for name in ("folder", "tokenizer", "deduplicate", "parts-1"):  # some are called like ours
        (work / name).mkdir(parents=True)
    for name in ("notes.txt", "lock", "plan.json"):
        (work / name).write_text("keep")
    before = sorted(os.listdir(work))
    with pytest.raises(DataError):
        prepare([str(tmp_path / "none")], trained["bpe"], work / "out")
    prepare(inputs, trained["bpe"], work / "out", restart=True)
    assert sorted(os.listdir(work)) == sorted([*before, "out"]) and (work / "lock").read_text() == "keep"


def test_an_output_below_a_file_is_one_line(inputs, trained, tmp_path):
    (tmp_path / "held.txt").write_text("")
    with pytest.raises(DataError, match=r"^[^ ]*held\.txt/out: cannot be written"):
        prepare(inputs, trained["bpe"], tmp_path / "held.txt" / "out")


# A full disk.


@pytest.mark.parametrize("module, number", [("pretrain.data.preparation.parts", 8), ("pretrain.data.shards.writer", 2)])
def test_a_full_disk_is_one_line_and_what_is_finished_is_kept(inputs, trained, straight, tmp_path, monkeypatch, module, number):
    opened = []

    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_until_full(path, mode="r", **options):
        file = open(path, mode, **options)
        if mode[0] not in "wx":
            return file
        opened.append(path)
        return Full(file) if len(opened) >= number else file

    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.open", open_until_full, raising=False)
        with pytest.raises(DataError, match=r"no space left; finished work is kept: make room and start the same") as caught:
            prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    kept = len(list((tmp_path / ".out.preparing").glob("parts-*/*.part")))
    assert kept == 7 if module.endswith("parts") else kept > 7
    prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)
    assert files_of(tmp_path / "out") == straight
    assert os.listdir(tmp_path) == ["out"]


def test_a_disk_without_room_for_one_directory_lets_the_work_be_removed(inputs, trained, straight, tmp_path, monkeypatch):
    """prepare_data ended with an error though its output was complete."""

    def remove(directory):
        def full(*arguments, **options):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", full)
            return removed(directory)

    removed = WorkDirectory.remove
    monkeypatch.setattr(WorkDirectory, "remove", remove)
    prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)
    assert files_of(tmp_path / "out") == straight and os.listdir(tmp_path) == ["out"]


def test_a_directory_is_copied_whole_or_the_error_has_a_number(tmp_path):
    (tmp_path / "from" / "deep").mkdir(parents=True)
    for name in "a", "b", "deep/c":
        (tmp_path / "from" / name).write_text(name)
    made = tmp_path / "a new folder" / "to"
    copy_tree(tmp_path / "from", made, leave_out="b")
    assert sorted(str(path.relative_to(made)) for path in made.rglob("*")) == ["a", "deep", "deep/c"]

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    with pytest.raises(OSError) as caught:
        copy_tree(tmp_path / "from", tmp_path / "other", full)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "other" / "a"))


@pytest.mark.slow
def test_a_disk_that_is_really_full(inputs, trained, straight, tmp_path):
    """As root: python -m pytest tests/data/test_prepare_resume.py -m slow -k really_full"""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        with pytest.raises(DataError, match="no space left"):
            prepare(inputs, trained["bpe"], place / "out", **OPTIONS)
        assert list((place / ".out.preparing").glob("parts-*/*.part"))
        subprocess.run(["mount", "-o", "remount,size=8m", str(place)], check=True)
        prepare(inputs, trained["bpe"], place / "out", **OPTIONS)
        assert files_of(place / "out") == straight
    finally:
        subprocess.run(["umount", str(place)], check=True)


# Processes.


def test_a_worker_that_dies_is_reported_and_the_work_kept(inputs, trained, straight, tmp_path):
    arguments = {"inputs": inputs, "tokenizer": str(trained["bpe"]), "output": str(tmp_path / "out"), **OPTIONS, "workers": 2}
    process = start(arguments)
    children: list[int] = []
    while len(children) < 2 and process.poll() is None:
        found = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "spawn_main"], capture_output=True, text=True).stdout
        children = [int(pid) for pid in found.split()]
    os.kill(children[0], signal.SIGKILL)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "DataError: a worker process died (exit code -9)" in error
    prepare(inputs, trained["bpe"], tmp_path / "out", **OPTIONS)
    assert files_of(tmp_path / "out") == straight


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(trained, tmp_path, texts):
    """python -m pytest tests/data/preparation/test_prepare_resume.py -m slow -k memory"""
    peaks = []
    for times in (1, 20):
        folder = tmp_path / f"in-{times}"
        folder.mkdir()
        with open(folder / "a.jsonl", "w") as file:
            for number in range(300 * times):
                for text in texts:
                    file.write(json.dumps({"text": f"{number} {text}"}) + "\n")
        arguments = {"inputs": [str(folder)], "tokenizer": str(trained["bpe"]), "output": str(tmp_path / f"out-{times}")}
        arguments |= {"workers": 2, "deduplicate": True, "validation_fraction": 0.1, "shard_tokens": 1_000_000}
        peaks.append(peak_megabytes(start(arguments)))
    print(f"peak memory of all processes: {peaks[0]:.0f} MB, with 20 times the input {peaks[1]:.0f} MB")
    assert peaks[1] < 1.15 * peaks[0] + 10


def peak_megabytes(process: subprocess.Popen) -> float:
    """The sum of the peak resident sizes of a process and all its children, as the kernel counts them."""
    peaks: dict[int, int] = {}
    while process.poll() is None:
        found = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True).stdout
        for pid in map(int, found.split()):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            if match := re.search(r"VmHWM:\s+(\d+) kB", status):
                peaks[pid] = max(peaks.get(pid, 0), int(match[1]))
        time.sleep(0.05)
    assert process.returncode == 0, process.stderr.read()
    process.stderr.close()
    return sum(peaks.values()) / 1000
