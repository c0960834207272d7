"""The benchmarks run, at a size at which their numbers mean nothing, and say what they measured."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from benchmarks import loading, preparing, speed
from benchmarks.collectives import HOPS, MOVED, Exchange, collectives, exchanges, fit_ring
from benchmarks.comparison import changes, not_measured
from benchmarks.corpora import byte_tokenizer, link_shards, write_tokens
from benchmarks.data import PARTS, measure
from benchmarks.machine import commit, cpu, machine
from benchmarks.matmul import layer_products
from benchmarks.measure import (
    ROOT,
    Options,
    Row,
    Turns,
    as_lines,
    environment,
    heading,
    in_turns,
    read_lines,
    read_rows,
    table,
)
from benchmarks.products import fastest
from benchmarks.saving import run_state
from benchmarks.scaling import LAYOUTS, weak_scaling
from benchmarks.trainers.clock import Clock
from benchmarks.training import ONLY_IN_ANOTHER, PROGRAMS, Case, Measured, _rows, compare_trainers
from benchmarks.updates import updates
from running import on_meta, some_slow, tool
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.load import load_config
from pretrain.config.model_schema import Model
from pretrain.data.shards.reader import PreparedData
from pretrain.distributed.shards import local
from pretrain.errors import ConfigError, DataError
from pretrain.models.families import complete
from pretrain.train.plan import make_plan
from pretrain.train.resolve import resolve
from pretrain.train.trainer import Trainer


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> Options:
    return Options(
        tmp_path_factory.mktemp("bench"), 0.0, 0.0005, (str(ROOT / "pretrain" / "**" / "*.py"),), 1, lambda line: None
    )


@pytest.mark.slow
def test_every_part_measures_at_a_tiny_size(options):
    parts = [name for name in PARTS if name != "preparation"]
    rows = measure(parts, options)
    assert list(dict.fromkeys(row.part for row in rows)) == parts
    assert len({(row.part, row.name) for row in rows}) == len(rows)
    for row in rows:
        assert math.isfinite(row.value) and row.value >= 0
        assert row.value > 0 or row.unit in ("%", "MB")
        assert row.clock == "cpu" or row.unit in ("s", "%", "MB", "KiB")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weak_scaling_measures_every_layout_beside_one_process(options):
    rows = weak_scaling(options)
    assert [row.name for row in rows] == list(LAYOUTS) and all(row.value > 0 and row.baseline == rows[0].value for row in rows)


def test_speed_profiles_one_more_step_of_which_the_row_has_nothing(tmp_path):
    model = ["model={dim: 32, layers: 1, heads: 2, ffn_dim: 64, vocab_size: 257}", "run.device=cpu", "optim.ema_decay=0.9"]
    options = ["speed", "--length", "32", "--steps", "1", "--json", str(tmp_path / "rows.jsonl"), "--profile", str(tmp_path), *model]
    typed = [sys.executable, str(ROOT / "tools" / "bench.py"), *options]
    subprocess.run(typed, check=True, env=environment(1), capture_output=True)
    [row] = read_rows(tmp_path / "rows.jsonl")
    assert row["value"] > 0 and "steps of 32 tokens" in row["note"]
    [page] = (tmp_path / "profile").glob("step-*.md")
    assert "| matrix products |" in page.read_text()


@pytest.mark.parametrize("name", ["quickstart", "t5_quickstart", "pretrain/smollm3-3b"])
def test_speed_takes_the_configuration_of_a_run_and_leaves_its_data_and_its_length(tmp_path, monkeypatch, name):
    """Validation data, prompts and stages of the file were in the way."""
    planned = []
    monkeypatch.setattr(speed, "_measure", lambda asked, name, config, *_: planned.append(make_plan(config, 1, torch.device("cpu"))) or [])
    file = tmp_path / "run.yaml"
    file.write_text(
        f"include: {ROOT}/configs/{name}.yaml\nvalidation: {{every_steps: 5, prompts: [Once]}}\nlog: {{layers_every_steps: 1}}\n"
        "batch: {ramp: [{until_tokens: 100, sequences: 4}]}\nrun: {tokens: 100000}\n"
    )
    keys = ("run.device=cpu", "parallel={strategy: auto, shard: null}", "precision.tf32=false")
    speed.measure_speed(speed.Speed(file, 32, 1, 1, 1, keys), "name", Options(tmp_path))
    assert planned[0].config.run.steps == speed.WARM_UP + 2 and not planned[0].config.data.validation
    assert planned[0].config.log.layers_every_steps == 0
    with pytest.raises(ConfigError, match="data.pairs=/p: speed measures steps of --length tokens"):
        speed.measure_speed(speed.Speed(file, 32, 1, 1, 1, ("data.pairs=/p",)), "name", Options(tmp_path))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_speed_is_measured_in_a_process_that_is_set_up_as_that_of_a_run(tmp_path, monkeypatch):
    """`run.affinity` and `run.deterministic` had no effect on it."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    found = []
    monkeypatch.setattr(speed, "_measure", lambda *_: found.append((os.sched_getaffinity(0), torch.are_deterministic_algorithms_enabled())) or [])
    keys = ("run={device: cpu, affinity: cores, deterministic: true}", "parallel.strategy=ddp")
    allowed = os.sched_getaffinity(0)
    try:
        speed.measure_speed(speed.Speed(None, 32, 1, 1, 1, keys), "name", Options(tmp_path))
    finally:
        torch.use_deterministic_algorithms(False)
    [(cores, deterministic)] = found
    assert deterministic and cores < allowed and os.sched_getaffinity(0) == allowed


def target_tokens(folder: str) -> list[int]:
    """Those that each step of a profiled measurement was given on this rank."""
    taken, given = Trainer.step, []

    def step(self, batch, target_tokens, *others):
        given.append(target_tokens)
        return taken(self, batch, target_tokens, *others)

    keys = ("model={dim: 32, layers: 1, heads: 2, ffn_dim: 64, vocab_size: 257}", "run.device=cpu", "parallel.strategy=ddp")
    with patch.object(Trainer, "step", step):
        speed.measure_speed(speed.Speed(None, 32, 1, 1, 1, keys, Path(folder)), "name", Options(Path(folder), say=lambda line: None))
    return given


def test_every_step_of_speed_has_the_tokens_of_all_ranks_also_the_one_that_is_profiled(pool, tmp_path):
    assert pool.launch(2, target_tokens, str(tmp_path)) == [[64] * (speed.WARM_UP + 2)] * 2


def test_keys_may_stand_between_options(capsys):
    parse = tool("bench").parse
    assert parse(["speed", "model.dim=8", "--micro", "2", "run.device=cpu"]).overrides == ["model.dim=8", "run.device=cpu"]
    for words in (["speed", "--micro", "2", "--nosuch=3"], ["matmul", "run.device=cpu"]):
        with pytest.raises(SystemExit):
            parse(words)
        assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err


def work_of_a_step(folder: str, layout: str, one_rank_of: int | None = None, rank: int = 0) -> tuple[int, int, list[int]]:
    """FLOPs of this rank's last step, as torch counts them, its numbers of weights, and the target tokens of each step."""
    taken, flops, weights, tokens = Trainer.step, [], [], []

    def step(self, batch, target_tokens, *others):
        with FlopCounterMode(display=False) as counted:
            result = taken(self, batch, target_tokens, *others)
        flops.append(counted.get_total_flops())
        weights.append(sum(local(p).numel() for p in self.strategy.network.parameters()))
        tokens.append(target_tokens)
        return result

    keys = ("model={dim: 32, layers: 2, heads: 4, ffn_dim: 48, vocab_size: 257}", "run.device=cpu", "parallel.strategy=fsdp", *layout.split())
    asked = speed.Speed(None, 16, 2, 2, 1, keys, one_rank_of=one_rank_of, rank=rank)
    with patch.object(Trainer, "step", step), patch.object(speed, "WARM_UP", 0):
        [row] = speed.measure_speed(asked, "name", Options(Path(folder) / f"{rank}-of-{one_rank_of}", say=lambda line: None))
    assert row.value > 0 and ("alone: its exchanges moved nothing" in row.note) == (one_rank_of is not None)
    return flops[-1], weights[-1], tokens


OTHERS = {"parallel.context=2", "parallel.replicate=2", "parallel.tensor=2"}


@pytest.mark.parametrize("layout", some_slow(["parallel.tensor=2 parallel.pipeline=2", *sorted(OTHERS)], OTHERS))
def test_a_rank_alone_computes_what_it_does_among_the_others(pool, tmp_path, layout):
    together = pool.launch(4, work_of_a_step, str(tmp_path), layout)
    assert together[0][0] > 0
    for rank in (0, 3):
        assert pool.launch(1, work_of_a_step, str(tmp_path), layout, 4, rank) == [together[rank]], rank


def test_a_rank_alone_of_a_thousand_reads_little_data(pool, tmp_path):
    [(_, weights, tokens)] = pool.launch(1, work_of_a_step, str(tmp_path), "parallel.replicate=32", 1024, 1023)
    whole = on_meta(complete(Model(dim=32, layers=2, heads=4, ffn_dim=48, vocab_size=257), 16))
    assert tokens[0] == 1024 * 2 * 2 * 16 and weights < sum(p.numel() for p in whole.parameters()) / 8
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.bin"))
    assert 0 < written < 4 * speed._ALONE_TOKENS


@pytest.mark.slow
def test_speed_counts_the_tokens_that_ranks_train_together(tmp_path):
    file, start = (
        tmp_path / "rows.jsonl",
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    )
    options = ["speed", "--length", "32", "--micro", "2", "--accumulation", "2", "--steps", "1", "--json", str(file)]
    model = ["model={dim: 32, layers: 1, heads: 2, ffn_dim: 64, vocab_size: 257}", "run.device=cpu", "parallel.strategy=fsdp"]
    for layout in ("parallel.shard=2", "parallel.tensor=2"):  # the ranks see different samples, and the same ones
        typed = [*start, str(ROOT / "tools" / "bench.py"), *options, *model, layout]
        subprocess.run(typed, check=True, env=environment(1), capture_output=True)
    counted = [re.search(r"steps of (\d+) tokens in (\d+) micro-steps", row["note"]).groups() for row in read_lines(file)]
    assert counted == [("256", "2"), ("128", "2")]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_programs_are_compared_on_the_same_task(options, tmp_path, ranks):
    case = Case("A", "fp32", ranks, 2)
    programs = [name for name in PROGRAMS if name != ONLY_IN_ANOTHER]
    rows = compare_trainers([case], programs, 2, dataclasses.replace(options, work=tmp_path, scale=0.05))
    shown = [row for row in rows if row.in_table]
    assert [row.name for row in shown] == programs and {row.part for row in rows} == {case.name}
    assert all(row.value > 0 and row.baseline == rows[0].value and "MiB" in row.note for row in shown)
    assert len(rows) == 4 * len(shown) and all(row.value > 0 and row.versions["torch"] == importlib.metadata.version("torch") for row in rows)


def test_time_by_the_clock_first_step_and_peak_memory_are_rows_which_the_table_shows_in_a_note():
    """`--compare` saw CPU time alone: a doubled peak passed."""

    def rows(peak: float) -> list[Row]:
        turns = {"pretrain": 1e-6, "LitGPT": 2e-6}
        known = {"Python": "3.11.7", "torch": "2.13.0"}
        versions = {"pretrain": known, "LitGPT": {**known, "litgpt": "0.5.13"}}
        return _rows(
            Case("A", "fp32", 1, 1),
            {name: [Measured(cpu, 2 * cpu, first, peak, versions[name]) for first in (3.0, 5.0)] for name, cpu in turns.items()},
        )

    found = rows(100.0)
    assert [(row.name, row.value, row.unit, row.clock, row.baseline) for row in found[4:]] == [
        ("LitGPT", pytest.approx(2.0), "µs/token", "cpu", pytest.approx(1.0)),
        ("LitGPT: wall time", pytest.approx(4.0), "µs/token", "wall", pytest.approx(2.0)),
        ("LitGPT: first step", 3.0, "s", "wall", 3.0),
        ("LitGPT: peak memory", 100.0, "MiB", "-", 100.0),
    ]
    assert found[6].median == 4.0 and {row.better for row in found} == {"lower"}
    lines = table(found).splitlines()[2:]
    assert len(lines) == 2 and "| 250,000 tokens/s, first step after 3.0 s, 100 MiB; takes 2.00 x pretrain's time; litgpt 0.5.13, torch 2.13.0 |" in lines[1]
    typed = "python tools/bench.py peers"
    earlier = [json.loads(line) for line in as_lines(found, HERE, HERE, typed).splitlines()]
    compared = changes(rows(200.0), earlier, typed, HERE)
    part = "A fp32, 1 rank, 1 micro-step"
    assert f"{part}: pretrain: peak memory: 200 MiB, before 100 MiB: 2.000 x, worse" in compared


def test_a_program_leaves_the_versions_of_its_own_process(tmp_path):
    Clock(str(tmp_path / "result")).write(None)
    known = json.loads((tmp_path / "result-0.json").read_text())["versions"]
    assert known["Python"] == platform.python_version() and known["torch"] == importlib.metadata.version("torch") and "accelerate" in known


def test_what_cannot_be_measured_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    quality_of = ["quality", "--work", str(tmp_path), "--json", str(tmp_path / "found.jsonl")]
    assert tool("bench").main([*quality_of, "--settings", "muon-256x4", "nosuch"]) == 1
    assert "error: --settings nosuch: there are adamw-256x4, muon-256x4," in capsys.readouterr().err
    (tmp_path / "megabytes").write_text("46")
    assert tool("bench").main([*quality_of, "--scale", "0.05"]) == 1
    assert f"{tmp_path} holds a text of 46 MB, not of 2: name another --work" in capsys.readouterr().err
    unusable = {
        "no/such/python": "cannot be started: No such file or directory",
        sys.executable: "has no litgpt: install it there with `",
        "/bin/true": "has no litgpt: install it there with `",
    }
    for python, why in unusable.items():
        assert tool("bench").main(["peers", "--litgpt", python]) == 1
        assert f"error: --litgpt {python} {why}" in capsys.readouterr().err
    assert tool("bench").main(["peers", "--trainer", "/bin/true"]) == 1
    why = "has no transformers: install it there with `/bin/true -m pip install transformers accelerate torch`"
    assert f"error: --trainer /bin/true {why}" in capsys.readouterr().err
    for words, problem in {
        ("train", "--steps", "0"): "argument --steps: must be at least 1",
        ("train", "--scale", "nan"): "argument --scale: must be a positive number",
        ("data", "--seconds", "inf"): "argument --seconds: must be a number that is not negative",
        (*quality_of, "--minutes", "0"): "argument --minutes: must be a positive number",
        ("train", "--comp", "rows.jsonl"): "unrecognized arguments: --comp",
        ("checkpoint", "stalls"): "unknown part stalls; there are stall, files",
        ("collectives", "--ranks", "2", "1"): "argument --ranks: must be at least 2",
    }.items():
        with pytest.raises(SystemExit):
            tool("bench").main(list(words))
        assert problem in capsys.readouterr().err
    for words, problem in {
        ("checkpoint", "--work", f"{tmp_path}/none"): f"--work {tmp_path}/none: no such directory; make it first",
        ("checkpoint", "--work", f"{tmp_path}/found.jsonl"): f"--work {tmp_path}/found.jsonl: not a directory",
        ("speed", "--one-rank-of", "4", "--rank", "4", "parallel.strategy=fsdp"): "--rank=4 is no rank of --one-rank-of=4; give one of 0 to 3",
        ("speed", "--one-rank-of", "4", "parallel.strategy=ddp", "run.device=cpu"): "A rank of ddp computes what one process does: measure parallel.strategy=single",
        ("speed", "--rank", "1"): "--rank 1 has no effect without --one-rank-of; leave it out",
        ("speed", "batch.sequences=4"): "batch.sequences=4: --micro, --accumulation and --steps decide it; remove it",
        ("speed", "run={device: cpu, steps: 3}"): "--micro, --accumulation and --steps decide it; remove it",
        ("matmul", "--model", "configs/quickstart.yaml"): "configs/quickstart.yaml: model.vocab_size is left to the data, which is not read here; set it",
        ("checkpoint", "--model", "configs/quickstart.yaml"): "configs/quickstart.yaml: model.vocab_size is left to the data, which is not read here; set it",
        ("matmul", "--device", "cuda"): "--device cuda: there is no GPU; leave --device out",
        ("collectives", "--backend", "nccl"): "--backend nccl: there is no GPU; leave --backend out",
        (*quality_of, "--device", "cuda"): "--device cuda: there is no GPU; leave --device out",
        (*quality_of[:3], "--json", f"{tmp_path}/none/a.jsonl"): f"{tmp_path}/none/a.jsonl: No such file or directory",
    }.items():
        assert tool("bench").main(list(words)) != 0
        assert problem in capsys.readouterr().err
    (tmp_path / "found.jsonl").write_text("[1]\n")
    assert tool("bench").main(quality_of) == 1
    assert "found.jsonl: line 1 is no row that --json wrote for this subject: it lacks program" in capsys.readouterr().err


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("run", ["run_program(typed)", "_in_parallel({n: lambda: run_program(typed) for n in range(3)}, 2, print)"], ids=["", "in parallel"])
def test_a_benchmark_that_is_stopped_leaves_no_process_behind(tmp_path, by, run):
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell lets what it starts behind it ignore Ctrl-C
        "sys.path.insert(0, 'tools'); import bench; from benchmarks.measure import run_program; from benchmarks.quality import _in_parallel\n"
        "child = 'import subprocess, sys, time; subprocess.Popen([sys.executable, \"-c\", \"import time; time.sleep(600)  # grandchild\"]); "
        "open(sys.argv[1], \"a\").write(\"x\"); time.sleep(600)'\n"
        "typed = [sys.executable, '-c', child, sys.argv[1]]\n"
        f"bench.compare_formats = lambda *_: {run}\n"
        "raise SystemExit(bench.main(['formats']))"
    )
    started = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "runs")], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    begun = 2 if "parallel" in run else 1
    while not (tmp_path / "runs").exists() or len((tmp_path / "runs").read_text()) < begun:
        assert started.poll() is None
        time.sleep(0.05)
    family = psutil.Process(started.pid).children(recursive=True)
    assert len(family) == 2 * begun
    started.send_signal(by)
    said, code = ("interrupted", 130) if by == signal.SIGINT else ("ended by SIGTERM", 143)
    assert said in started.communicate(timeout=60)[1] and started.returncode == code
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_numbers_are_kept_by_line_and_compared_with_the_last_time(tmp_path):
    file, about = tmp_path / "numbers.jsonl", {**machine(), "commit": "abc1234", "dirty": False}
    for value in (4.0, 2.0):
        with file.open("a") as out:
            out.write(
                as_lines(
                    [Row("A", "pretrain", value, "µs/token"), Row("A", "other", 1.0, "s")],
                    about,
                    about,
                    "python tools/bench.py train --steps 2",
                )
            )
    now = [
        Row("A", "pretrain", 3.0, "µs/token", better="lower"),
        Row("B", "pretrain", 1.0, "s"),
        Row("A", "other", 1.0, "s", "wall"),
    ]
    typed = "python tools/bench.py train --steps 2"
    expected = [
        "A: pretrain: 3 µs/token, before 2 µs/token: 1.500 x, worse",
        "B: pretrain: 1 s, not measured before",
        "A: other: 1 s, before 1 s: not compared, because that is - time, and this wall time",
    ]
    assert changes(now, read_rows(file), f"{typed} --compare {file}", about) == expected
    assert changes(now, read_rows(file), f"{typed} --compare={file} --seconds=3", about) == expected
    rows = read_rows(file)
    other = {**rows[0], "value": 5.0, "command": "python tools/bench.py train --steps 9"}
    assert changes(now, [*rows, other], typed, about) == expected  # what this command measured goes before what another did later
    [line, *_] = changes(now, read_rows(file), f"{typed} --scale 0.1", about)
    assert line == f"{expected[0]}; then command: {typed}"
    before = {**read_rows(file)[0], "value": 0.0, "machine": {**about, "cores": 1000, "versions": {**about["versions"], "torch": "1.0"}}}
    [line, *_] = changes(now, [before], typed, about)
    assert line == "A: pretrain: 3 µs/token, before 0 µs/token: no ratio to 0, worse; then cores: 1000; then torch: 1.0"
    [line, *_] = changes(now, [before | {"unit": "ms/token"}], typed, about)
    assert line.endswith(": not compared, because the units differ")
    good = json.dumps(rows[0])
    file.write_text(f"{good}\n\n  \n")
    assert read_rows(file) == [rows[0]]
    file.write_text(f"{good}\n{{")
    with pytest.raises(DataError, match=r"numbers.jsonl: no file that --json wrote \(line 2: Expecting property name"):
        read_rows(file)
    file.write_bytes(b"\xff")
    with pytest.raises(DataError, match="it is not UTF-8"):
        read_rows(file)
    for change in ({"value": None}, {"machine": "x"}, {"command": 5}):  # was found after all had been measured
        file.write_text(json.dumps(rows[0] | change) + "\n")
        with pytest.raises(DataError, match="was not written by --json: its value, machine or command is of another type"):
            read_rows(file)


HERE = {
    "date": "2026-11-29 16:00 UTC", "cpu": "AMD EPYC", "cpu_family": "25", "cpu_model": "17", "cpu_flags": "avx2 avx512_bf16", "cores": 2,
    "load_average": [0.0, 0.0, 0.0], "python": "3.11.7", "versions": {"torch": "2.13.0", "accelerate": "1.15.0"}, "commit": "abc1234", "dirty": False,
}  # fmt: skip


def compared(then: dict, now: dict, versions_then: dict | None = None, versions_now: dict | None = None) -> str:
    """What `--compare` says behind the ratio."""
    typed = "python tools/bench.py train"
    [line] = as_lines([Row("A", "pretrain", 2.0, "s", versions=versions_then or {})], then, then, typed).splitlines()
    [line] = changes([Row("A", "pretrain", 1.0, "s", better="lower", versions=versions_now or {})], [json.loads(line)], typed, now)
    beginning = "A: pretrain: 1 s, before 2 s: 0.500 x, better"
    assert line.startswith(beginning)
    return line.removeprefix(beginning)


@pytest.mark.parametrize(
    ("then", "text"),
    [
        ({}, ""),
        ({"date": "2025-01-01 00:00 UTC", "load_average": [9.0, 9.0, 9.0]}, ""),
        ({"cpu_family": "26", "cpu_model": "2"}, "; then CPU: AMD EPYC (family 26, model 2: avx2 avx512_bf16)"),
        ({"cpu_flags": ""}, "; then CPU: AMD EPYC (family 25, model 17: no avx2 or avx512_bf16 or amx_bf16)"),
        ({"gpu": "NVIDIA H100"}, "; then GPU: NVIDIA H100"),
        ({"python": "3.9.1"}, "; then Python: 3.9.1"),
        ({"versions": {"torch": "2.13.0", "accelerate": "1.0", "litgpt": "0.4"}}, "; then accelerate: 1.0; then litgpt: 0.4"),
        ({"commit": "def5678"}, "; then commit: def5678"),
        ({"dirty": True}, "; then commit: abc1234 with changes"),
    ],
)
def test_what_was_not_alike_is_named(then, text):
    assert compared({**HERE, **then}, HERE) == text


def test_rows_of_earlier_commits_say_in_one_line_what_they_do_not_have(tmp_path):
    typed, file = "python tools/bench.py speed", tmp_path / "rows.jsonl"
    old = json.loads(as_lines([Row("speed", "x", 2.0, "tokens/s", "wall")], HERE, HERE, typed))
    for name in ("versions", "in_table"):
        del old[name]
    old["machine"] = {name: value for name, value in HERE.items() if not name.startswith(("cpu_", "commit", "dirty"))}
    old["machine"]["versions"] = {"torch": "2.13.0"}
    file.write_text(json.dumps(old) + "\n")
    [line] = changes([Row("speed", "x", 1.0, "tokens/s", "wall")], read_rows(file), typed, HERE | {"gpu": "NVIDIA H200"})
    unknown = "CPU family and model, GPU, accelerate, commit"
    assert line == f"speed: x: 1 tokens/s, before 2 tokens/s: 0.500 x, worse; not kept then: {unknown}"
    # A program of another environment: the versions of the machine's line were not its own.
    [line] = changes([Row("speed", "x", 1.0, "tokens/s", "wall", versions={"litgpt": "0.5.13", "torch": "2.10.0"})], read_rows(file), typed, HERE)
    assert line.endswith("; not kept then: CPU family and model, versions, commit")


def test_versions_of_a_programs_own_environment_are_compared():
    then, now = ({"Python": "3.11.7", "torch": "2.10.0", "litgpt": version} for version in ("0.5.12", "0.5.13"))
    assert compared(HERE, HERE, then, now) == "; then litgpt: 0.5.12"
    assert compared(HERE, HERE, now, now) == ""


def test_rows_that_a_command_measures_no_more_are_named_when_all_its_cases_are_measured(tmp_path, monkeypatch, capsys):
    programs = ["pretrain", "gone"]
    monkeypatch.setattr(
        "benchmarks.training.compare_trainers",
        lambda cases, *_: [Row(cases[0].name, name, 1.0, "µs/token", "cpu", better="lower") for name in programs],
    )
    file = str(tmp_path / "rows.jsonl")
    assert tool("bench").main(["train", "--json", file]) == 0
    programs.remove("gone")
    assert tool("bench").main(["train", "--compare", file]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "not measured" in line]
    parts = [f"A {name}, 1 rank, 1 micro-step" for name in ("fp32", "bf16")]
    assert said == [f"{part}: gone: not measured now, before 1 µs/token" for part in parts]
    assert not_measured([], read_rows(Path(file)), "python tools/bench.py train --steps 9") == []  # another command asks for others


def test_speeds_on_other_numbers_of_ranks_are_other_rows(tmp_path, monkeypatch, capsys):
    """They had one name, so that `--compare` found two ranks to be faster than one."""
    monkeypatch.setattr("benchmarks.speed.measure_speed", lambda asked, name, options: [Row("speed", name, 1.0, "tokens/s", "wall")])
    typed, file = ["speed", "--micro", "2", "model.dim=8", "run.device=cpu"], str(tmp_path / "rows.jsonl")
    assert tool("bench").main([*typed, "--json", file]) == 0
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert tool("bench").main([*typed, "--json", file, "--compare", file]) == 0
    plain, shared = (row["name"] for row in read_rows(Path(file)))
    assert shared == f"{plain} on 2 ranks"
    assert "1.000 x" not in capsys.readouterr().out


def test_a_cpu_is_told_from_others_of_its_name(tmp_path):
    info = tmp_path / "cpuinfo"
    for family, model, flags in (("25", "1", "fpu avx2"), ("26", "2", "fpu avx2 avx512_bf16")):
        one = f"cpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: AMD EPYC\nflags\t\t: {flags} amx\n\n"
        info.write_text(one + one.replace("AMD EPYC", "the second core"))
        found = {"cpu": "AMD EPYC", "cpu_family": family, "cpu_model": model, "cpu_flags": flags.removeprefix("fpu ")}
        assert cpu(info) == found
    assert "AMD EPYC (family 26, model 2: avx2 avx512_bf16), 2 cores" in heading({**HERE, **found}, HERE, "x")
    info.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert cpu(info) == cpu(tmp_path / "none") == {"cpu": platform.processor()}


def test_the_commit_is_kept_and_whether_files_differ_from_it(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        named = ("-c", "user.name=x", "-c", "user.email=x@x")
        return subprocess.run(["git", "-C", str(tmp_path), *named, *words], check=True, capture_output=True, text=True).stdout.strip()

    assert commit(tmp_path) == {}
    git("init")
    assert commit(tmp_path) == {}  # the repository has no commit yet
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "x")
    (tmp_path / "numbers.jsonl").write_text("not tracked")
    (tmp_path / "folder").mkdir()
    name = git("rev-parse", "--short", "HEAD")
    assert commit(tmp_path) == {"commit": name, "dirty": False} and commit(tmp_path / "folder") == {}
    (tmp_path / "file").write_text("b")
    assert commit(tmp_path) == {"commit": name, "dirty": True}
    assert f", commit {name} with changes" in heading({**HERE, **commit(tmp_path)}, HERE, "x")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(tmp_path) == {}


@pytest.mark.parametrize(
    ("words", "measures", "other"),
    [
        (["matmul", "--device", "cuda"], "matmul.matmul", ["matmul"]),
        (["checkpoint", "--device", "cuda"], "saving.saving", ["checkpoint"]),
        (["collectives", "--backend", "nccl"], "collectives.collectives", ["collectives"]),
        (["speed", "run.device=cuda"], "speed.measure_speed", ["speed", "run.device=cpu"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_measured_on_a_gpu_keeps_its_name(tmp_path, monkeypatch, words, measures, other):
    monkeypatch.setattr(f"benchmarks.{measures}", lambda *_: [Row("part", "name", 1.0, "s")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    for asked in (words, other):
        assert tool("bench").main([*asked, "--json", str(tmp_path / "rows.jsonl")]) == 0
    assert [row["machine"].get("gpu") for row in read_rows(tmp_path / "rows.jsonl")] == ["NVIDIA H200", None]


def test_a_file_that_cannot_be_compared_or_written_is_refused_before_anything_is_measured(tmp_path, capsys):
    arguments = ["matmul", "--squares", "64", "--formats", "fp32", "--scale", "0.1", "--seconds", "0"]
    results = ROOT / "tools" / "benchmarks" / "quality_results.jsonl"
    for option, path, problem in (
        ("--compare", results, f"{results}: line 1 is no row that --json wrote for this subject: it lacks part, name, value"),
        ("--json", tmp_path / "missing" / "rows.jsonl", "missing/rows.jsonl"),
    ):
        assert tool("bench").main([*arguments, option, str(path)]) == 1
        printed = capsys.readouterr()
        assert problem in printed.err and not printed.out and len(printed.err.splitlines()) == 1


def test_layouts_optimizers_and_data_keep_and_compare_their_rows_too():
    parser = tool("bench").parser()
    for subject in ("data", "layouts", "optimizers", "speed", "train", "peers", "matmul", "collectives", "checkpoint"):
        given = parser.parse_args([subject, "--json", "a", "--compare", "b"])
        assert (str(given.json), str(given.compare)) == ("a", "b")


def test_a_step_of_each_optimizer_is_measured_beside_the_passes_of_its_batch(options):
    rows = updates(dataclasses.replace(options, scale=0.05))
    assert [row.name for row in rows] == ["adamw", "lion", "muon", "adafactor", "schedule_free_adamw"] and all(
        row.value > 0 and "% of the passes" in row.note for row in rows
    )


@pytest.mark.parametrize("preset", ["llama-25m", "gpt2-124m", "qwen3-0.6b"])
def test_products_of_a_models_layers_are_those_that_its_flops_count(preset):
    config = resolve(load_config(ROOT / "configs" / "models" / f"{preset}.yaml", [])[0])
    flops = sum(one.count * one.flops for one in layer_products(config, 10))
    assert flops == 10 * 2 * on_meta(config.model).matmul_parameters()


def test_products_are_measured_by_format_and_shape_and_kept(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    model = str(ROOT / "configs" / "models" / "moe-40m-a10m.yaml")
    arguments = ["matmul", "--squares", "640", "--model", model, "--tokens", "800", "--scale", "0.01", "--seconds", "0"]
    assert tool("bench").main([*arguments, "--json", str(file)]) == 0
    assert tool("bench").main([*arguments, "--compare", str(file)]) == 0
    assert "matmul bf16: square of 8: " in capsys.readouterr().out
    rows = read_lines(file)
    for name in ("fp32", "bf16"):
        of = [row["name"] for row in rows if row["part"] == f"matmul {name}"]
        assert (
            of[0] == "square of 8"
            and any("experts' up" in one for one in of)
            and any(one.startswith("head: 8 x") for one in of)
        )
    assert all(row["value"] > 0 and row["baseline"] is None and "peak is not known" in row["note"] for row in rows)


def test_collectives_move_the_bytes_of_a_ring(tmp_path):
    options = Options(tmp_path, 0.05, 0.01, say=lambda line: None)
    found = {(one.operation, one.size): one for one in exchanges(2, [80_000, 800_000], "gloo", options)}
    assert {size for _, size in found} == {800, 8000} and len(found) == 12
    whole = ("broadcast", "all-reduce", "send/recv")  # of two ranks; the others move half of it
    assert all(one.moved == (size if name in whole else size / 2) and one.best > 0 for (name, size), one in found.items())


def test_a_rings_formula_is_fitted_to_what_was_measured(monkeypatch, tmp_path):
    known = [
        Exchange(name, 4, size, (HOPS[name](4) * 2e-5 + MOVED[name](4) * size / 4e9, 1.0))
        for name in HOPS
        for size in (4096, 1 << 20)
    ]
    hop, byte = fit_ring(known)
    assert hop == pytest.approx(2e-5) and byte == pytest.approx(1 / 4e9)
    monkeypatch.setattr("benchmarks.collectives.exchanges", lambda *_: known)
    latency, bandwidth, *rows = collectives([4], [1], "gloo", Options(tmp_path, say=lambda line: None))
    assert latency.value == pytest.approx(20) and bandwidth.value == pytest.approx(4)
    assert all(row.value == pytest.approx(row.baseline) and "1.00 x the formula" in row.note for row in rows)
    reduced = next(row for row in rows if row.name == "all-reduce of 4,096 bytes")
    assert "6,144 bytes leave a rank" in reduced.note
    odd = [dataclasses.replace(one, seconds=(1 / one.size,)) for one in known]  # large ones are faster
    assert min(fit_ring(odd)) == 0 < max(fit_ring(odd))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_save_is_measured_beside_plain_files_of_the_same_bytes(options, tmp_path, capsys, device):
    model = ROOT / "configs" / "models" / "llama-25m.yaml"
    tensors = run_state(model, "cpu", dataclasses.replace(options, scale=0.01))
    weights = [tensor.nbytes for name, tensor in tensors.items() if name.startswith("model.")]
    whole = 3 * sum(weights) + 4 * len(weights)  # AdamW has two moments and a count of steps for each
    assert sum(tensor.nbytes for tensor in tensors.values()) == whole
    file = tmp_path / "rows.jsonl"
    asked = ["--model", str(model), "--device", device, "--scale", "0.01", "--seconds", "0", "--json", str(file)]
    assert tool("bench").main(["checkpoint", *asked]) == 0
    rows = {row["name"]: row for row in read_lines(file)}
    assert rows["bytes of tensors"]["value"] == whole / 1e6 < rows["bytes on the disk: ours"]["value"] < 1.1 * whole / 1e6
    for what in ("write", "load"):
        assert [name for name in rows if name.startswith(f"{what}:")] == [
            f"{what}: {by}" for by in ("ours", "torch.save", "safetensors")
        ]
    seconds = rows["stall of a save"]["value"]
    assert rows["write: ours"]["value"] == pytest.approx(rows["bytes of tensors"]["value"] / seconds)
    beside = "stall of a save in the background"
    assert rows[beside]["baseline"] > 0
    assert tool("bench").main(["checkpoint", "stall", *asked[:-1], str(tmp_path / "stall.jsonl")]) == 0
    stall = {row["name"]: row for row in read_lines(tmp_path / "stall.jsonl")}
    assert set(stall) == {beside, "bytes of tensors"} and stall[beside]["value"] > 0


def test_preparation_is_measured_beside_the_libraries(options):
    rows = {row.name: row for row in measure(["preparation"], options)}
    assert all(math.isfinite(row.value) and row.value > 0 for row in rows.values())
    for kind in ("byte-level BPE", "SentencePiece BPE"):
        assert rows[f"{kind}: encoding alone"].baseline > 0
    assert rows["byte-level BPE: datasets.map with a fast tokenizer"].value > 0
    assert rows["peak memory at 2 times the text"].value > 20


def test_a_wrong_result_is_an_error(options, tmp_path, monkeypatch):
    documents_of = loading.Loader.read

    def other_tokens(self, consumed):
        batch = documents_of(self, consumed)
        batch.inputs["tokens_BT"][0, 0] += 1
        return batch

    monkeypatch.setattr(loading.Loader, "read", other_tokens)
    with pytest.raises(DataError, match="other tokens than in the files"):
        measure(["loader"], dataclasses.replace(options, work=tmp_path))


def test_other_ids_than_the_librarys_are_an_error(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    prepared = write_tokens(tmp_path / "data", tokenizer, 5000, 1000)
    data = PreparedData.open(prepared)
    texts = [tokenizer.decode(data.read(*span).tolist()) for span in [(0, 1)] * data.documents]
    with pytest.raises(DataError, match="document 1 has other ids"):
        preparing._check_ids(tmp_path / "byte_tokenizer", preparing.Corpus(texts, tmp_path / "x"), prepared)


def test_generated_shards_are_prepared_data(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    data = PreparedData.open(write_tokens(tmp_path / "data", tokenizer, 300_000, 100_000))
    data.verify()
    assert 250_000 <= data.tokens <= 310_000 and len(data.manifest.shards) >= 3


def test_links_to_shards_take_turns(tmp_path):
    original = PreparedData.open(write_tokens(tmp_path / "data", byte_tokenizer(tmp_path), 300_000, 100_000))
    shards = len(original.manifest.shards)
    data = PreparedData.open(link_shards(original.path, tmp_path / "links", 2 * shards))
    assert (data.tokens, data.documents) == (2 * original.tokens, 2 * original.documents)
    assert np.array_equal(data.read(0, data.tokens), np.tile(original.read(0, original.tokens), 2))
    assert len({shard.sha256 for shard in data.manifest.shards}) == 2 * shards > 4


def test_what_is_compared_takes_turns():
    calls = []
    turns = in_turns({name: lambda name=name: calls.append(name) for name in "ab"}, Options(None, seconds=0))
    assert calls == list("ababab")
    assert all(len(its.seconds) == 3 for its in turns.values())
    assert Turns((2.0, 1.0, 4.0)).rate(8) == (8.0, 4.0)


def test_a_target_is_met_from_its_own_side():
    assert Row("p", "n", 3.0, "x", target=3.0).met
    assert not Row("p", "n", 2.9, "x", target=3.0).met
    assert Row("p", "n", 0.9, "s", target=1.0, better="lower").met
    assert not Row("p", "n", 1.0, "s", target=1.0, better="lower").met
    assert Row("p", "n", 1.0, "s").met is None
    assert "| ≥ 3 | NO |" in table([Row("p", "n", 2.9, "x", target=3.0)])


def test_the_tool_prints_a_table_and_writes_json(tmp_path, capsys):
    bench = tool("bench")
    arguments = ["data", "order", "packing", "--seconds", "0", "--scale", "0.001", "--work", str(tmp_path)]
    assert bench.main([*arguments, "--json", str(tmp_path / "rows.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("python tools/bench.py data order packing --seconds 0") and "load average" in printed
    rows = read_rows(tmp_path / "rows.jsonl")
    assert printed.count("\n| order |") == sum(row["part"] == "order" for row in rows) == 5
    assert rows[0]["machine"]["cpu"] and rows[0]["machine"]["cores"] >= 1 and rows[0]["machine"]["versions"]["numpy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


@pytest.mark.parametrize(
    "arguments",
    [["data", "speed"], ["data", "order", "--scale", "0"], ["data", "--seconds", "-1"], ["matmul", "--scale", "0"], []],
)
def test_bad_usage_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        tool("bench").main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_the_number_format_is_chosen_by_what_was_measured_and_not_by_a_flag(capsys):
    """With AVX-512 bf16 and no AMX, bf16 went unused: products there are several times as fast."""

    def rows(fp32: tuple[float, float], bf16: tuple[float, float]) -> list[Row]:
        named = (("fp32", fp32), ("bf16", bf16))
        return [Row("products", name, best, "GFLOP/s", median=median) for name, (best, median) in named]

    assert fastest(rows((80, 75), (320, 300))) == "bf16"
    assert fastest(rows((80, 75), (90, 85))) == "fp32"  # not worth its rounding
    assert fastest(rows((80, 75), (320, 60))) == "fp32"  # one good turn of many
    assert tool("bench").main(["formats", "--seconds", "0.1"]) == 0
    table = capsys.readouterr().out
    speeds = {name: float(best) for name, best in re.findall(r"\| (fp32|bf16) \| ([\d.,]+) \|", table.replace(",", ""))}
    assert speeds.keys() == {"fp32", "bf16"} and min(speeds.values()) > 1
    assert re.search(r"precision\.compute=(fp32|bf16) trains faster on this CPU", table)
