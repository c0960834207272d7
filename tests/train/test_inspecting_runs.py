"""What tools/inspect_data.py says of a run is what its ranks computed on, step by step, whatever happened to the run."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import yaml
from running import run_main, tool, write_prepared

from pretrain.config.load import load_config
from pretrain.conventions import IGNORED
from pretrain.data.inspection.coverage import measure_coverage
from pretrain.data.inspection.history import History
from pretrain.data.inspection.inspected_step import InspectedStep, check_digest, find_document, inspect_step
from pretrain.data.shards.reader import PreparedData
from pretrain.errors import DataError

RAMP = "batch.ramp=[{until_tokens: 500, sequences: 4}, {until_tokens: 1200, sequences: 8}]"
STAGES = [{"until_tokens": 1500, "weights": {"a": 1, "b": 1}}, {"weights": {"a": 1, "b": 5}}]


def run_recorded(folder: str, stop_at: int, config_file: str, *overrides: str) -> tuple[int, str]:
    """`run_main`, while every rank writes down the micro-batches that it computes on; asked to stop in step `stop_at`."""
    from pretrain.train.trainer import Trainer

    original, seen = Trainer.step, []

    def step(self, batch, *of_all):
        rows, number = self.config.batch.micro_sequences, self.progress.step + 1
        for index in range(batch.micro_steps(rows)):
            inputs = batch.micro(index, rows, self.ranks.device)
            seen.append((number, index, inputs["tokens_BT"].tolist(), inputs["targets_BT"].tolist()))
        if number == stop_at and self.ranks.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, *of_all)

    with patch.object(Trainer, "step", step):
        result = run_main(config_file, *overrides)
    path = Path(folder) / f"{os.environ.get('RANK', '0')}.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in seen))
    return result


@pytest.fixture
def record(pool, tmp_path):
    """Run on so many ranks; (step, rank, micro-step) -> tokens and targets. Later calls overrule earlier ones."""
    seen: dict[tuple[int, int, int], tuple[list, list]] = {}
    numbers = itertools.count()

    def run(world_size: int, config_file: Path, *overrides: str, stop_at: int = 0) -> dict:
        folder = tmp_path / f"seen-{next(numbers)}"
        folder.mkdir()
        for code, printed in pool.launch(world_size, run_recorded, str(folder), stop_at, str(config_file), *overrides):
            assert code == 0, printed
        here = {}
        for rank in range(world_size):
            for step, micro, tokens, targets in map(json.loads, (folder / f"{rank}.jsonl").read_text().splitlines()):
                here[step, rank, micro] = tokens, targets
        first = min(step for step, _, _ in here)
        for key in [key for key in seen if key[0] >= first]:
            del seen[key]
        seen.update(here)
        return dict(seen)

    return run


@pytest.fixture(scope="module")
def other(tmp_path_factory, byte_tokenizer) -> Path:
    return write_prepared(tmp_path_factory.mktemp("other") / "more", byte_tokenizer, seed=5, documents=40)


@pytest.fixture
def mixed(config_file, prepared, other) -> Path:
    """Two sources whose shares change."""
    config = yaml.safe_load(config_file.read_text())
    sources = [{"path": str(prepared), "name": "a"}, {"path": str(other), "name": "b"}]
    config["data"] |= {"sources": sources, "stages": STAGES, "cache": {"dir": str(config_file.parent / "cache")}}
    config["schedule"] = {"name": "constant"}
    config["batch"]["micro_sequences"] = 2
    config_file.write_text(yaml.safe_dump(config))
    return config_file


def runs(config_file: Path) -> Path:
    return config_file.parent / "runs" / "run"


def as_computed(history: History, steps: range) -> dict:
    """What inspection says, in the form of `record`; rank by rank."""
    result = {}
    for step in steps:
        for rank in range(history.stretch_of(step).start.data_size):
            parts = defaultdict(lambda: ([], []))
            inspected = inspect_step(history, step, rank)
            check_pieces(history, inspected)
            for sample in inspected.shown:
                assert sample.rank == rank
                parts[sample.micro_step][0].append(sample.tokens)
                parts[sample.micro_step][1].append([IGNORED if target is None else target for target in sample.targets])
            result |= {(step, rank, micro): part for micro, part in parts.items()}
    return result


def check_pieces(history: History, inspected: InspectedStep) -> None:
    """Every piece is where in its document it is said to be, and what is not in a piece is padding."""
    data = {source.name: source.data for source in history.stretch_of(inspected.step).stream.sources}
    for sample in inspected.shown:
        for piece in sample.pieces:
            start, end = data[sample.source].document_span(piece.document)
            ids = data[sample.source].read(start + piece.offset, piece.length).tolist()
            assert sample.tokens[piece.place : piece.place + piece.length] == ids
            assert piece.document_tokens == end - start
            assert piece.ends == (piece.offset + piece.length == end - start)
            assert piece.text == "".join(map(chr, ids[:-1] if piece.ends else ids))
        used = sum(piece.length for piece in sample.pieces)
        assert sample.padding == len(sample.tokens) - used
        assert set(sample.targets[used:]) <= {None}


@pytest.mark.parametrize("packing", ["concatenate", "best_fit", "padded"])
def test_every_rank_read_what_is_shown_for_it(record, mixed, packing):
    keys = [f"data.packing={packing}", "data.sequence_length=90", "parallel.strategy=ddp"]
    keys += ["data.boundary_loss=false"] if packing != "padded" else []
    seen = record(2, mixed, *keys, RAMP.replace("500", "900").replace("1200", "1700"), "run.steps=6")
    history = History.read(runs(mixed))
    assert as_computed(history, range(1, 7)) == seen
    steps = [inspect_step(history, step) for step in range(1, 7)]
    assert all(step.digest_matches for step in steps)
    assert [step.sequences for step in steps] == [4, 4, 4, 8, 16, 16]
    assert len({name for step in steps for name, count in step.samples_of.items() if count}) == 2


def test_steps_before_and_after_every_resume_are_those_of_the_start_that_made_them(record, mixed):
    ddp = "parallel.strategy=ddp"
    record(2, mixed, ddp, "run.steps=6", "checkpoint.every_steps=2", "checkpoint.keep_last=0", RAMP)
    back = f"run.resume={runs(mixed) / 'checkpoints' / 'step-00000004'}"  # steps 5 and 6 are taken again, with other batches
    record(2, mixed, ddp, "run.steps=8", "batch.sequences=12", back, "run.accept_changes=[batch.sequences, batch.ramp]")
    keys = ["data.seed=99", "run.accept_changes=[data.seed]", "batch.sequences=12"]
    seen = record(1, mixed, *keys, "run.steps=30", stop_at=10)
    history = History.read(runs(mixed))
    assert [(stretch.first, stretch.last) for stretch in history.stretches] == [(1, 4), (5, 8), (9, 30)]
    made = history.current
    assert 10 <= made < 14
    assert as_computed(history, range(1, made + 1)) == seen
    for step in range(1, made + 1):
        assert inspect_step(history, step).digest_matches, step
    check_coverage(history, made)
    check_document(history, made)

    ahead = as_computed(history, range(made + 1, 17))  # beyond the last checkpoint
    step = inspect_step(history, 16)
    assert not step.made and step.digest_matches is None
    seen = record(1, mixed, *keys, "run.steps=16")
    assert {key: value for key, value in seen.items() if key[0] > made} == ahead


def check_coverage(history: History, made: int) -> None:
    """Against a count of every sample of every step."""
    drawn = [(s.source, s.sample) for n in range(1, made + 1) for s in inspect_step(history, n).shown]
    coverage = measure_coverage(history)
    assert coverage.samples == len(drawn)
    for source in coverage.sources:
        own = [sample for name, sample in drawn if name == source.name]
        assert (source.drawn, source.distinct) == (len(own), len(set(own)))
    assert sum(segment.end - segment.start for segment in coverage.segments) == len(drawn)
    shares = {name: sum(s.achieved[name] * (s.end - s.start) for s in coverage.segments) for name in ("a", "b")}
    assert shares == pytest.approx({name: sum(own == name for own, _ in drawn) for name in ("a", "b")})


def check_document(history: History, made: int) -> None:
    """Documents are seen in the steps that show them, and no others, over all starts."""
    shown = defaultdict(set)
    for n in range(1, made + 1):
        for sample in inspect_step(history, n).shown:
            for piece in sample.pieces:
                shown[sample.source, piece.document].add((n, sample.rank, sample.micro_step, sample.position, sample.epoch))
    repeated = [key for key, places in shown.items() if len({place[0] for place in places}) > 1]
    assert len(repeated) > 5
    for source, document in repeated[:20] + list(shown)[:20]:
        found = find_document(history, document, source).seen
        assert {(s.step, s.rank, s.micro_step, s.position, s.epoch) for s in found if s.made} == shown[source, document]


def test_a_plan_is_what_the_run_then_reads(record, mixed):
    config, _ = load_config(mixed, ["run.steps=4", RAMP, "parallel.strategy=ddp"])
    planned = as_computed(History.planned(config, 2), range(1, 5))
    assert record(2, mixed, "run.steps=4", RAMP, "parallel.strategy=ddp") == planned


def test_paths_are_those_of_the_folder_in_which_the_run_was_started(record, mixed, monkeypatch, prepared, other):
    record(1, mixed, "run.steps=2")
    file = runs(mixed) / "starts.jsonl"
    start = json.loads(file.read_text())
    start["folder"] = str(prepared.parent)
    start["config"]["data"]["sources"][0] |= {"path": prepared.name, "name": None}
    start["config"]["data"]["stages"] = []
    file.write_text(json.dumps(start) + "\n" + '{"step": 1, "samp')  # a second start was cut off in its first line
    history = History.read(runs(mixed))
    monkeypatch.chdir(mixed.parent)
    sources = history.stretches[0].stream.sources
    assert [(source.name, source.data.path) for source in sources] == [("train", prepared), ("b", other)]
    assert history.current == 2


def test_data_that_were_changed_since_are_noticed(record, mixed, tmp_path, byte_tokenizer, capsys):
    copy = write_prepared(tmp_path / "copy", byte_tokenizer, seed=0, documents=300)
    record(1, mixed, "run.steps=2", f"data.sources.0.path={copy}")
    arguments = ["--run", str(runs(mixed)), "--step", "2"]
    assert tool("inspect_data").main(arguments) == 0
    assert "matches metrics.jsonl" in capsys.readouterr().out
    for shard in copy.glob("*.bin"):
        content = np.fromfile(shard, "<u2")
        np.where(content == 98, 97, content).astype("<u2").tofile(shard)
    assert tool("inspect_data").main(arguments) == 1
    out, err = capsys.readouterr()
    assert "DIFFERS from metrics.jsonl" in out
    assert err.count("\n") == 1 and "the step read other samples than those shown" in err
    with pytest.raises(DataError, match="changed since"):
        check_digest(inspect_step(History.read(runs(mixed)), 1))
    assert PreparedData.open(copy).documents == 300


def test_steps_that_were_not_logged_are_said_not_to_be(record, mixed, capsys):
    record(1, mixed, "run.steps=4", "log.every_steps=3")
    for step, said in ((1, "matches"), (2, "the step was not logged"), (3, "matches"), (4, "matches")):
        assert tool("inspect_data").main(["--run", str(runs(mixed)), "--step", str(step), "--samples", "1"]) == 0
        assert said in capsys.readouterr().out
    # What the run had logged before it went back to step 2 is not the last word on steps 3 and 4.
    (runs(mixed) / "status.json").write_text('{"state": "running", "step": 2, "reason": null}\n')
    step = inspect_step(History.read(runs(mixed)), 3)
    assert not step.made and step.logged_digest is None


def test_a_run_on_text_is_shown_like_any_other(config_file, tmp_path, byte_tokenizer, capsys):
    (tmp_path / "text.txt").write_text("line\n" * 5000)
    config = yaml.safe_load(config_file.read_text())
    text = {"input": [str(tmp_path / "text.txt")], "documents": "line", "tokenizer": str(byte_tokenizer)}
    config["data"] |= {"sources": [], "text": text, "cache": {"dir": str(tmp_path / "cache")}}
    config_file.write_text(yaml.safe_dump(config))
    assert run_main(str(config_file), "run.steps=1", "schedule.warmup_steps=0")[0] == 0
    for what in (["--step", "1"], ["--document", "0"], ["--coverage"]):
        assert tool("inspect_data").main(["--run", str(runs(config_file)), *what]) == 0
    assert "digest" in capsys.readouterr().out
    assert tool("inspect_data").main(["--corrupt-check", str(runs(config_file))]) == 0
