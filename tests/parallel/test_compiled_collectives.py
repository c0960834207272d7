"""Collectives in functions that torch's compiler compiles down to machine code, where the backend aot_eager has no say."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pretrain.parallel.collectives import gather


def gradients_of_a_masked_mean() -> list[float]:
    """By how much the compiled gradient differs from the plain one: a mean over what a gathered mask counts."""

    def mean(scores_BTE: torch.Tensor, counted_BT: torch.Tensor) -> torch.Tensor:
        whole_BTE, all_BT1 = gather(scores_BTE, dist.group.WORLD), gather(counted_BT, dist.group.WORLD)[..., None]
        counts_B = all_BT1.squeeze(-1).sum(1).clamp(min=1)
        return (whole_BTE * all_BT1).sum((1, 2)) / counts_B

    random = torch.Generator().manual_seed(dist.get_rank())
    scores_BTE, counted_BT = torch.rand(4, 24, 4, generator=random), torch.rand(4, 24, generator=random) > 0.1
    found = []
    for function in (mean, torch.compile(mean)):
        leaf = scores_BTE.clone().requires_grad_()
        function(leaf, counted_BT).square().sum().backward()
        found.append(leaf.grad)
    return [float((one - found[0]).norm() / found[0].norm()) for one in found]


def in_a_group() -> list[float]:
    dist.init_process_group("gloo")
    try:
        return gradients_of_a_masked_mean()
    finally:
        dist.destroy_process_group()


def test_a_gathered_mask_is_a_mask_in_a_compiled_backward_pass(pool):
    """Inductor of torch 2.13 kept it as integers and read these as Booleans: gradients of routers were wrong, in silence."""
    for plain, compiled in pool.launch(2, in_a_group):
        assert plain == 0 and compiled < 1e-6
