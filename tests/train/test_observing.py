"""What a run says of itself while it trains: numbers that mean what docs/metrics.md says, and that it can go on without."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import re
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from documentation.model_tables import metrics_page
from running import run_main, run_main_with, some_slow, tool, train, write_prepared

from pretrain.data.shards.writer import ShardWriter
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.observe.metrics import METRICS_FILE, StepRecord, read_metrics

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("run.steps=4", "schedule={name: constant, warmup_steps: 0}")
DDP = "parallel.strategy=ddp"


# ---- what observes a run does not end it --------------------------------------------------------------------------------


def test_a_run_whose_status_and_metrics_cannot_be_written_trains_to_its_end(pool, config_file):
    """T-D6: it ended a healthy run with tracebacks on every rank."""
    run = config_file.parent / "runs" / "run"
    for name in ("status.json", METRICS_FILE, "logs"):  # none of them can be a file here
        (run / name / "in the way").mkdir(parents=True)
    (run / "logs" / "rank-0.log").mkdir()
    (run / "tensorboard").write_text("a file, where a folder has to be")
    results = pool.launch(2, run_main, str(config_file), *SHORT, DDP, "log.tensorboard=true")
    assert [code for code, _ in results] == [0, 0], results
    printed = results[0][1]
    assert "Traceback" not in printed + results[1][1] and "finished at step 4" in printed
    assert f"{run / METRICS_FILE}: cannot be written: Is a directory; the run goes on" in printed
    assert f"{run / METRICS_FILE}: could not be written to the end; lines that were lost: 4" in printed
    assert f"{run / 'status.json'}: cannot be written: Is a directory; the run goes on" in printed
    assert f"{run / 'tensorboard'}: could not be written to the end; lines that were lost: 5" in printed
    assert "the log of rank 0 cannot be opened" in printed
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000004"]
    assert not [p for p in run.iterdir() if p.name.startswith(".status.json")]


def test_a_log_of_metrics_that_is_damaged_or_cannot_be_read_does_not_keep_a_run_from_going_on(pool, config_file):
    """F4: one odd line in it was a traceback on rank 0 at each start; what only observes a run warns at most."""
    run = train(pool, 1, config_file, *SHORT)
    with (run / METRICS_FILE).open("ab") as file:
        file.write(b'\xff\xfe{"step": 4}\nnull\n{}\n5\n{"step": "4"}\n{"step": null}\n')
    train(pool, 2, config_file, *SHORT, "run.steps=6", DDP)
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4, 5, 6]
    (run / METRICS_FILE).unlink()
    (run / METRICS_FILE).mkdir()
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *SHORT, "run.steps=7")
    assert code == 0 and f"{run / METRICS_FILE}: cannot be read: Is a directory; the run goes on" in printed


def with_a_full_disk(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run whose metrics find no room in steps 2 and 3; of the second line a part is written."""
    from pretrain.observe import sinks

    append = sinks.append_line

    def failing(path, text):
        step = json.loads(text)["step"]
        if step == 3:
            with path.open("a") as file:
                file.write(text[:20])
        if step in (2, 3):
            raise OSError(28, "No space left on device", str(path))
        append(path, text)

    return run_main_with(sinks, "append_line", failing, config_file, *overrides)


def test_metrics_go_on_when_there_is_room_again_and_say_what_was_lost(pool, config_file):
    """T-D6: what was lost is counted and said."""
    [(code, printed)] = pool.launch(1, with_a_full_disk, str(config_file), *SHORT)
    run = config_file.parent / "runs" / "run"
    assert code == 0 and printed.count("cannot be written: No space left on device; the run goes on") == 1
    assert f"{run / METRICS_FILE}: is written again; lines that were lost: 2" in printed
    assert [record["step"] for record in read_metrics(run)] == [1, 4]


def with_a_record_that_cannot_be_written(config_file: str, *overrides: str) -> tuple[int, str]:
    from pretrain.train import run_directory

    def failing(path, text):
        raise OSError(28, "No space left on device", str(path))

    return run_main_with(run_directory, "append_line", failing, config_file, *overrides)


def test_what_a_run_needs_stops_it_in_one_line_on_all_ranks(pool, config_file):
    """T-D6: the record of a start is needed, for nobody could say later what the steps were computed with."""
    for code, printed in pool.launch(2, with_a_record_that_cannot_be_written, str(config_file), *SHORT, DDP):
        line = next(line for line in printed.splitlines() if line.startswith("error: "))
        assert code == 1 and "rank 0: " in line and "starts.jsonl: No space left on device" in line
        assert "Traceback" not in printed


def test_a_running_status_can_be_told_from_a_dead_one(pool, config_file):
    """T-D6: after SIGKILL the status said "running" for ever; it had no time, process or host."""
    import calendar
    import os
    import socket

    before = time.time()
    run = train(pool, 1, config_file, *SHORT)
    status = json.loads((run / "status.json").read_text())
    assert status.keys() == {"state", "step", "reason", "checkpoint", "started", "updated", "device_seconds", "host", "pid"}
    assert status["host"] == socket.gethostname() and status["pid"] != os.getpid()
    started, updated = (calendar.timegm(time.strptime(status[n], "%Y-%m-%dT%H:%M:%SZ")) for n in ("started", "updated"))
    assert before - 1 <= started <= updated <= time.time()


# ---- speed --------------------------------------------------------------------------------------------------------------


def with_slow_validation(config_file: str, *overrides: str) -> tuple[int, str]:
    from pretrain.train.validation import Evaluation

    def slow(self, source, poll):
        time.sleep(0.5)
        return 1.0

    return run_main_with(Evaluation, "_validate", slow, config_file, *overrides)


def test_throughput_and_time_left_count_validation_and_the_step_alone_is_apart(pool, config_file, prepared):
    """T-D11: validation and saving were in none of the numbers: 0.5 s were logged of 26 s."""
    validating = (f"data.validation=[{{path: {prepared}, name: v}}]", "validation.every_steps=1", "run.steps=5")
    began = time.monotonic()
    [(code, printed)] = pool.launch(1, with_slow_validation, str(config_file), *validating)
    elapsed = time.monotonic() - began
    records = read_metrics(config_file.parent / "runs" / "run")
    assert code == 0 and len(records) == 5
    assert 5 * 0.5 <= sum(r["seconds"] for r in records) <= elapsed
    for record in records:
        assert record["seconds"] >= 0.5 + record["step_seconds"] * 0.99
        assert record["tokens_per_second"] == pytest.approx(512 / record["seconds"])
        assert record["step_tokens_per_second"] == pytest.approx(512 / record["step_seconds"])
        assert 0 <= record["data_wait"] < 0.5
    lines = [line for line in printed.splitlines() if line.startswith("step 3/5")]
    minutes = re.search(r"eta (\d+)s", lines[0])
    assert int(minutes[1]) >= 1  # two steps of more than half a second


def with_a_slow_reader(config_file: str, *overrides: str) -> tuple[int, str]:
    import os

    from pretrain.data.training_data import Loader

    read = Loader.read

    def slow(self, consumed):
        time.sleep(2.0 * (os.environ["RANK"] == "1"))  # far longer than a step that is made while the next batch is read
        return read(self, consumed)

    return run_main_with(Loader, "read", slow, config_file, *overrides)


def test_a_reader_that_is_slow_on_another_rank_is_waited_for(pool, config_file):
    """The main rank's own batch was there at once, and its wait for the others was in no number."""
    short = ("run.steps=3", "schedule.warmup_steps=1", "data.workers=1", DDP)
    assert [code for code, _ in pool.launch(2, with_a_slow_reader, str(config_file), *short)] == [0, 0]
    for record in read_metrics(config_file.parent / "runs" / "run"):
        assert 0.5 < record["data_wait"] * record["seconds"] < record["seconds"]


def test_the_speed_of_a_window_is_that_of_the_wall_clock(monkeypatch):
    """T-D11: seconds, tokens per second and time left, by a clock that is set by hand."""
    from pretrain.observe import metrics

    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock.now)
    window = metrics.SpeedClock()
    for took, before in ((60.0, 2.0), (4.0, 1.0)):
        clock.now += took + before
        window.add(took, before, 1000)
        clock.now += 3.0  # saving
    speed = window.take()
    assert speed == pytest.approx(
        {
            "seconds": 73 / 2,
            "tokens_per_second": 2000 / 73,
            "step_seconds": 32.0,
            "step_tokens_per_second": 2000 / 64,
            "data_wait": 3 / 73,
        }
    )
    assert window.timed_steps == 1 and window.left(10) == pytest.approx(10 * 11.0)  # without the first step, which compiles: 3 + 1 + 4 + 3 seconds
    clock.now += 5.0
    window.add(5.0, 0.0, 1000)
    assert window.take()["seconds"] == 5.0 and window.left(10 / window.timed_steps) == pytest.approx(10 * 16.0 / 2)


def by_the_samples(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run on a clock by which each sample takes a second, and nothing else takes time."""
    from pretrain.observe import metrics
    from pretrain.train.trainer import Trainer

    clock, taken = SimpleNamespace(now=100.0), Trainer.step

    def step(self, batch, *of_all):
        clock.now += batch.sequences + 1000 * (self.progress.step == 0)  # the first step compiles
        return taken(self, batch, *of_all)

    with patch.object(metrics, "time", SimpleNamespace(monotonic=lambda: clock.now)), patch.object(Trainer, "step", step):
        return run_main(config_file, *overrides)


def test_the_time_left_knows_of_larger_batches_to_come(pool, config_file):
    """It was the time per step so far times the steps to come: too little by the factor that a ramp still has to grow by."""
    ramp = ("run.steps=8", "log.every_steps=1", "batch={sequences: 12, micro_sequences: 4, ramp: [{until_tokens: 384, sequences: 4}]}")
    code, printed = pool.launch(1, by_the_samples, str(config_file), *ramp)[0]
    assert code == 0, printed
    left = [record["seconds_left"] for record in read_metrics(config_file.parent / "runs" / "run")]
    assert left[1:] == pytest.approx([64, 60, 48, 36, 24, 12, 0])  # three steps take 4 samples each, five take 12


# ---- the loss -----------------------------------------------------------------------------------------------------------

EXPERTS = "model.experts={{count: 4, active: 2, ffn_dim: 16, balance_loss: {0}, router_z_loss: {0}}}"
# What is minimised beside the cross-entropy, and the same network without it.
EXTRAS = {
    "z-loss and smoothing": (["loss.z_loss=0.1", "loss.label_smoothing=0.2"], []),
    "tokens further ahead": (["model.predict_ahead=1"], []),
    "balanced experts": (
        ["model.family=custom", EXPERTS.format(2.0)],
        ["model.family=custom", EXPERTS.format(0.0)],
    ),
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("layout", [pytest.param((1,), marks=pytest.mark.slow), (2, "parallel.strategy=fsdp")])
def test_the_loss_is_the_cross_entropy_whatever_is_minimised_beside_it(pool, config_file, extra, layout):
    """T-D12: with z-loss the logged loss jumped from 8.3 to 15.2; it compared with no validation loss and no other program's."""
    ranks, *options = layout
    (more, plain), one_step = EXTRAS[extra], ("run.steps=1", "schedule.warmup_steps=0")
    record = read_metrics(train(pool, ranks, config_file, *more, *one_step, *options))[0]
    before = read_metrics(train(pool, 1, config_file, "run.name=plain", *plain, *one_step))[0]
    assert record["loss"] == pytest.approx(before["loss"], rel=1e-6) and "objective" not in before
    assert record["objective"] > record["loss"] + 0.3
    if "router_loss" in record:
        assert record["objective"] - record["loss"] == pytest.approx(record["router_loss"], rel=1e-5)


def test_asking_for_the_cross_entropy_changes_no_bit_of_a_gradient(pool, config_file):
    """T-D12: loss and objective come from one pass."""
    import torch

    from pretrain.models.loss import LossOptions
    from pretrain.models.output_head import OutputHead

    torch.manual_seed(0)
    x, weight = torch.randn(3, 20, 16), torch.randn(50, 16)
    targets = torch.randint(50, (3, 20))
    targets[1, 5:9] = -100
    weights = torch.tensor([1.0, 0.5, 2.0])
    for options in (LossOptions(), LossOptions(z_loss=0.1, label_smoothing=0.2, soft_cap=5.0, chunk_bytes=4000)):
        found = []
        for asked in (False, True):
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            losses = OutputHead(16, 50, options, tied=True)(leaves[0], targets, leaves[1], weights, with_cross_entropy=asked)
            ((losses.objective_B if asked else losses).sum() * 0.3).backward()
            found.append([leaf.grad for leaf in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*found))
        entropies = losses.cross_entropy_B
        logits = x.double() @ weight.double().T
        if options.soft_cap:
            logits = options.soft_cap * torch.tanh(logits / options.soft_cap)
        plain = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1)
        assert torch.allclose(entropies.double(), plain, rtol=1e-6) and not entropies.requires_grad


def test_the_validation_loss_in_bits_per_byte_is_that_of_the_whole_text(pool, config_file, byte_tokenizer, tmp_path):
    """It compares runs with other tokenizers: nats per token do not."""
    text = tmp_path / "text.jsonl"
    lines = [f"line {number}: äöü and so on, over and over" for number in range(100)]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    prepared = str(tmp_path / "text")
    assert tool("prepare_data").main(["--input", str(text), "--tokenizer", str(byte_tokenizer), "--output", prepared]) == 0
    everything = (
        f"data.validation=[{{path: {prepared}, name: v}}]",
        "validation.sequences=0",
        "run.steps=1",
        "schedule.warmup_steps=0",
    )
    (record,) = read_metrics(train(pool, 1, config_file, *everything))
    size = len("".join(lines).encode())
    assert record["bits_per_byte"]["v"] == pytest.approx(record["validation"]["v"] * (size + 100) / math.log(2) / size)


# ---- documentation ------------------------------------------------------------------------------------------------------


def names_in(run: Path) -> set[str]:
    return {name for record in read_metrics(run) for name in record}


def test_every_number_of_the_record_is_logged_when_its_description_says_so(
    pool, config_file, prepared, byte_tokenizer, tmp_path
):
    """T-D12: a table of every logged number; docs/metrics.md has it from the fields of `StepRecord`."""
    other = write_prepared(tmp_path / "other", byte_tokenizer, seed=3, documents=60)
    mixture = f"data.sources=[{{path: {prepared}, name: a}}, {{path: {other}, name: b}}]"
    everything = (
        *EXTRAS["balanced experts"][0],
        mixture,
        "optim.ema_decay=0.9",
        f"data.validation=[{{path: {prepared}, name: v}}]",
        "validation={prompts: [abc], prompt_tokens: 3}",
        "log={layers_every_steps: 2, device_hour_price: 2.5, tensorboard: false, every_steps: 1}",
        *SHORT,
    )
    found = names_in(train(pool, 1, config_file, *everything))
    elsewhere = {
        "translation": "test_pair_runs.py",
        "skipped": "test_bad_steps.py",
        "evaluation": "test_extending.py",
        "bits_per_byte": "above",
        "pipeline_wait": "test_equivalence.py",
        "compiled": "test_continuation.py",
        "communication": "test_profile.py",
        "watts": "test_energy.py",
        "joules_per_token": "test_energy.py",
    }
    on_gpus = {"mfu"}
    known_where_counters_are = {"watts", "joules_per_token"}
    assert found - known_where_counters_are == {field.name for field in fields(StepRecord)} - set(elsewhere) - on_gpus
    page = ROOT / "docs" / "metrics.md"
    assert metrics_page(page) == page.read_text(encoding="utf-8"), "run: python tools/make_docs.py"


# ---- failures of one rank ------------------------------------------------------------------------------------------------


def out_of_memory_on_rank_1(kind: str, config_file: str, *overrides: str) -> tuple[int, str]:
    import os

    from pretrain.data.training_data import Loader

    read, calls = Loader.read, []
    error = {"MemoryError": MemoryError(), "RuntimeError": RuntimeError("pin_memory: cannot allocate")}[kind]

    def failing(self, consumed):
        calls.append(consumed)
        if os.environ["RANK"] == "1" and len(calls) == 3:
            raise error
        return read(self, consumed)

    return run_main_with(Loader, "read", failing, config_file, *overrides)


@pytest.mark.parametrize("kind", ["MemoryError", "RuntimeError"])
def test_a_batch_that_one_rank_cannot_make_ends_all_ranks_in_one_line(pool, config_file, kind):
    """T-D14: the rank died alone with a traceback, and the others waited for it."""
    for code, printed in pool.launch(2, out_of_memory_on_rank_1, kind, str(config_file), DDP):
        line = next(line for line in printed.splitlines() if line.startswith("error: "))
        assert code == 1 and f"rank 1: a batch could not be read: {kind}" in line and "Traceback" not in printed
    log = config_file.parent / "runs" / "run" / "logs" / "rank-1.log"
    assert "Traceback" in log.read_text() and kind in log.read_text()


def failing_export(config_file: str, *overrides: str) -> str:
    """The class of the error that a run ends with whose export check finds something."""
    from pretrain.config.load import load_config
    from pretrain.train import session

    check = SimpleNamespace(problem=lambda: "export check: no", finish=lambda *_: None, close=lambda: None)
    with patch.object(session, "start_export_check", lambda *arguments: check):
        try:
            with contextlib.ExitStack() as end:
                session.train(load_config(config_file, list(overrides))[0], end)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "trained"


def test_a_problem_of_the_export_is_none_of_the_data(pool, config_file):
    """T-D14: it was labelled DataError."""
    assert pool.launch(1, failing_export, str(config_file)) == ["ExportError: export check: no"]


# ---- the loss of each source --------------------------------------------------------------------------------------------


def write_monotone(path: Path, tokenizer: Path, documents: int) -> Path:
    """Prepared documents of one token alone: a model soon knows what comes next."""
    from pretrain.data.shards.writer import ShardWriter
    from pretrain.data.tokenizers.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    with ShardWriter.create(path, loaded, 25_000) as writer:
        for _ in range(documents):
            writer.add(np.append(np.full(199, 97), loaded.eod_id), np.array([200]))
    return path


@pytest.mark.parametrize("layout", some_slow(["one process", "DDP", "a pipeline"], ["DDP"]))
def test_each_source_has_its_own_training_loss(pool, config_file, prepared, byte_tokenizer, tmp_path, layout):
    easy = write_monotone(tmp_path / "easy", byte_tokenizer, 400)
    sources = f"data.sources=[{{name: easy, path: {easy}, weight: 1}}, {{name: hard, path: {prepared}, weight: 3}}]"
    options = ["run.steps=60", "schedule.warmup_steps=0", "log.every_steps=20", sources]
    options += {
        "one process": [],
        "DDP": [DDP],
        "a pipeline": ["parallel.strategy=fsdp", "parallel.pipeline=2"],
    }[layout]
    records = read_metrics(train(pool, 1 if layout == "one process" else 2, config_file, *options))
    first, last = records[0]["source_loss"], records[-1]["source_loss"]
    assert first.keys() == last.keys() == {"easy", "hard"}
    # Line 1 is of one step: its loss is the mean over the tokens of both, about a quarter of them easy.
    share = (records[0]["loss"] - first["hard"]) / (first["easy"] - first["hard"])
    assert 0.1 < share < 0.4
    assert last["easy"] < 1.7 < 2.2 < last["hard"]  # the letters of the hard one have 2.5 nats


def test_a_single_source_has_no_loss_beside_the_run_s(trained_run, config_file):
    assert "source_loss" not in read_metrics(trained_run(1, config_file, *SHORT))[-1]


# ---- time, energy, cost -------------------------------------------------------------------------------------------------


def test_device_hours_add_up_over_starts_and_steps_that_were_lost_do_not_count(pool, config_file):
    options = ("schedule={name: constant, warmup_steps: 0}", "checkpoint.every_steps=2", "log.device_hour_price=3600", DDP)
    run = train(pool, 2, config_file, *options, "run.steps=4")
    first = read_metrics(run)[-1]
    assert first["device_hours"] >= 2 * sum(record["step_seconds"] for record in read_metrics(run)) / 3600
    useful = 2 * sum(record["step_seconds"] for record in read_metrics(run))
    assert first["goodput"] * first["device_hours"] * 3600 == pytest.approx(useful, rel=1e-6)
    assert first["cost"] == pytest.approx(3600 * first["device_hours"])
    status = json.loads((run / "status.json").read_text())
    assert status["device_seconds"] >= 3600 * first["device_hours"]
    back = f"run.resume={run / 'checkpoints' / 'step-00000002'}"  # steps 3 and 4 are lost
    train(pool, 1, config_file, *options[:-1], "run.steps=6", back)
    records = read_metrics(run)
    last = records[-1]
    useful = 2 * sum(r["step_seconds"] for r in records[:2]) + sum(r["step_seconds"] for r in records[2:])
    assert last["goodput"] * last["device_hours"] * 3600 == pytest.approx(useful, rel=1e-6)
    assert 3600 * last["device_hours"] > status["device_seconds"] + sum(r["seconds"] for r in records[2:])


def with_counters(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run whose devices have used 5 J at each look."""
    from pretrain.observe import energy

    with patch.object(energy, "_counter_of", lambda device: itertools.count(0, 5).__next__):
        return run_main(config_file, *overrides)


def test_energy_is_that_of_all_devices_over_the_time_and_tokens_since_the_last_line(pool, config_file):
    assert [code for code, _ in pool.launch(2, with_counters, str(config_file), *SHORT, DDP)] == [0, 0]
    for record in read_metrics(config_file.parent / "runs" / "run"):
        assert record["joules_per_token"] == pytest.approx(10 / (16 * 32))
        assert record["watts"] == pytest.approx(10 / record["seconds"], rel=0.2)


# ---- what the model writes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", some_slow(["one process", "FSDP2", "a pipeline", "tensor ranks"], ["FSDP2", "tensor ranks"]))
def test_the_model_continues_prompts_as_generation_does(pool, config_file, byte_tokenizer, tmp_path, layout):
    """The reference is tools/generate.py with a cache, on the checkpoint."""
    easy = write_monotone(tmp_path / "easy", byte_tokenizer, 400)
    options = [
        "run.steps=20",
        "schedule.warmup_steps=0",
        f"data.sources=[{{path: {easy}}}]",
        f"data.validation=[{{path: {easy}, name: v}}]",
    ]
    options += [
        "validation={every_steps: 20, prompts: [aa, 'xyz'], prompt_tokens: 5}",
        "data.document_mask=true",
        "log.tensorboard=true",
    ]
    options += {
        "one process": [],
        "FSDP2": ["parallel.strategy=fsdp"],
        "a pipeline": ["parallel.strategy=fsdp", "parallel.pipeline=2"],
        "tensor ranks": ["parallel.strategy=fsdp", "parallel.tensor=2"],
    }[layout]
    run = train(pool, 1 if layout == "one process" else 2, config_file, *options)
    samples = read_metrics(run)[-1]["samples"]
    assert list(samples) == ["aa", "xyz"] and samples["aa"] == "aaaaa"
    words = ["--model", str(run), "--max-tokens", "5", "--greedy", "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert tool("generate").main([*words, "--prompt", "aa", "--prompt", "xyz"]) == 0
    assert [json.loads(line)["text"] for line in printed.getvalue().splitlines()] == list(samples.values())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert "samples/aa/text_summary" in board.Tags()["tensors"] and "_hparams_/session_start_info" in board.summary_metadata


def test_a_prompt_that_does_not_fit_is_refused_before_the_first_step(pool, config_file, prepared):
    prompts = "validation={prompts: [" + "a" * 30 + "], prompt_tokens: 3}"
    [(code, printed)] = pool.launch(1, run_main, str(config_file), f"data.validation=[{{path: {prepared}, name: v}}]", prompts)
    assert code == 2 and "validation.prompts.0 has 30 tokens, and" in printed and "Traceback" not in printed
    prompts = prompts.replace("a" * 30, "a").replace("3}", "32}")
    [(code, printed)] = pool.launch(1, run_main, str(config_file), f"data.validation=[{{path: {prepared}, name: v}}]", prompts)
    assert code == 2 and "validation.prompts.0 has 1 token, and" in printed


def test_a_prompt_that_the_tokenizer_refuses_is_named_by_check_and_by_generation(config_file, t5_tokenizer, tmp_path, capsys):
    """A check found the configuration valid, and the run ended when the model had been built; neither error said which prompt."""
    with ShardWriter.create(tmp_path / "t5", load_tokenizer(t5_tokenizer)) as writer:
        writer.add(np.tile([4, 5, 6, 7, 1], 200), np.full(200, 5))
    data = f"data={{sources: [{{path: {tmp_path / 't5'}}}], validation: [{{path: {tmp_path / 't5'}, name: v}}], sequence_length: 32}}"
    prompts = "validation={prompts: ['a b', 'c <pad>'], prompt_tokens: 3}"
    for more in (["--check"], []):
        code, printed = run_main(str(config_file), *more, data, prompts)
        assert code == 1 and printed.startswith("error: command line: validation.prompts.1: the text holds '<pad>'") and printed.count("\n") == 1
    assert not (config_file.parent / "runs").exists()
    code, printed = run_main(str(config_file), data, "run.steps=1", "schedule.warmup_steps=0")
    assert code == 0, printed
    words = ["--model", str(config_file.parent / "runs" / "run"), "--max-tokens", "2"]
    (tmp_path / "prompts").write_text("a\nb </s>\n")
    for prompt, place in ((["a", "</s>"], "prompt 2"), (None, f"{tmp_path / 'prompts'}:2")):
        given = [word for text in prompt for word in ("--prompt", text)] if prompt else ["--prompt-file", str(tmp_path / "prompts")]
        assert tool("generate").main([*words, *given]) == 1
        said = capsys.readouterr()
        assert said.out == "" and f"error: {place}: the text holds '</s>'" in said.err
