"""Times and bytes of hand-made traces, as torch.profiler writes them."""

from __future__ import annotations

from typing import Any

import pytest

from pretrain.observe.profile_page import Held, page, usage_of
from pretrain.observe.profile_time import GRADIENTS, GROUPS, STEP, group_of

NOTHING = Held(0, 0, [], 1, False)


def span(name: str, start: float, end: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": named}


def allocation(at: float, size: int, address: int, device: int = 0) -> dict[str, Any]:
    return {"ph": "i", "name": "[memory]", "ts": at, "args": {"Bytes": size, "Addr": address, "Device Type": device}}


def milliseconds(usage) -> dict[str, float]:
    return {name: pytest.approx(seconds * 1e3) for name, seconds in usage.groups.items() if seconds}


def test_a_moment_on_a_cpu_belongs_to_the_innermost_operator():
    node = "autograd::engine::evaluate_function: "
    events = [
        span(STEP, 1000, 21_000, "user_annotation"),
        span("aten::linear", 2000, 6000), span("aten::addmm", 3000, 5000), span("aten::copy_", 5000, 5500),
        span("_RMSNorm", 6000, 8000, Sequence_number=4), span("aten::mul", 6500, 7500, Sequence_number=4),
        span("aten::add", 8000, 9000, Sequence_number=5),
        span(f"{node}MulBackward0", 9000, 10_000, Sequence_number=4), span("MulBackward0", 9100, 9900, Sequence_number=4),  # of the norm
        span("aten::mul", 9200, 9800),
        span(f"{node}AddBackward0", 10_000, 11_000, Sequence_number=5), span("aten::sum", 10_500, 11_000),
        span("Optimizer.step#AdamW.step", 12_000, 14_000, "user_annotation"), span("aten::mm", 12_500, 13_000),
        span("gloo:all_reduce", 13_000, 17_000, tid=1), span("c10d::allreduce_", 14_000, 14_500),
        span("gloo:recv", 1500, 12_100, tid=3),  # posted early: no gap between operators ends with it
        span("aten::mm", 500, 900), span("aten::mm", 4000, 5000, tid=2),  # before the step, and another thread
    ]  # fmt: skip
    usage = usage_of(events, 0.004, NOTHING)
    assert usage.seconds == pytest.approx(0.024) and sum(usage.groups.values()) == pytest.approx(usage.seconds)
    assert milliseconds(usage) == {
        "matrix products": 3.5, "casts and copies": 0.5, "norms": 3.0, "optimizer": 2.0, "other operators": 1.5, "communication": 3.0,
        "waiting for data": 4.0, "host": 6.5,
    }  # fmt: skip
    assert usage.collectives == pytest.approx(0.0146)  # most of them behind other work
    assert usage.operators["aten::addmm", "matrix products"] == (pytest.approx(0.002), 1)
    assert usage.operators["MulBackward0", "norms"] == (pytest.approx(0.0004), 1)
    text = page(7, "a.json.gz", usage)
    assert "| norms | 3.00 | 12.5% |" in text and "| `aten::mm` | optimizer | 1 | 0.50 | 2.1% |" in text
    assert [line.split(" | ")[0] for line in text.splitlines()[8:19]] == [f"| {group}" for group in GROUPS]


def test_a_moment_on_a_gpu_belongs_to_a_kernel_and_to_a_collective_only_where_nothing_else_runs():
    events = [
        span(STEP, 0, 10_000, "user_annotation"),
        span("aten::rms_norm", 100, 200, External_id=1), span("aten::mm", 300, 400, External_id=2),
        span("vectorized_elementwise_kernel", 1000, 2000, "kernel", tid=7, External_id=1),
        span("nvjet_tst_128x256", 2000, 5000, "kernel", tid=7, External_id=2),
        span("ncclDevKernel_ReduceScatter", 4000, 6000, "kernel", tid=9),
        span("Memcpy HtoD", 5500, 6500, "gpu_memcpy", tid=8),
        span("triton_poi_fused_mul_0", 7000, 8000, "kernel", tid=7),
    ]  # fmt: skip
    usage = usage_of(events, 0.0, Held(0, 0, [], 0, True))
    assert milliseconds(usage) == {
        "norms": 1.0, "matrix products": 3.0, "communication": 0.5, "casts and copies": 1.0, "other operators": 1.0, "host": 3.5,
    }  # fmt: skip
    assert usage.collectives == pytest.approx(0.002)


def test_gradients_and_activations_are_told_apart_at_the_peak():
    events = [
        span(STEP, 0, 100, "user_annotation"),
        allocation(10, 400, 1), allocation(20, 300, 2), allocation(25, 7, 3, device=1),
        allocation(30, 100, 4), allocation(40, -400, 1), allocation(50, 150, 5),
        span(f"{GRADIENTS}0", 55, 56, "user_annotation"), allocation(60, -300, 2), allocation(70, -150, 5),
    ]  # fmt: skip
    gradients = {4: 100, 5: 150, 6: 11}  # before the peak, after it, and in a buffer that was there before
    usage = usage_of(events, 0.0, Held(1000, 2000, [gradients], 5000, False))
    assert usage.memory == {
        "weights": 1000, "gradients": 111, "optimizer state": 2000, "activations and temporary tensors": 700, "other": 1189,
    }  # fmt: skip
    assert sum(usage.memory.values()) == 5000
    assert "in use" not in page(1, "a.json.gz", usage)


def test_gradients_of_a_micro_step_count_while_they_live_also_if_their_address_is_used_before_and_after():
    """Sums that the last micro-step adds to, and gives back before the optimizer's step."""
    events = [
        span(STEP, 0, 100, "user_annotation"),
        allocation(5, 60, 4), allocation(8, -60, 4),  # an activation, where a gradient will be
        allocation(10, 40, 4), span(f"{GRADIENTS}0", 12, 13, "user_annotation"),
        allocation(20, 500, 1), allocation(30, -500, 1),  # the peak
        allocation(40, -40, 4), allocation(50, 20, 4), span(f"{GRADIENTS}1", 60, 61, "user_annotation"),
    ]  # fmt: skip
    usage = usage_of(events, 0.0, Held(0, 0, [{4: 40}, {4: 20}], 1000, False))
    assert usage.memory == {
        "weights": 0, "gradients": 40, "optimizer state": 0, "activations and temporary tensors": 500, "other": 460,
    }  # fmt: skip


def test_parts_of_the_memory_that_add_up_to_more_than_was_used_are_said_to_do_so():
    events = [span(STEP, 0, 100, "user_annotation"), allocation(10, 4_000_000, 1)]
    usage = usage_of(events, 0.0, Held(1_000_000, 2_000_000, [], 5_500_000, False))
    assert sum(usage.memory.values()) == 7_000_000
    assert "At most 5.5 MB were in use." in page(1, "a.json.gz", usage)


@pytest.mark.parametrize(
    "name, group",
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("flash_fwd_kernel", "attention"),
        ("aten::bmm", "attention"),
        ("aten::log_softmax", "loss"),
        ("_FusedLossesBackward", "loss"),
        ("aten::_softmax", "attention"),
        ("aten::mm", "matrix products"),
        ("aten::_grouped_mm", "matrix products"),
        ("sm90_xmma_gemm_bf16", "matrix products"),
        ("aten::mul", None),
        ("aten::embedding", None),
        ("_RMSNormBackward", "norms"),
        ("aten::silu_backward", "activations"),
        ("FSDP::all_gather (layers.1)", "communication"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::_to_copy", "casts and copies"),
        ("aten::_foreach_norm", "optimizer"),
    ],
)
def test_an_operator_is_known_by_its_name(name, group):
    assert group_of(name) == group
