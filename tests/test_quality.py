"""Time to quality: programs train the same text for the same minutes, and what each reached is kept (tools/benchmarks/quality.py)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from benchmarks import quality
from benchmarks.corpora import byte_tokenizer, write_tokens
from benchmarks.measure import ROOT, Options, environment
from benchmarks.quality import Contest, Run, Text, all_settings
from benchmarks.trainers.plain_network import Network
from benchmarks.trainers.quality_task import QualityTask
from documentation import quality_figure
from running import tool

from pretrain.config.load import load_config
from pretrain.data.shards.reader import PreparedData
from pretrain.errors import DataError
from pretrain.huggingface.open_model import open_model
from pretrain.train.resolve import resolve

PROCESSORS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


@pytest.fixture
def options(tmp_path) -> Options:
    return Options(tmp_path, scale=0.002, say=lambda line: None)


@pytest.mark.parametrize("device", quality.SETTINGS)
def test_programs_are_tried_as_often_and_each_setting_of_ours_is_one(device):
    settings = all_settings("fp32", device)
    assert settings.keys() == quality.PROGRAMS.keys() and len({len(tries) for tries in settings.values()}) == 1
    for setting in settings["pretrain"].values():
        resolve(load_config(None, [*setting["overrides"], "data.sources=[{path: nowhere}]", "run.steps=100", f"run.device={device}"])[0])
    assert "bf16" not in json.dumps(settings) and "fp32" not in json.dumps(all_settings("bf16", device))
    assert all("fp32" in json.dumps(setting) for tries in settings.values() for setting in tries.values())


def test_results_of_a_text_are_put_together_best_first():
    line = {
        "minutes": 5.0,
        "program": "a",
        "setting": "x",
        "format": "bf16",
        "bits_per_byte": 1.5,
        "steps": 100,
        "seconds": 300.4,
        "others": 0.01,
    }
    louder = {**line, "bits_per_byte": 1.7, "seconds": 400.0, "others": 0.2}
    other_format = {**line, "format": "fp32", "bits_per_byte": 1.8}
    found = quality.summary([line, louder, {**line, "program": "b", "bits_per_byte": 1.4}, other_format]).splitlines()
    assert found[2:] == [
        "| 5 | b | x | bf16 | 1.4000 | 0.0000 | 1 | 100 | 300 | 1% |",
        "| 5 | a | x | bf16 | 1.6000 | 0.2000 | 2 | 100 | 350 | 20% |",
        "| 5 | a | x | fp32 | 1.8000 | 0.0000 | 1 | 100 | 300 | 1% |",
    ]


@pytest.mark.parametrize("device, turns", [("cpu", 3), ("cuda", 1)])
def test_steps_are_timed_in_turns_and_not_on_a_machine_that_others_use(tmp_path, monkeypatch, device, turns):
    # Seconds of a step: each program first compiles, then has its turns.
    stamps = iter([2.0, 1.0, 1.5, 4.0, 3.0, 5.0, 1.0, 0.5] if turns == 3 else [2.0, 1.0, 1.0, 0.5])

    def run(program, setting, steps, seed, contest):
        marks = QualityTask({}, device, steps, seed, 0, "", "").marks
        assert steps == quality.FEW[device] and len(marks) == (2 if device == "cuda" else steps)
        step = next(stamps)
        return Run(steps, 0.0, [(mark, mark * step) for mark in marks], 1.0)

    monkeypatch.setattr(quality, "_run", run)
    monkeypatch.setattr(quality._OthersShare, "now", lambda self: 0.0)  # whatever the machine does beside these tests
    contest, options = Contest(Text(tmp_path, "", 3.0), "bf16", device), Options(tmp_path, say=lambda line: None)
    found = quality.paces([("a", "x"), ("b", "y")], contest, options, 1)
    assert found == {("a", "x"): quality.Pace(1.0, 1.0), ("b", "y"): quality.Pace(0.5, 0.5)} and next(stamps, None) is None
    assert found["b", "y"].steps(5.0) == 1 + int((300 - 0.5) / 0.5)
    monkeypatch.setattr(quality._OthersShare, "now", lambda self: 0.5)
    stamps = iter(lambda: 1.0, None)
    with pytest.raises(DataError, match="others have used 50% of the cores in each of 10 tries to time a step"):
        quality.paces([("a", "x")], contest, options, 1)


def test_neither_compiling_nor_validating_is_a_step_and_a_stall_is_none():
    """On a CPU each of twelve steps is stamped: started at 100, the first takes 30 s, the second 8, others 2, one 9, and the last is stamped after validation."""
    times = [130.0, 138.0, 140.0, 142.0, 151.0, 153.0, 155.0, 157.0, 159.0, 161.0, 163.0, 200.0]
    run = Run(12, 100.0, list(enumerate(times, start=1)), 1.0)
    assert run.pace == quality.Pace(30.0, 2.0) and run.seconds == 65.0


@pytest.mark.parametrize("steps", [201, 300])
def test_a_gpus_seconds_are_counted_from_two_marks(tmp_path, monkeypatch, steps):
    """It starts in 5 s and takes 0.1 s per step; what comes after the marks, validation, does not count."""
    marks = QualityTask({}, "cuda", steps, 0, 0, "", "").marks
    monkeypatch.setattr(quality, "_run", lambda *arguments: Run(steps, 0.0, [(mark, 5.0 + 0.1 * mark) for mark in marks], 1.0))
    contest = Contest(Text(tmp_path, "", 3.0), "bf16", "cuda")
    assert quality.train("a", "x", 1.0, 0, steps, contest).seconds == pytest.approx(5.0 + 0.1 * steps)
    assert marks[1] == 2 * marks[0] and steps - 2 <= marks[1] < steps


def test_of_several_trainings_at_once_one_that_fails_stops_no_other():
    begun, kept, meeting = [], {}, threading.Barrier(2)

    def act(number):
        begun.append(number)
        if number < 2:
            meeting.wait(60)  # both are under way
        if number == 0:
            raise DataError("the first one fails")
        return 10 * number

    failed = quality._in_parallel({number: functools.partial(act, number) for number in range(4)}, 2, kept.__setitem__)
    assert sorted(begun) == [0, 1, 2, 3] and kept == {1: 10, 2: 20, 3: 30}
    assert {name: str(error) for name, error in failed.items()} == {0: "the first one fails"}


@pytest.mark.parametrize("good_runs", [0, 1, 2])
def test_a_program_that_fails_costs_no_other_its_result(tmp_path, monkeypatch, capsys, good_runs):
    """The first run of each is not timed, three are."""
    runs_of_the_trainer = itertools.count()

    def run(program, setting, steps, seed, contest):
        if (program == "HF Trainer" and next(runs_of_the_trainer) >= good_runs) or (program == "pretrain" and seed == 1):
            raise (OSError if good_runs == 2 else DataError)(f"{program} fails")
        return Run(steps, 0.0, [(number, float(number)) for number in range(1, steps + 1)], 1.0)

    monkeypatch.setattr(quality, "all_settings", lambda format, device: {program: {f"of {program}": {}} for program in quality.PROGRAMS})
    monkeypatch.setattr(quality, "prepare_text", lambda options: Text(tmp_path, "0" * 64, 3.0))
    monkeypatch.setattr(quality, "_run", run)
    monkeypatch.setattr(quality._OthersShare, "now", lambda self: 0.0)
    words = ["quality", "--work", str(tmp_path), "--json", str(tmp_path / "found.jsonl"), "--seeds", "0", "1", "--at-once", "2"]
    assert tool("bench").main(words) == 1
    printed = capsys.readouterr()
    assert "HF Trainer, of HF Trainer has no pace: HF Trainer fails" in printed.err
    assert "error: pretrain fails; HF Trainer, of HF Trainer failed when its steps were timed" in printed.err
    found = [(line["program"], line["seed"]) for line in map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())]
    assert sorted(found) == [("nanoGPT's loop", 0), ("nanoGPT's loop", 1), ("pretrain", 0)] and "| pretrain |" in printed.out.replace("| 5 ", "")


def test_programs_that_run_beside_one_are_not_others():
    """Their time counts from when the measurement began, whether they end in it or not."""
    busy = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"
    beside = subprocess.Popen([sys.executable, "-c", busy.format(60)])
    try:
        time.sleep(1.0)
        others, before = quality._OthersShare(), psutil.cpu_times()
        subprocess.run([sys.executable, "-c", busy.format(1.0)], check=True)
        share, after = others.now(), psutil.cpu_times()
    finally:
        beside.kill()
        beside.wait()
    used = sum(after) - after.idle - after.iowait - sum(before) + before.idle + before.iowait
    assert used >= 2.0 and -0.1 <= share * quality.cores_of_host() <= used - 1.5


def test_a_result_is_made_again_when_what_it_depends_on_has_changed_and_seeds_take_the_same_steps(tmp_path, monkeypatch, capsys):
    """That is its setting, the format and the device."""
    made = []

    def train(program, setting, minutes, seed, steps, contest):
        made.append((settings[program][setting]["lr"], seed, steps, contest.format, contest.device))
        return quality.Result(program, setting, contest.format, contest.device, minutes, seed, steps, 1.0, 1.5, 0.0)

    def with_format(format, device):
        return {
            program: {name: {**values, "format": format} for name, values in tries.items()} for program, tries in settings.items()
        }

    def paces(cases, contest, options, at_once):
        return dict.fromkeys(cases, quality.Pace(1.0, 1.0))

    settings = {"pretrain": {"a": {"lr": 1.0}}, "HF Trainer": {}, "nanoGPT's loop": {}}
    monkeypatch.setattr(quality, "all_settings", with_format)
    monkeypatch.setattr(quality, "prepare_text", lambda options: Text(tmp_path, "0" * 64, 3.0))
    monkeypatch.setattr(quality, "train", train)
    monkeypatch.setattr(quality, "paces", paces)
    monkeypatch.setattr(quality, "machine", lambda device: {})  # there is no GPU to be named
    monkeypatch.setattr(quality, "require_device", lambda device: None)
    words = ["quality", "--work", str(tmp_path), "--json", str(tmp_path / "found.jsonl")]
    for rate in (1.0, 1.0, 2.0, 2.0):
        settings["pretrain"]["a"]["lr"] = rate
        assert tool("bench").main(words) == 0
    for _ in range(2):
        assert tool("bench").main([*words, "--format", "fp32"]) == 0
        assert tool("bench").main([*words, "--device", "cuda"]) == 0
    monkeypatch.setattr(quality, "paces", lambda cases, *others: {} if not cases else pytest.fail("known steps are timed"))
    assert tool("bench").main([*words, "--seeds", "0", "1"]) == 0
    once = [(1.0, 0, 300, "bf16", "cpu"), (2.0, 0, 300, "bf16", "cpu"), (2.0, 0, 300, "fp32", "cpu"), (2.0, 0, 300, "bf16", "cuda")]
    assert made == [*once, (2.0, 1, 300, "bf16", "cpu")]
    for seed in ("0", "2"):  # one that is there, and one that is not
        assert tool("bench").main([*words, "--seeds", seed, "--steps", "70"]) == 1
        assert "found.jsonl pretrain, a took 300; name another --json" in capsys.readouterr().err
    settings["pretrain"] = {"b": {"lr": 3.0}}
    assert tool("bench").main([*words, "--seeds", "0", "--steps", "70"]) == 0
    assert tool("bench").main([*words, "--seeds", "1", "2", "--at-once", "2"]) == 0
    assert [found[:3] for found in made[5:6]] == [(3.0, 0, 70)] and {found[:3] for found in made[6:]} == {(3.0, 1, 70), (3.0, 2, 70)}
    assert tool("bench").main([*words, "--seeds", "3", "--steps", "11"]) == 1
    assert "--steps 11: a result needs at least 12" in capsys.readouterr().err


def test_a_text_whose_preparation_was_interrupted_is_prepared_to_its_end(options, tmp_path, monkeypatch):
    """Its tokenizer was there and nothing behind it, and every later start was refused."""
    options = dataclasses.replace(options, work=tmp_path, scale=0.002)
    done, tools = quality._tool, []

    def interrupted(name, *arguments):
        tools.append(name)
        if len(tools) in (2, 5):
            raise KeyboardInterrupt
        done(name, *arguments)

    monkeypatch.setattr(quality, "_tool", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            quality.prepare_text(options)
    text = quality.prepare_text(options)
    begun = ["collect_source.py", "train_tokenizer.py"]
    assert tools == [*begun, *begun, "prepare_data.py", "prepare_data.py"]
    assert quality.prepare_text(options) == text and (tmp_path / "train.bin").stat().st_size > 100_000


def test_pretrain_is_scored_on_all_windows_of_the_validation_text_like_the_others(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    for name, tokens in {"train": 4096, "validation": 80 * 8}.items():  # more windows than a run validates by default
        data = PreparedData.open(write_tokens(tmp_path / "data" / name, tokenizer, tokens, 1 << 20))
        data.read_joined(np.array([0]), np.array([data.tokens])).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    overrides = [
        "data.sequence_length=8",
        "model={dim: 16, layers: 1, heads: 1, ffn_dim: 32}",
        "batch={sequences: 4, micro_sequences: 4}",
    ]
    task = QualityTask(
        {"warmup": 0.5, "length": 8, "overrides": overrides}, "cpu", 2, 0, tokenizer.vocab_size, str(tmp_path), str(tmp_path / "r")
    )
    typed = [sys.executable, str(ROOT / "tools/benchmarks/trainers/quality_ours.py"), json.dumps(dataclasses.asdict(task))]
    subprocess.run(typed, check=True, env=environment(1), capture_output=True)
    network = open_model(tmp_path / "runs" / "r" / "checkpoints" / "step-00000002", torch.device("cpu"), "fp32").network
    with torch.no_grad():
        parts = [torch.from_numpy(window) for window in task.validation()]
        losses = [network(tokens_BT=part[:, :-1], targets_BT=part[:, 1:]) for part in parts]
    assert sum(map(len, parts)) > 64
    assert json.loads((tmp_path / "r-0.json").read_text())["loss"] == pytest.approx(
        float(torch.cat(losses).mean()) / 8, rel=1e-6
    )


def test_the_tables_and_the_figure_of_time_to_quality_show_the_results_that_are_kept(tmp_path):
    lines = [json.loads(line) for line in quality_figure.RESULTS.read_text().splitlines()]
    seeds = {}
    for line in lines:
        seeds.setdefault((line["minutes"], line["program"], line["setting"], line["format"]), []).append(line)
    rows = (ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    for (_, program, setting, _), members in seeds.items():
        mean = statistics.mean(line["bits_per_byte"] for line in members)
        each = ", ".join(f"{line['bits_per_byte']:.4f}" for line in sorted(members, key=lambda line: line["seed"]))
        row = next(row for row in rows if row.startswith(f"| {program} | {setting}") and each in row)
        assert f"{mean:.3f}" in row and f"| {members[0]['steps']:,} |" in row, row
    more = [{**line, "format": "another"} for line in lines[:1]]
    assert quality_figure.rows([*lines, *more]) == quality_figure.rows(lines) + 1
    quality_figure.draw([*lines, *more], tmp_path / "quality.png")
    assert (tmp_path / "quality.png").stat().st_size > 10_000


@pytest.mark.parametrize("bias", [True, False])
def test_the_plain_network_drops_only_while_it_trains(bias):
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (4, 17))
    network, plain = (Network(32, 2, 2, 50, 16, dropout, bias) for dropout in (0.5, 0.0))
    plain.load_state_dict(network.state_dict())
    with torch.no_grad():
        dropped, again = (float(network(ids[:, :-1], ids[:, 1:])) for _ in range(2))
        kept = float(plain(ids[:, :-1], ids[:, 1:]))
        assert len({dropped, again, kept}) == 3 and float(network.eval()(ids[:, :-1], ids[:, 1:])) == kept
    assert any(name.endswith("bias") for name in network.state_dict()) is bias


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(1200)
def test_each_program_computes_on_a_gpu_what_it_computes_on_a_cpu(options, monkeypatch):
    tiny = {"dim": 32, "layers": 2, "heads": 2, "ffn_dim": 64, "length": 32, "micro": 4, "accumulation": 1, "lr": 1e-3, "weight_decay": 0.1}
    tiny |= {"beta2": 0.99, "warmup": 0.5, "min_ratio": 0.0, "workers": 1, "format": "fp32", "compile": False}
    ours = ["data.sequence_length=32", "model={dim: 32, layers: 2, heads: 2, ffn_dim: 64}", "batch={sequences: 4, micro_sequences: 4}"]
    tries = {
        "pretrain": {"tiny": {"warmup": 0.5, "overrides": [*ours, "precision.compute=fp32"]}},
        "HF Trainer": {"tiny": {**tiny, "model": "llama"}},
        "nanoGPT's loop": {"tiny": tiny},
    }
    monkeypatch.setattr(quality, "all_settings", lambda format, device: tries)
    text = quality.prepare_text(options)
    for program in tries:
        cpu, gpu = (quality._run(program, "tiny", 6, 0, Contest(text, "fp32", device)).loss for device in ("cpu", "cuda"))
        assert gpu == pytest.approx(cpu, rel=1e-5), program


@pytest.mark.slow
@pytest.mark.timeout(1200)  # each is compiled, and starts three times
def test_each_program_learns_the_text_in_its_time(options, monkeypatch):
    monkeypatch.setattr(quality, "QUIET", math.inf)  # other tests run beside this one
    options = dataclasses.replace(options, scale=0.05)
    fast = any(flag in PROCESSORS for flag in ("avx512_bf16", "amx_bf16"))  # else a step in bf16 takes as long as twenty in fp32
    contest = Contest(quality.prepare_text(options), "bf16" if fast else "fp32", "cpu")
    for program, tries in contest.settings.items():
        case = (program, next(iter(tries)))
        pace = quality.paces([case], contest, options, 1)[case]
        found = quality.train(*case, 0.5, 1, pace.steps(0.5), contest)
        assert 1.0 < found.bits_per_byte < 3.0 and found.steps >= quality.FEW["cpu"], found
        assert found.seconds * (1 - found.others) < 45, found  # what the machine had left for it
