"""The host never waits for the device within a step, and steps that are settled one step late are the same steps."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from running import run_main, state_of
from test_bad_steps import EXPERTS, with_bad_steps
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pretrain.distributed.shards import local
from pretrain.observe.metrics import read_metrics

SPEED = {
    "tokens_per_second",
    "seconds",
    "step_tokens_per_second",
    "step_seconds",
    "data_wait",
    "seconds_left",
    "pipeline_wait",
    "device_hours",
    "goodput",
    "memory",
}
BALANCED = (
    "model.family=custom",
    "model.experts={count: 4, active: 2, ffn_dim: 16, correction: true, correction_rate: 0.01, scoring: sigmoid, balance_loss: 0.1, balance_scope: global_batch}",
)


def settled_late(kind: str, *arguments) -> tuple[int, str]:
    """A run whose steps are settled when the next one is queued, as on a GPU."""
    with patch("pretrain.train.trainer.runs_ahead", lambda device: True):
        return {"plain": run_main, "bad": with_bad_steps}[kind](*arguments)


def records(run: Path) -> list[dict]:
    return [{name: value for name, value in record.items() if name not in SPEED} for record in read_metrics(run)]


@pytest.mark.parametrize(
    "layout",
    [(1, *BALANCED), (2, "parallel.strategy=fsdp"), pytest.param((2, "parallel.strategy=fsdp", "parallel.pipeline=2"), marks=pytest.mark.slow)],
)  # fmt: skip
def test_steps_that_are_settled_late_are_the_same(pool, config_file, prepared, layout):
    ranks, *options = layout
    everything = (
        "run.steps=11", "checkpoint={every_steps: 5, keep_last: 0}", "validation.every_steps=4", f"data.validation=[{{path: {prepared}, name: v}}]",
        "log.every_steps=1", *options,
    )  # fmt: skip
    at_once = pool.launch(ranks, run_main, str(config_file), "run.name=once", *everything)
    late = pool.launch(ranks, settled_late, "plain", str(config_file), "run.name=late", *everything)
    assert [code for code, _ in (*at_once, *late)] == [0] * 2 * ranks, late
    one, other = (config_file.parent / "runs" / name for name in ("once", "late"))
    assert records(other) == records(one) and len(records(one)) == 11
    for step in (5, 10, 11):
        wanted = state_of(one, step)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in state_of(other, step).items())


def test_a_step_that_is_refused_is_noticed_one_step_later_and_nothing_of_it_stays(pool, config_file):
    steady = (
        "run.steps=8",
        "schedule={name: constant, warmup_steps: 0}",
        "checkpoint={every_steps: 8, keep_last: 0}",
        *EXPERTS,
    )
    [(code, printed)] = pool.launch(
        1, with_bad_steps, [3, 4], str(config_file), "run.name=once", *steady, "optim.skip_nonfinite=2"
    )
    assert code == 0, printed
    [(code, printed)] = pool.launch(
        1, settled_late, "bad", [3, 4], str(config_file), "run.name=late", *steady, "optim.skip_nonfinite=2"
    )
    assert code == 0 and "step 4: loss nan, gradient norm nan" in printed
    one, other = (config_file.parent / "runs" / name for name in ("once", "late"))
    assert records(other) == records(one) and records(one)[-1]["skipped"] == 2
    wanted = state_of(one, 8)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state_of(other, 8).items())
    [(code, printed)] = pool.launch(1, settled_late, "bad", [3], str(config_file), "run.name=ends", *steady)
    assert code != 0 and "error: step 3: loss nan, gradient norm nan" in printed and "the step was not taken" in printed
    ends = config_file.parent / "runs" / "ends"
    assert [record["step"] for record in read_metrics(ends)] == [1, 2]
    assert json.loads((ends / "status.json").read_text())["step"] == 3  # it was 4, which was queued when step 3 was found bad


def parts_of_reads(config_file: str) -> list[tuple[str, bool]]:
    """The part of the run in which each step's figures were read, and whether it counts as waiting for a device."""
    from pretrain.distributed.ranks import Ranks
    from pretrain.train.queued_step import Figures

    part, read, under_way, found = Ranks.part, Figures.read, [], []

    @contextlib.contextmanager
    def noted(ranks, name, device=False, **options):
        under_way.append((name, device))
        with part(ranks, name, device=device, **options):
            yield
        under_way.pop()

    def noting(figures):
        found.append(under_way[-1] if under_way else ("nothing", False))
        return read(figures)

    with patch.object(Ranks, "part", noted), patch.object(Figures, "read", noting):
        assert run_main(config_file, "run.steps=2")[0] == 0
    return found


def test_a_rank_that_waits_for_its_device_says_so(pool, config_file):
    """A GPU's host waits for a step's exchanges where it reads its figures. No part had a name there, so a step that hung was not explained."""
    [found] = pool.launch(1, parts_of_reads, str(config_file))
    assert found == [("figures of step 1", True), ("figures of step 2", True)]


def passes_of_a_validation(config_file: str, data: str) -> list[str]:
    """The order in which a validation of 12 samples, two in a pass, queues its passes and reads their losses."""
    from pretrain.parallel.strategy import Strategy

    evaluate, found = Strategy.evaluate, []

    class Queued(torch.Tensor):
        """Losses of which it is noted when the host reads them."""

        def cpu(self) -> torch.Tensor:
            found.append("read")
            return self.as_subclass(torch.Tensor)

    def noting(strategy, **inputs):
        found.append("queue")
        return evaluate(strategy, **inputs).as_subclass(Queued)

    chosen = "run.steps=1", "batch.micro_sequences=2", "validation.sequences=12", f"data.validation=[{{path: {data}}}]"
    with patch.object(Strategy, "evaluate", noting):
        code, printed = run_main(config_file, *chosen)
    assert code == 0, printed
    return found


def test_a_validation_reads_the_losses_of_a_pass_when_the_next_one_is_queued(pool, config_file, prepared):
    """The device had nothing to do while the host read the losses of each pass and the samples of the next one."""
    [found] = pool.launch(1, passes_of_a_validation, str(config_file), str(prepared))
    assert found == ["queue", *["queue", "read"] * 5, "read"]


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a GPU (numbers that are brought to Python, and sizes that depend on values), and collectives.

    `work`: operators that are called, bytes of new tensors, and FLOPs of matrix products.
    """

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.work: Counter[str] = Counter()
        self.collectives = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._opname
        if any(name.startswith(part) for part in self.WAITING):
            self.counts[name] += 1
        self.collectives += function.namespace in ("c10d", "_c10d_functional")
        made = function(*args, **(kwargs or {}))
        known = {storage_of(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        new = {storage_of(one) for one in tree_leaves(made) if isinstance(one, torch.Tensor)} - known
        product = flop_registry.get(function._overloadpacket)
        self.work += Counter(operators=1, bytes=sum(size for _, size in new), flops=product(*args, **(kwargs or {}), out_val=made) if product else 0)
        return made


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory begins (this rank's part), and its bytes."""
    storage = local(tensor).untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def counted(config_file: str, *overrides: str) -> tuple[list[dict], list[int], list[int], list[dict], str]:
    """What made the host wait from the end of a step to that of the next one, but for the reading of figures, in each step of a run; its
    collectives; how often the ranks agreed; and its `HostReads.work`.
    """
    from pretrain.distributed.ranks import Ranks
    from pretrain.train.trainer import Trainer

    taken, waits, collectives, agreements, works, calls = Trainer._advance, [], [], [], [], Counter()

    def advance(self, *of_all):
        reads, own_thread = HostReads(), threading.get_ident()
        with contextlib.ExitStack() as stack:
            for name in ("tolist", "numpy", "cpu"):
                whole = getattr(torch.Tensor, name)

                def reading(tensor, *args, _whole=whole, _name=name, **named):
                    reads.counts[_name] += threading.get_ident() == own_thread  # batches are read ahead by others
                    return _whole(tensor, *args, **named)

                stack.enter_context(patch.object(torch.Tensor, name, reading))
            settle = self.settle

            def settling(step):
                before = reads.counts.copy()
                record = settle(step)
                reads.counts = before  # the figures of the step before are here by now
                return record

            stack.enter_context(patch.object(self, "settle", settling))
            stack.enter_context(reads)
            found = taken(self, *of_all)
        waits.append({name: count for name, count in reads.counts.items() if count})
        collectives.append(reads.collectives)
        agreements.append(calls["agree"])
        works.append(dict(reads.work))
        return found

    def agreeing(whole):
        def call(*args, **named):
            calls["agree"] += 1
            return whole(*args, **named)

        return call

    with (
        patch.object(Trainer, "_advance", advance),
        patch.object(Ranks, "_reduce", agreeing(Ranks._reduce)),
        patch.object(Ranks, "gather", agreeing(Ranks.gather)),
    ):
        _, printed = settled_late("plain", config_file, *overrides)
    return waits, collectives, [b - a for a, b in zip(agreements, agreements[1:])], works, printed


# Operators of a step and bytes of its new tensors: eight micro-steps of one process, four of two.
WORK = {"single": (4316, 8_551_161), "experts": (9168, 16_508_409), "ddp": (2272, 4_277_913), "fsdp": (3124, 5_969_201)}


# Micro-steps of FSDP2 gather four units (embedding, two blocks, head), two of them again, and scatter four; once per step gradients of vectors are added.
@pytest.mark.parametrize(
    "name, ranks, exchanges, options",
    [
        pytest.param("single", 1, 0, ["parallel.strategy=single"], id="single"),
        pytest.param("experts", 1, 0, ["parallel.strategy=single", "precision.compute=bf16", *BALANCED], id="experts"),
        pytest.param("experts on 2", 2, 1 + 2, ["parallel.strategy=ddp", *BALANCED], id="experts-ddp"),
        pytest.param("ddp", 2, 1 + 1, ["parallel.strategy=ddp"], id="ddp"),
        pytest.param("fsdp", 2, 4 * 10 + 1 + 2, ["parallel.strategy=fsdp"], id="fsdp"),
        pytest.param("", 4, None, ["parallel={strategy: fsdp, replicate: 2, tensor: 2}"], id="hsdp-tensor", marks=pytest.mark.slow),
        pytest.param("", 4, None, ["parallel={strategy: fsdp, context: 2, pipeline: 2}"], id="context-pipeline", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_no_step_waits_for_the_device_or_does_more_than_it_must(pool, config_file, name, ranks, exchanges, options):
    """They stand for a GPU, for which the host waits whenever it reads a number. In a step it read two, and the ranks agreed twice.

    Collectives beside those of gradients and weights: one for the loss, one for the loads of experts, and under FSDP2 one for the norm. Nothing else noticed 200 MB that each
    step allocated, or another product in it.
    """
    run = (
        "run.steps=8",
        "schedule.warmup_steps=2",
        "checkpoint.every_steps=0",
        "optim.clip=0.5",
        "batch.micro_sequences=2",
        "log.every_steps=50",
        "precision.compute=fp32",
        *options,
    )
    for waits, collectives, agreements, works, printed in pool.launch(ranks, counted, str(config_file), *run):
        assert len(waits) == 8, printed
        # The first step creates the optimizer's state; its line is written behind the second, and that of the last behind the last.
        assert len(set(collectives[2:-1])) == 1 and exchanges in (None, collectives[2]), collectives
        # On a CPU no grouped kernel takes the loads of experts: two layers read them three times in each micro-step.
        assert waits[2:-1] == [{"tolist": 2 * 3 * 8 // ranks} if "experts" in name else {}] * 5
        assert agreements[2:6] == [1] * 4  # without the lines of the first and the last step
        assert works[2:-1] == works[2:3] * 5
        if name in WORK:
            operators, new_bytes = WORK[name]
            assert 0.975 * operators <= works[2]["operators"] <= 1.003 * operators  # 64 fewer under FSDP2 of torch 2.11
            assert works[2]["bytes"] == pytest.approx(new_bytes, rel=0.001)
        if "experts" not in name and exchanges is not None:
            attention, mlp, head = 2 * 32 * (32 + 16), 3 * 32 * 64, 32 * 257
            assert works[2]["flops"] == 6 * (2 * (attention + mlp) + head) * 16 * 32 / ranks
