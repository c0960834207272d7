"""tools/timeline.py: a step of two ranks as a picture, and how much of its communication hides behind computation."""

from __future__ import annotations

import gzip
import json

import pytest
from running import tool, train

from pretrain.observe.profile_time import STEP
from pretrain.observe.timeline import read_step


def write_trace(run, step: int, rank: int, collectives: list[tuple[float, float]]) -> None:
    """A step of 100 ms: products for 40 ms, a gap of 20, products for 40. Collectives in milliseconds since its begin."""
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1, "pid": 1, "args": {"External id": 1}}
    events = [
        {"ph": "X", "cat": "user_annotation", "name": STEP, "ts": 5000.0, "dur": 100_000.0, "tid": 1, "pid": 1, "args": {}},
        operator | {"ts": 5000.0, "dur": 40_000.0},
        operator | {"ts": 65_000.0, "dur": 40_000.0},
        *({"ph": "X", "cat": "cpu_op", "name": "gloo:all_reduce", "ts": 5000 + 1e3 * a, "dur": 1e3 * (b - a), "tid": 2, "pid": 1, "args": {}} for a, b in collectives),
    ]  # fmt: skip
    (run / "profile").mkdir(parents=True, exist_ok=True)
    with gzip.open(run / "profile" / f"step-{step:08d}.rank-{rank}.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)


def test_what_hides_behind_computation_is_told_from_what_is_waited_for(tmp_path):
    write_trace(tmp_path, 3, 0, [(10, 30), (30, 55)])  # 20 ms behind products, then 10 behind them and 15 waited for
    write_trace(tmp_path, 3, 1, [])
    write_trace(tmp_path, 2, 0, [(41, 59)])
    first, second = read_step(tmp_path)
    assert first.milliseconds == pytest.approx(100) and first.total("forward and backward") == pytest.approx(80)
    assert first.total("collectives") == pytest.approx(45) and first.total("waiting for ranks") == pytest.approx(15)
    assert first.hidden == pytest.approx(1 - 15 / 45) and second.hidden == 0
    [exposed] = read_step(tmp_path, 2)
    assert exposed.hidden == pytest.approx(0, abs=0.01)


def test_a_run_is_drawn_from_its_own_profile(pool, config_file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = ("run.steps=3", "schedule={name: constant, warmup_steps: 0}", "log.profile=[3]", "parallel.strategy=ddp")
    run = train(pool, 2, config_file, *options)
    picture = tmp_path / "pictures" / "step.png"
    assert tool("timeline").main([str(run), "--title", "two $ranks_^$", "--output", str(picture)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3 and all(line.startswith(f"two $ranks_^$, rank {rank}: ") for rank, line in enumerate(printed[:2]))
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 5000


@pytest.mark.parametrize("titles", [[], ["--title", "same", "--title", "same"]])
def test_runs_of_one_name_are_all_drawn(tmp_path, capsys, monkeypatch, titles):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for place, ranks in (("ddp", 1), ("fsdp", 2)):
        for rank in range(ranks):
            write_trace(tmp_path / place / "base", 3, rank, [])
    assert tool("timeline").main(["ddp/base", "fsdp/base", *titles, "--output", "a.png"]) == 0
    told = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()[:-1]]
    first, second = ("same", "same") if titles else ("ddp/base", "fsdp/base")
    assert told == [f"{first}, rank 0", f"{second}, rank 0", f"{second}, rank 1"]


@pytest.mark.parametrize(
    ("words", "problem"), [([], "no step was profiled"), (["--step", "9"], "step 9 was not profiled; there are [3]")]
)
def test_a_step_without_a_profile_is_an_error(tmp_path, words, problem, capsys):
    if words:
        write_trace(tmp_path, 3, 0, [])
    assert tool("timeline").main([str(tmp_path), *words, "--output", str(tmp_path / "a.png")]) == 1
    assert problem in capsys.readouterr().err


def test_a_damaged_trace_is_named(tmp_path, capsys):
    write_trace(tmp_path, 3, 0, [])
    path = tmp_path / "profile" / "step-00000003.rank-0.trace.json.gz"
    path.write_bytes(path.read_bytes()[:-20])
    assert tool("timeline").main([str(tmp_path), "--output", str(tmp_path / "a.png")]) == 1
    assert "cannot be read as a trace" in capsys.readouterr().err
    for content, why in (
        ({"traceEvents": [1]}, "AttributeError: 'int' object has no attribute 'get'"),
        ({"traceEvents": []}, f"it lacks the span of the step, '{STEP}'"),
        ({}, "KeyError: 'traceEvents'"),
    ):
        path.write_bytes(gzip.compress(json.dumps(content).encode()))
        assert tool("timeline").main([str(tmp_path), "--output", str(tmp_path / "a.png")]) == 1
        said = capsys.readouterr().err
        assert said == f"error: {path}: cannot be read as a trace: {why}; profile the step again, or give another by --step\n"


def test_a_directory_that_does_not_exist_is_said_not_to(tmp_path, capsys):
    assert tool("timeline").main([str(tmp_path / "none"), "--output", str(tmp_path / "a.png")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'}: no such directory; give the directory of a run\n"


def test_a_picture_has_the_name_that_was_given(tmp_path, capsys):
    """`--output bin` drew bin.png, and said bin."""
    with pytest.raises(SystemExit):
        tool("timeline").main([str(tmp_path), "--output", str(tmp_path / "bin")])
    assert "bin: the name must end with .png" in capsys.readouterr().err
