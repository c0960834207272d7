"""How often gradients travel: the number of collectives in the micro-steps of one optimizer step, in every mode."""

from collections import Counter
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

MICRO_STEPS = 4
SHARDED_UNITS = 4  # of a model of 2 blocks: embedding, the blocks, head
VECTORS = 1  # norms are whole on every rank, and their gradients are summed together, once per step


class CountCollectives(TorchDispatchMode):
    """Counts what reaches torch's collective operators, from Python or from DDP's reducer."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts[function._opname] += 1
        return function(*args, **(kwargs or {}))


def count_collectives(config_file: str, *overrides: str) -> dict[str, int]:
    """Collectives by kind during the forward and backward passes of the second step."""
    from pretrain.config.load import load_config
    from pretrain.distributed import ranks as distributed
    from pretrain.train.plan import make_plan
    from pretrain.train.run_directory import RunDirectory
    from pretrain.train.starting_point import StartingPoint
    from pretrain.train.trainer import Trainer

    config, _ = load_config(config_file, list(overrides))
    _, local_rank, world_size = distributed.launched_ranks()
    plan = make_plan(config, world_size, distributed.choose_device(config, local_rank))
    ranks = distributed.start(config, alone=plan.layout.strategy == "single")
    trainer = Trainer(plan, ranks, RunDirectory(Path(config.run.dir) / "collectives"), StartingPoint())
    batch = trainer.loader.read(0)
    tokens = config.batch.sequences * config.data.sequence_length
    trainer.step(batch, tokens)  # DDP lays its buckets out anew after the first step
    with CountCollectives() as mode:
        trainer.strategy.forward_backward(batch, tokens)
    ranks.barrier("counted")
    assert plan.layout.micro_steps == MICRO_STEPS
    return dict(mode.counts)


def gradient_collectives(counts: dict[str, int]) -> tuple[int, int]:
    """(reduce-scatters, all-reduces)."""
    return (
        sum(n for op, n in counts.items() if "reduce_scatter" in op),
        sum(n for op, n in counts.items() if "allreduce" in op or "all_reduce" in op),
    )


HSDP = ("parallel.replicate=2", "parallel.shard=2")
MODES = {
    # DDP: one all-reduce of its single bucket where gradients are synchronised at all.
    "ddp, auto": (2, ("parallel.strategy=ddp",), (0, 1)),
    "ddp, last": (2, ("parallel.strategy=ddp", "parallel.grad_sync=last"), (0, 1)),
    "ddp, every": (2, ("parallel.strategy=ddp", "parallel.grad_sync=every"), (0, MICRO_STEPS)),
    # FSDP: a reduce-scatter per unit, and one all-reduce for the vectors.
    "fsdp, auto": (2, ("parallel.strategy=fsdp",), (MICRO_STEPS * SHARDED_UNITS, VECTORS)),
    "fsdp, every": (2, ("parallel.strategy=fsdp", "parallel.grad_sync=every"), (MICRO_STEPS * SHARDED_UNITS, VECTORS)),
    "fsdp, last": (2, ("parallel.strategy=fsdp", "parallel.grad_sync=last"), (SHARDED_UNITS, VECTORS)),
    # HSDP: the sum over the sharding axis is scattered, then all-reduced over the replicating one.
    "hsdp, auto": (4, ("parallel.strategy=fsdp", *HSDP), (MICRO_STEPS * SHARDED_UNITS, SHARDED_UNITS + VECTORS)),
    "hsdp, every": (4, ("parallel.strategy=fsdp", "parallel.grad_sync=every", *HSDP), (MICRO_STEPS * SHARDED_UNITS, MICRO_STEPS * SHARDED_UNITS + VECTORS)),
    "hsdp, last": (4, ("parallel.strategy=fsdp", "parallel.grad_sync=last", *HSDP), (SHARDED_UNITS, SHARDED_UNITS + VECTORS)),
    "single": (1, (), (0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_gradients_travel_as_often_as_the_mode_says(pool, config_file, mode):
    world_size, overrides, expected = MODES[mode]
    micro = f"batch.micro_sequences={16 // MICRO_STEPS // world_size}"
    for counts in pool.launch(world_size, count_collectives, str(config_file), micro, *overrides):
        assert gradient_collectives(counts) == expected, counts


def test_positions_travel_as_often_as_the_layers_say(pool, config_file):
    """Each of the 2 blocks has 2 sublayers. Their input is gathered and their sum scattered; in backward it is the other way round."""
    sublayers, layout = 4, ("parallel.strategy=fsdp", "parallel.shard=1", "parallel.tensor=2", "batch.micro_sequences=4")
    table = head = 1  # the table scatters its rows, the head gathers what it gets
    losses = 1  # of the logits: partitions are gathered, and the logits of the targets summed
    for counts in pool.launch(2, count_collectives, str(config_file), *layout):
        assert counts == {
            "_allgather_base_": MICRO_STEPS * (2 * sublayers + table + head + losses),
            "_reduce_scatter_base_": MICRO_STEPS * (2 * sublayers + table + head),
            "allreduce_": MICRO_STEPS * losses + 1,  # gradients of what is whole on every rank, once per step
        }


def test_rows_travel_to_the_experts_instead_of_weights(pool, config_file):
    """Forward exchanges counts, rows and results in each of the 2 blocks; backward the gradients of results and rows.

    A rank holds its experts whole, so it gathers none, and all else travels as under FSDP2.
    """
    layers, experts = 2, ("model.family=custom", "model.experts={count: 4, active: 2, ffn_dim: 32}", "batch.micro_sequences=2")
    for counts in pool.launch(2, count_collectives, str(config_file), *experts, "parallel.strategy=fsdp", "parallel.expert=2"):
        assert counts.pop("alltoall_base_") == MICRO_STEPS * 5 * layers
        gathered_again = SHARDED_UNITS - 2  # the embedding is not used in backward, and the head is kept for it
        assert counts == {
            "_allgather_base_": MICRO_STEPS * (SHARDED_UNITS + gathered_again),
            "_reduce_scatter_base_": MICRO_STEPS * SHARDED_UNITS,
            "allreduce_": VECTORS,
        }


def test_keys_and_values_travel_once_per_layer(pool, config_file):
    """Forward gathers the keys and the values of each of the 2 blocks, and backward scatters their gradients. Weights are sharded as well."""
    layers, layout = 2, ("parallel.strategy=fsdp", "parallel.shard=1", "parallel.context=2", "batch.micro_sequences=4")
    for counts in pool.launch(2, count_collectives, str(config_file), *layout):
        gathered_again = SHARDED_UNITS - 2  # the embedding is not used in backward, and the head is kept for it
        assert counts == {
            "_allgather_base_": MICRO_STEPS * (2 * layers + SHARDED_UNITS + gathered_again),
            "_reduce_scatter_base_": MICRO_STEPS * (2 * layers + SHARDED_UNITS),
            "allreduce_": VECTORS,
        }


def test_a_ring_sends_keys_and_values_on_and_their_gradients_home(pool, config_file):
    """Forward sends one message less than there are ranks in each of the 2 blocks, and backward as many of keys and values and of their gradients."""
    layers, ranks = 2, 4
    ring = ("parallel.strategy=fsdp", f"parallel.context={ranks}", "parallel.context_method=ring", "batch.micro_sequences=4")
    for counts in pool.launch(ranks, count_collectives, str(config_file), *ring):
        assert counts["send"] == counts["recv_"] == MICRO_STEPS * layers * 3 * (ranks - 1)
        gathered_again = SHARDED_UNITS - 2  # the embedding is not used in backward, and the head is kept for it
        assert counts["_allgather_base_"] == MICRO_STEPS * (SHARDED_UNITS + gathered_again)  # of weights alone
