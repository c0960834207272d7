"""When weights are gathered and how long they are kept: counted, watched, and without effect on any bit of a gradient."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from running import gradients, largest_gradient_difference, largest_relative_difference, losses, train

from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.observe.metrics import read_metrics
from pretrain.parallel.explain import kept_bytes
from pretrain.parallel.fsdp_gathers import groups_of, kept_parameters
from pretrain.train.plan import make_plan

BLOCKS = 2
FSDP = ("parallel.strategy=fsdp", "batch.micro_sequences=4")
TIED = "model.tie_embeddings=true"
KEPT = "parallel.reshard_after_forward="


def built(config_file: str, overrides: tuple[str, ...]):
    """A trainer after its first step, and that step's batch."""
    from pretrain.distributed import ranks as distributed
    from pretrain.train.run_directory import RunDirectory
    from pretrain.train.starting_point import StartingPoint
    from pretrain.train.trainer import Trainer

    config, _ = load_config(config_file, list(overrides))
    _, local_rank, world_size = distributed.launched_ranks()
    plan = make_plan(config, world_size, distributed.choose_device(config, local_rank))
    ranks = distributed.start(config, alone=False)
    trainer = Trainer(plan, ranks, RunDirectory(Path(config.run.dir) / "gathers"), StartingPoint())
    batch = trainer.loader.read(0)
    trainer.step(batch, config.batch.sequences * config.data.sequence_length)
    return trainer, batch


def count_gathers(config_file: str, *overrides: str) -> dict[int, int]:
    """All-gathers of a step, by the number of ranks in them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: Counter[int] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function._opname == "_allgather_base_":
                found[args[0].numel() // args[1].numel()] += 1
            return function(*args, **(kwargs or {}))

    trainer, batch = built(config_file, overrides)
    with Count():
        trainer.strategy.forward_backward(batch, 512)
    trainer.ranks.barrier("counted")
    return dict(found)


SEVERAL = "batch.micro_sequences=2"  # two micro-steps on four ranks, and four on two
# In a micro-step the embedding is gathered once, and the head; a tied table for each of its two uses. In backward, blocks as the mode says.
GATHERS = {
    "always": (("always",), {4: 1 + 2 * BLOCKS + 1}),
    "never": (("never",), {4: 1 + BLOCKS + 1}),
    "last block kept": (("last_block_kept",), {4: 1 + 2 * BLOCKS - 1 + 1}),
    "among 2 of 4": (("2",), {4: 1 + BLOCKS + 1, 2: BLOCKS}),
    "always, ahead": (("always", "parallel.prefetch=2"), {4: 1 + 2 * BLOCKS + 1}),
    "tied, always": (("always", TIED), {4: 2 + 2 * BLOCKS}),
    "tied, never, ahead": (("never", TIED, "parallel.prefetch=1"), {4: 1 + BLOCKS}),
    # What is kept is kept for later micro-steps too.
    "always, several": (("always", SEVERAL), {4: 2 * (1 + 2 * BLOCKS + 1)}),
    "never, several": (("never", SEVERAL), {4: 2 + BLOCKS + 1}),
    "tied, never, ahead, several": (("never", TIED, "parallel.prefetch=1", SEVERAL), {4: 1 + BLOCKS}),
}


@pytest.mark.parametrize("case", GATHERS)
def test_weights_are_gathered_as_often_as_the_mode_says(pool, config_file, case):
    (mode, *others), expected = GATHERS[case]
    for found in pool.launch(4, count_gathers, str(config_file), *FSDP, f"{KEPT}{mode}", *others):
        assert found == expected


@pytest.mark.parametrize("tied", [pytest.param((), marks=pytest.mark.slow), (TIED, "precision.compute=bf16")], ids=["", "tied, bf16"])
def test_no_way_of_gathering_changes_a_bit(pool, config_file, tied):
    few = (*FSDP, *tied, "run.steps=3", "schedule.warmup_steps=1", "log.gradients_at=[1, 3]", "batch.micro_sequences=2")
    ways = (("always",), ("never",), ("last_block_kept",), ("2", "parallel.prefetch=2"), ("always", "parallel.prefetch=1"))
    usual = None
    for number, (mode, *others) in enumerate(ways):
        run = train(pool, 4, config_file, f"run.name=run{number}", *few, f"{KEPT}{mode}", *others)
        found = losses(run), [gradients(run, step) for step in (1, 3)]
        usual = usual or found
        assert found[0] == usual[0]
        for ours, theirs in zip(found[1], usual[1]):
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def count_divisions(config_file: str, *overrides: str) -> int:
    """Numbers that a micro-step divides, in tensors of a matrix's size."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        divided = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function._opname in ("div", "div_") and args[0].numel() >= 64 * 64:
                self.divided += args[0].numel()
            return function(*args, **(kwargs or {}))

    trainer, batch = built(config_file, overrides)
    with Count() as count:
        trainer.strategy.forward_backward(batch, 512)
    trainer.ranks.barrier("counted")
    return count.divided


def test_gradients_of_one_rank_are_not_divided_by_one(pool, config_file):
    """By torch's code that is a copy of all of them, which took 0.9% of a step of 1B on an H200."""
    assert pool.launch(1, count_divisions, str(config_file), "parallel.strategy=fsdp", "parallel.shard=1") == [0]


def what_is_gathered(config_file: str, *overrides: str) -> dict[str, set[str]]:
    """The units whose weights are gathered, or on their way, while a block or the head computes."""
    trainer, batch = built(config_file, overrides)
    network = trainer.model
    names = {
        "table": network.embedding,
        **network.layers,
        **({} if network.config.tie_embeddings else {"head": network.output}),
    }
    found: dict[str, set[str]] = {}

    def record(moment: str) -> None:
        groups = {name: groups_of(module)[0] for name, module in names.items()}
        found[moment] = {name for name, group in groups.items() if group.is_unsharded or group._all_gather_result is not None}

    for name, block in network.layers.items():
        block.mlp.register_forward_pre_hook(lambda *_, name=name: record(f"forward {name}"))
        block.mlp.register_full_backward_hook(lambda *_, name=name: record(f"backward {name}"))
    network.output.register_forward_hook(lambda *_: record("head"))
    trainer.strategy.forward_backward(batch, 512)
    record("after")
    trainer.ranks.barrier("recorded")
    return found


def count_kept(config_file: str, later: bool, *overrides: str) -> int:
    """Numbers in the gathered matrices that this rank holds when the head has computed, but for the head's own. `later`: while the first block
    computes in the last micro-step.
    """
    trainer, batch = built(config_file, overrides)
    network, found = trainer.model, []

    def count(*_) -> None:
        units = [m for m in network.modules() if hasattr(m, "_get_fsdp_state") and (later or m is not network.output)]
        groups = {group for unit in units for group in groups_of(unit) if group.is_unsharded}  # the head and its norm have one
        # Without a copy they would be no memory.
        parts = [p._unsharded_param for group in groups for p in group.fsdp_params if _storage(p._unsharded_param) != _storage(p.sharded_param)]
        kept = [part for part in parts if later or part is not network.output.weight]
        found.append(sum(getattr(part, "_local_tensor", part).numel() for part in kept))

    (next(iter(network.layers.values())).mlp if later else network.output).register_forward_hook(count)
    trainer.strategy.forward_backward(batch, 512)
    trainer.ranks.barrier("counted")
    return found[-1]


def _storage(tensor: torch.Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


EXPERTS = ("model.family=custom", "model.experts={count: 4, active: 2, ffn_dim: 32}", "parallel.expert=2")


@pytest.mark.parametrize(
    "ranks, mode, others",
    [
        (2, "never", ()),
        (2, "never", EXPERTS),
        (2, "never", (TIED,)),
        (2, "last_block_kept", ()),
        (2, "never", (SEVERAL,)),
        (2, "never", (TIED, SEVERAL)),
        (1, "never", ("parallel.shard=1", "batch.micro_sequences=16")),
    ],
    ids=["", "experts", "tied", "last", "several", "tied, several", "one rank"],
)
def test_the_memory_that_is_announced_for_kept_weights_is_what_a_rank_keeps(pool, config_file, ranks, mode, others):
    overrides = (*FSDP, "batch.micro_sequences=8", f"{KEPT}{mode}", *others)
    config, _ = load_config(config_file, list(overrides))
    plan = make_plan(config, ranks, torch.device("cpu"))
    with torch.device("meta"):
        announced = kept_parameters(build_network(plan.config.model), mode, plan.layout.expert, for_later=SEVERAL in others)
    assert announced and pool.launch(ranks, count_kept, str(config_file), SEVERAL in others, *overrides) == [announced] * ranks
    assert kept_bytes(plan.config, plan.layout) == 4 * announced  # in fp32


def test_units_ahead_are_under_way_while_one_computes(pool, config_file):
    four = (*FSDP, "model.layers=4", "batch.micro_sequences=8")
    for count, expected in (
        (0, {"forward 1": "1", "backward 3": "32", "backward 2": "21", "backward 0": "0"}),
        (1, {"forward 1": "12", "backward 3": "32", "backward 2": "21", "backward 0": "0"}),
        (2, {"forward 1": "123", "backward 3": "321", "backward 2": "210", "backward 0": "0"}),
    ):
        for found in pool.launch(2, what_is_gathered, str(config_file), *four, f"parallel.prefetch={count}"):
            blocks = {moment: {unit for unit in found[moment] if unit != "head"} for moment in expected}
            assert blocks == {moment: set(units) for moment, units in expected.items()}
            assert found["head"] == {"head"} and found["after"] == set()


def test_a_tied_table_is_free_while_blocks_compute_and_comes_with_the_last_one(pool, config_file):
    four = (*FSDP, "model.layers=4", "batch.micro_sequences=8", TIED)
    for found in pool.launch(2, what_is_gathered, str(config_file), *four):
        assert found == {
            "forward 0": {"0"}, "forward 1": {"1"}, "forward 2": {"2"}, "forward 3": {"3", "table"}, "head": {"table"},
            "backward 3": {"3", "2"}, "backward 2": {"2", "1"}, "backward 1": {"1", "0"}, "backward 0": {"0"}, "after": set(),
        }  # fmt: skip


def test_weights_gathered_ahead_of_a_block_that_validation_leaves_out_are_not_used_later(pool, config_file, prepared):
    """The next step would compute with the weights of the step before."""
    few = (
        *FSDP, "batch.micro_sequences=8", "model.predict_ahead=1", "run.steps=3", "schedule.warmup_steps=1", "validation.every_steps=1",
        f"data.validation=[{{path: {prepared}, name: held_out}}]",
    )  # fmt: skip
    plain = train(pool, 2, config_file, "run.name=plain", *few)
    assert losses(train(pool, 2, config_file, "run.name=ahead", *few, "parallel.prefetch=1")) == losses(plain)


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["last_block_kept", "never"])
@pytest.mark.parametrize(
    "world_size, sizes", [(2, ()), (4, ("parallel.replicate=2", "parallel.shard=2"))], ids=["fsdp", "hsdp"]
)
def test_compiled_blocks_and_validation_in_between_compute_what_one_process_computes(
    pool, config_file, prepared, world_size, sizes, kept
):
    few = (
        TIED, "batch.micro_sequences=2", "run.steps=6", "log.gradients_at=[1]", "validation.every_steps=2",
        f"data.validation=[{{path: {prepared}, name: held_out}}]",
    )  # fmt: skip
    single = train(pool, 1, config_file, "run.name=single", *few)
    layout = ("parallel.strategy=fsdp", *sizes, f"{KEPT}{kept}", "parallel.prefetch=2", "parallel.compile=blocks")
    run = train(pool, world_size, config_file, "run.name=other", *few, *layout)
    assert largest_gradient_difference(gradients(run, 1), gradients(single, 1)) <= 5e-6
    assert largest_relative_difference(losses(run), losses(single)) <= 2e-6
    ours, theirs = (
        [record["validation"]["held_out"] for record in read_metrics(r) if record.get("validation")] for r in (run, single)
    )
    assert len(ours) == 3 and largest_relative_difference(ours, theirs) <= 2e-6


@pytest.mark.parametrize("number", [1, 3, 4])
def test_a_number_of_ranks_that_cannot_keep_parts_is_refused(config_file, number):

    with pytest.raises(ConfigError, match="reshard_after_forward"):
        config, _ = load_config(config_file, [*FSDP, f"{KEPT}{number}"])
        make_plan(config, 4, torch.device("cpu"))


def test_a_truth_value_is_answered_with_the_name_to_write():
    with pytest.raises(ConfigError, match="expected one of always, never, last_block_kept or int; false is written never"):
        load_config(None, [f"{KEPT}false"])
