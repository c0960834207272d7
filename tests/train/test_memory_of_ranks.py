"""What the estimate of memory finds for a rank that a process stands for is what real ranks hold: the same count, on the CPU with gloo."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import _disable_current_modes

from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.distributed.launcher import ranks_of_a_sample
from pretrain.distributed.ranks import start
from pretrain.distributed.shards import local
from pretrain.models import layers
from pretrain.models.attention_ways import ask_for_kernel
from pretrain.models.experts import Router
from pretrain.optim.optimizer import OptimizerSet
from pretrain.parallel import collectives
from pretrain.parallel.layout import plan_layout
from pretrain.parallel.stand_in import stand_in
from pretrain.train import memory_estimate
from pretrain.train.allocations import Allocations
from pretrain.train.memory_estimate import RankMemory, _placed, _Step, estimate_memory, measure_rank
from pretrain.train.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
LLAMA = "model={family: llama, dim: 128, layers: 2, heads: 4, kv_heads: 4, vocab_size: 128}"
MIXTRAL = "model={family: mixtral, dim: 128, layers: 2, heads: 4, kv_heads: 4, ffn_dim: 256, vocab_size: 128, experts: {count: 4, active: 2}}"
FSDP = "parallel.strategy=fsdp"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
reduce_scatter = getattr(dist, REDUCE_SCATTER)
exchange = dist.all_to_all_single


def given(ranks: int, *overrides: str, micro_steps: int = 2) -> Config:
    own = ["data.sequence_length=128", "batch.micro_sequences=2", "precision.compute=bf16", "run.device=cpu"]
    file, overrides = ROOT / "configs" / "models" / "llama-10m.yaml", [LLAMA, *own, *overrides]
    replicas = ranks // ranks_of_a_sample(load_config(file, overrides)[0])
    return load_config(file, [*overrides, f"batch.sequences={2 * micro_steps * replicas}"])[0]


def chosen_in_turns(router: Router, scores_BTE: torch.Tensor) -> torch.Tensor:
    """Experts with even loads."""
    places = torch.arange(scores_BTE[..., : router.config.active].numel(), device=scores_BTE.device)
    return (places % router.config.count).view(*scores_BTE.shape[:2], -1)


def of_an_optimizer(network: torch.nn.Module, config: Config) -> int:
    tensors = OptimizerSet(network, config.optim).tensors()
    return sum(local(value).nbytes for name, value in tensors.items() if not name.startswith("step."))


def reduce_scatter_uncounted(*arguments: object, **options: object) -> object:
    """Without what gloo itself makes for a moment, as NCCL does not."""
    with _disable_current_modes():
        return reduce_scatter(*arguments, **options)


def exchange_and_wait(*arguments: object, **options: object) -> object:
    """Until gloo's thread has let go of what it sent, which takes it a moment longer than the exchange. NCCL's streams hold nothing."""
    result = exchange(*arguments, **options)
    time.sleep(0.01)
    return result


def on_a_rank(config: Config, world_size: int) -> RankMemory:
    """What a real rank holds. It computes as on a GPU, where a CPU has code of its own."""
    config = resolve(config)
    ask_for_kernel("flash")
    try:
        with (
            patch("torch.compiler.is_compiling", lambda: True),
            patch.object(layers, "rms_norm", layers._RMSNorm.apply),
            patch.object(layers, "layer_norm", layers._LayerNorm.apply),
            patch.object(dist, REDUCE_SCATTER, reduce_scatter_uncounted),
            patch.object(collectives, "_reduce_scatter", reduce_scatter_uncounted),
            patch.object(dist, "all_to_all_single", exchange_and_wait),
            patch.object(Router, "_choose", chosen_in_turns),
            patch.object(memory_estimate, "_bytes_of_moments", of_an_optimizer),
        ):
            return measure_rank(config, plan_layout(config, world_size, 1, None), start(config, alone=False))
    finally:
        ask_for_kernel("auto")


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.skipif(version("torch") < "2.13", reason="FSDP2 of torch 2.11 does not start in ranks that pretend to be compiled")
@pytest.mark.parametrize(
    ("ranks", "overrides", "blocks"),
    [
        (2, ["parallel.tensor=2"], 0),
        (2, ["parallel.context=2"], 2 * 2 * 2),  # two states of random numbers for each of two stretches in each layer
        (2, [MIXTRAL, "parallel.expert=2"], 3),  # where rows of experts end, in the format of grouped products
        (2, ["parallel.pipeline=2"], 0),
        (2, [FSDP, "precision.fp8=tensorwise"], 0),
        slow(2, ["parallel.tensor=2", "precision.fp8=rowwise"], 0),
        slow(2, [FSDP], 0),
        slow(2, [FSDP, "parallel.reshard_after_forward=never"], 0),
        slow(2, [FSDP, "parallel.grad_sync=last"], 0),
        slow(2, [FSDP, "parallel.activation_checkpointing=full"], 0),
        slow(2, ["parallel.tensor=2", "model.tie_embeddings=true", "data.sequence_length=127", "model.vocab_size=130"], 0),
        slow(2, ["parallel.context=2", "parallel.context_method=ring"], 0),
        slow(4, [FSDP, "parallel.replicate=2"], 0),
        slow(4, ["parallel.tensor=2", "parallel.replicate=2"], 0),
        slow(4, ["parallel.tensor=2", "parallel.context=2"], 8),
        slow(4, [MIXTRAL, "parallel.tensor=2", "parallel.expert=2"], 4),
        slow(4, [MIXTRAL, "parallel.expert=2"], 3),
        slow(4, ["parallel.pipeline=2", "parallel.tensor=2"], 0),
        slow(2, ["parallel.pipeline=2", "model.layers=4", "parallel.pipeline_schedule=zero_bubble_v"], 0),
    ],
    ids=lambda value: " ".join(value).replace("parallel.", "").replace(MIXTRAL, "experts") if isinstance(value, list) else None,
)
def test_real_ranks_hold_what_is_found_without_them_to_the_byte(ranks, overrides, blocks, pool):
    """`blocks`: of 512 bytes, that kernels of a GPU make and those of a CPU do not."""
    config = given(ranks, *overrides, micro_steps=4 if "parallel.pipeline=2" in overrides else 2)
    stages = estimate_memory(config, ranks).stages
    wanted = [vars(stages[rank * len(stages) // ranks]) for rank in range(ranks)]
    for _ in range(3):  # on a busy machine a thread of gloo may hold a gathered tensor for longer, which only adds to activations
        held = pool.launch(ranks, on_a_rank, config, ranks)
        found = [vars(real) | {"activations": real.activations + 512 * blocks} for real in held]
        if found == wanted:
            break
        assert [values | {"activations": 0} for values in found] == [values | {"activations": 0} for values in wanted]
        assert all(values["activations"] >= least["activations"] for values, least in zip(found, wanted))
    assert found == wanted
    assert all(real.activations > 2**20 and real.weights > 2**18 for real in held)


@pytest.mark.parametrize("overrides", [["parallel.tensor=2"], [MIXTRAL, "parallel.expert=2"], slow([FSDP]), slow(["parallel.context=2"])])
def test_tensors_of_a_layout_are_counted_as_torchs_own_tracker_counts_them(overrides):
    config = resolve(given(2, *overrides))
    with stand_in(0, 2) as ranks:
        strategy, network = _placed(config, plan_layout(config, 2, 1, None), ranks)
        tracker, step, known = MemTracker(), _Step(config, 1), list(network.parameters())
        strategy.forward_backward(step, 1)
        network.zero_grad()
        tracker.track_external(network)
        with tracker:
            strategy.forward_backward(step, 1)
        network.zero_grad()
        with Allocations(known) as counted:
            strategy.forward_backward(step, 1)
    found = tracker.get_tracker_snapshot("peak")[torch.device("meta")]["Total"] - sum(local(parameter).nbytes for parameter in known)
    most = sum(counted.at_most().values())
    assert most == pytest.approx(found, abs=2**14) and most > 2**21
