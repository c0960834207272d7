"""A run whose steps are profiled."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from running import losses, run_main, state_of, train

from pretrain.observe.metrics import read_metrics
from pretrain.observe.profile_time import GROUPS, STEP

SHORT = ("run.steps=3", "schedule={name: constant, warmup_steps: 0}")
DDP, PROFILE = "parallel.strategy=ddp", "log.profile=[2]"


def cells(page: str, name: str) -> list[float]:
    """The numbers of a row."""
    row = re.search(rf"^\| {name} \|(.*)\|$", page, re.MULTILINE)
    return [float(cell.strip().rstrip("%")) for cell in row.group(1).split("|")]


def spans_of(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_a_profiled_step_leaves_traces_and_a_page_and_computes_the_same(pool, config_file):
    plain = train(pool, 2, config_file, *SHORT, DDP)
    run = train(pool, 2, config_file, *SHORT, DDP, PROFILE, "run.name=profiled")
    assert losses(run) == losses(plain)
    states = state_of(run, 3), state_of(plain, 3)
    assert all(states[0][name].equal(states[1][name]) for name in states[1])
    assert not (plain / "profile").exists()
    traces = [f"step-00000002.rank-{rank}.trace.json.gz" for rank in range(2)]
    assert sorted(path.name for path in (run / "profile").iterdir()) == ["step-00000002.md", *traces]
    page = (run / "profile" / "step-00000002.md").read_text()
    whole = float(re.search(r"^([\d.]+) ms", page, re.MULTILINE).group(1))
    parts = {group: cells(page, group) for group in GROUPS}
    assert sum(ms for ms, _ in parts.values()) == pytest.approx(whole, abs=0.05 + 0.005 * len(GROUPS))  # the page's rounding
    assert sum(share for _, share in parts.values()) == pytest.approx(100, abs=0.05 * len(GROUPS))
    assert all(ms >= 0 for ms, _ in parts.values())
    assert min(parts[name][0] for name in ("matrix products", "attention", "norms", "loss", "optimizer", "communication")) > 0
    record = read_metrics(run)[1]
    assert whole / 1e3 <= record["seconds"] + 1e-3  # which has the profiler's start and end as well
    for rank, trace in enumerate(traces):
        spans = spans_of(run / "profile" / trace)
        assert any(span["name"] == "gloo:all_reduce" for span in spans), rank
        [step] = [span for span in spans if span["name"] == STEP]
        if rank == 0:
            assert step["dur"] / 1e3 + parts["waiting for data"][0] == pytest.approx(whole, abs=0.1)
    state, weights = states[0], [t.nbytes for name, t in states[0].items() if name.startswith("model.")]
    assert cells(page, "weights")[0] == cells(page, "gradients")[0] == round(sum(weights) / 1e6, 1)
    assert cells(page, "optimizer state")[0] == pytest.approx(
        sum(t.nbytes for t in state.values()) / 1e6 - sum(weights) / 1e6, abs=0.06
    )


def test_gradients_of_earlier_micro_steps_are_no_activations(pool, config_file):
    """Also in the first step. With `grad_sync: last`, FSDP2 keeps whole sums until the last micro-step. torch's DDP would make a second set of gradients beside its buckets."""

    def memory(strategy: str, step: int = 2) -> dict[str, float]:
        asked = (f"parallel.strategy={strategy}", *["parallel.grad_sync=last"][: strategy != "single"], f"run.name={strategy}{step}")
        run = train(pool, 1 if strategy == "single" else 2, config_file, *SHORT, f"log.profile=[{step}]", "batch.micro_sequences=1", "model.ffn_dim=2048", *asked)
        page = (run / "profile" / f"step-0000000{step}.md").read_text()
        return {name: cells(page, name)[0] for name in ("weights", "gradients", "activations and temporary tensors")}

    single, ddp, fsdp = (memory(strategy) for strategy in ("single", "ddp", "fsdp"))
    whole = single["weights"]
    assert single["gradients"] == ddp["gradients"] == whole > 1.5
    assert ddp["activations and temporary tensors"] == pytest.approx(single["activations and temporary tensors"], rel=0.15)
    first, ddp_first = memory("single", 1), memory("ddp", 1)
    assert ddp_first["activations and temporary tensors"] == pytest.approx(first["activations and temporary tensors"], rel=0.15)
    assert whole * 0.9 <= fsdp["gradients"] <= whole * 1.05  # at the peak some are reduced already


def test_the_mean_of_the_weights_is_state_and_time_of_the_optimizer(pool, config_file):
    run = train(pool, 1, config_file, *SHORT, PROFILE, "optim={name: adafactor, ema_decay: 0.9}")
    page, state = (run / "profile" / "step-00000002.md").read_text(), state_of(run, 3)
    sizes = {kind: sum(t.nbytes for name, t in state.items() if name.startswith(kind)) / 1e6 for kind in ("model.", "optim.ema.")}
    assert sizes["optim.ema."] == sizes["model."] > 0.1
    assert cells(page, "optimizer state")[0] == pytest.approx(sum(t.nbytes for t in state.values()) / 1e6 - sizes["model."], abs=0.06)
    [mean] = [s for s in spans_of(run / "profile" / "step-00000002.rank-0.trace.json.gz") if s["name"] == "Optimizer.step#mean of weights"]
    assert mean["dur"] / 1e3 <= cells(page, "optimizer")[0]


def test_a_profile_that_cannot_be_written_is_a_warning_and_one_beyond_the_run_an_error(pool, config_file):
    run = config_file.parent / "runs" / "run"
    run.mkdir(parents=True)
    (run / "profile").write_text("a file, where a folder has to be")
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *SHORT, PROFILE)
    assert code == 0 and f"the profile of step 2 cannot be written: {run / 'profile'}: File exists; the run goes on" in printed
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *SHORT, "log.profile=[4]")
    assert code == 2 and "log.profile=[4]: step 4 is beyond run.steps=3" in printed
