"""The grid of ranks: where each stands, what is counted once, and the groups that are made."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.distributed.mesh import AXES, Mesh
from pretrain.distributed.ranks import Ranks, stages_of_a_sum

CPU = torch.device("cpu")
sizes_of_axes = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3]) for axis in AXES})


def meshes(sizes: dict[str, int]) -> list[Mesh]:
    world = math.prod(sizes.values())
    return [Mesh(sizes, Ranks(rank, rank, world, CPU)) for rank in range(world)]


@given(sizes_of_axes)
@settings(deadline=None)
def test_every_rank_has_a_place_of_its_own_and_each_sample_and_target_is_counted_once(sizes):
    all_ranks = meshes(sizes)
    places = {tuple(mesh.coordinates[axis] for axis in AXES) for mesh in all_ranks}
    assert len(places) == len(all_ranks)
    data_size = sizes["replicate"] * sizes["shard"]
    assert {mesh.data_size for mesh in all_ranks} == {data_size}
    counting = [mesh.data_rank for mesh in all_ranks if mesh.counts_samples]
    assert sorted(counting) == list(range(data_size))
    losses = [(mesh.data_rank, mesh.coordinates["context"]) for mesh in all_ranks if mesh.counts_losses]
    assert sorted(losses) == [(rank, part) for rank in range(data_size) for part in range(sizes["context"])]
    assert {mesh.coordinates["pipeline"] for mesh in all_ranks if mesh.counts_losses} == {sizes["pipeline"] - 1}


def test_neighbours_share_matrices_and_the_last_axis_runs_fastest():
    found = meshes({"replicate": 2, "shard": 2, "tensor": 2})
    assert [(mesh.data_rank, mesh.coordinates["tensor"]) for mesh in found] == [(n // 2, n % 2) for n in range(8)]


@pytest.mark.parametrize(
    ("sizes", "message"), [({"replicate": 2}, "another number of ranks than the 1"), ({"data": 1}, "not data")]
)
def test_a_mesh_that_cannot_be_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Mesh(sizes, Ranks(0, 0, 1, CPU))


@given(st.integers(1, 200) | st.just(1016))
@settings(deadline=None, max_examples=30)
def test_a_sum_in_two_stages_counts_every_rank_once_and_everywhere(world_size):
    """Ranks that share a group of a stage list the same members, or they would wait for each other for ever."""
    stages = [stages_of_a_sum(rank, world_size) for rank in range(world_size)]
    for first, second in stages:
        assert all(stages[rank][0] == first for rank in first) and all(stages[rank][1] == second for rank in second)
    members = [[rank for middle in second for rank in stages[middle][0]] for _, second in stages]
    assert all(sorted(counted) == list(range(world_size)) for counted in members)
    assert all(rank in first and rank in second for rank, (first, second) in enumerate(stages))


def test_a_sum_of_thousands_of_ranks_waits_for_few_messages():
    """A ring of n ranks passes 2 x (n - 1) messages on, one after the other."""
    assert [sum(2 * (len(group) - 1) for group in stages_of_a_sum(0, size)) for size in (64, 1016, 1024, 4096)] == [28, 266, 124, 252]


def sums_in_two_stages() -> tuple:
    from datetime import timedelta

    import torch.distributed as dist

    from pretrain.distributed.launcher import launched_ranks

    rank, local_rank, world = launched_ranks()
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    groups = [dist.new_group(members, use_local_synchronization=True) for members in stages_of_a_sum(rank, world)]
    ranks = Ranks(rank, local_rank, world, CPU, dist.group.WORLD, stages=tuple(groups))
    fractions = torch.tensor([1 / (3 + rank), 0.1])
    found = int(ranks.sum("numbers", torch.tensor(10**rank))), ranks.largest("numbers", rank), ranks.sum("fractions", fractions)
    dist.barrier()
    return found


def test_sums_in_two_stages_are_equal_in_every_bit_on_every_rank(pool):
    found = pool.launch(4, sums_in_two_stages)
    assert [(total, largest) for total, largest, _ in found] == [(1111, 3)] * 4
    assert all(torch.equal(fractions, found[0][2]) for _, _, fractions in found)
    torch.testing.assert_close(found[0][2], torch.tensor([1 / 3 + 1 / 4 + 1 / 5 + 1 / 6, 0.4]))


def sums_on_a_rank(sizes: dict[str, int]) -> tuple:
    """What this rank contributes is 10 to the power of its rank, so that the digits of a sum say who was counted."""
    from datetime import timedelta

    import torch.distributed as dist

    from pretrain.distributed.launcher import launched_ranks

    rank, local_rank, world = launched_ranks()
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = Mesh(sizes, Ranks(rank, local_rank, world, CPU, dist.group.WORLD))
    own = torch.tensor(10**rank)
    sums = int(mesh.sum_over_data("samples", own.clone())), int(mesh.add_over_loss(own.clone()))
    found = {axis: mesh.context_group if axis == "context" else mesh.device_mesh(axis) for axis in sizes if axis != "expert"}
    if "expert" in sizes:
        found |= {axis: mesh.expert_mesh(axis) for axis in ("expert_shard", "expert")}
    groups = {axis: group if axis == "context" else group.get_group() for axis, group in found.items()}
    groups = {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()}
    groups["gradients"] = dist.get_process_group_ranks(mesh.gradient_group() or dist.group.WORLD)
    dist.barrier()
    return sums, groups


def test_sums_over_ranks_count_every_sample_once_whatever_else_the_ranks_share(pool):
    found = pool.launch(4, sums_on_a_rank, {"shard": 2, "tensor": 2})
    assert [sums for sums, _ in found] == [(101, 101)] * 4
    assert [groups for _, groups in found] == [
        {
            "shard": [rank % 2, rank % 2 + 2],
            "tensor": [rank - rank % 2, rank - rank % 2 + 1],
            "gradients": [rank % 2, rank % 2 + 2],
        }
        for rank in range(4)
    ]
    found = pool.launch(4, sums_on_a_rank, {"context": 2, "tensor": 2})
    assert [sums for sums, _ in found] == [(1, 101)] * 4
    assert [groups["gradients"] for _, groups in found] == [groups["context"] for _, groups in found] == [[0, 2], [1, 3]] * 2
    found = pool.launch(4, sums_on_a_rank, {"pipeline": 2, "context": 2})
    assert [sums for sums, _ in found] == [(1, 1100)] * 4
    assert [groups["context"] for _, groups in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize(("sizes", "expert", "same"), [
    ({"shard": 4, "expert": 2}, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3]] * 2),
    ({"replicate": 2, "shard": 2, "expert": 2}, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0], [1], [2], [3]]),
    ({"shard": 2, "tensor": 2, "expert": 2}, [[0, 2], [1, 3]] * 2, [[0], [1], [2], [3]]),
    ({"shard": 2, "context": 2, "expert": 4}, [[0, 1, 2, 3]] * 4, [[0], [1], [2], [3]]),
])  # fmt: skip
def test_neighbours_among_the_ranks_that_share_weights_share_experts_and_nobody_counts_otherwise(pool, sizes, expert, same):
    """Replicas and tensor-parallel ranks are in other expert groups; samples are counted as without experts."""
    found = pool.launch(4, sums_on_a_rank, sizes)
    assert [groups["expert"] for _, groups in found] == expert
    assert [groups["expert_shard"] for _, groups in found] == same
    plain = pool.launch(4, sums_on_a_rank, {axis: size for axis, size in sizes.items() if axis != "expert"})
    assert [sums for sums, _ in found] == [sums for sums, _ in plain]


def norms_on_a_rank() -> tuple:
    """Norms of gradients that are sharded over two axes, by ours and from the whole tensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from pretrain.optim.optimizer import clip_gradients

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8, bias=False)
    parallelize_module(layer, mesh["tensor"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["shard"])
    layer(torch.arange(16.0).view(2, 8)).sum().backward()
    placed, whole = str(layer.weight.grad.placements), layer.weight.grad.full_tensor()
    ours = float(clip_gradients([layer.weight], 1.0))
    clipped = float(layer.weight.grad.full_tensor().norm())
    partial = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, (Partial(), Shard(0))))
    partial.grad = DTensor.from_local(torch.ones(4, 4), mesh, (Partial(), Shard(0)))
    try:
        clip_gradients([partial], 1.0)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    dist.barrier()
    return placed, ours, float(whole.norm()), clipped, refused


def test_gradients_sharded_over_two_axes_have_the_norm_of_the_whole_and_unknown_placements_are_refused(pool):
    """Before, `_StridedShard` passed for whole: 11.3 for 16, on every rank alike, and a Partial had the norm of its part."""
    for placed, ours, whole, clipped, refused in pool.launch(4, norms_on_a_rank):
        assert "_StridedShard" in placed
        assert ours == pytest.approx(whole, rel=1e-6)
        assert clipped == pytest.approx(1.0, rel=1e-5)
        assert "Partial" in refused and "does not follow from those of its parts" in refused
