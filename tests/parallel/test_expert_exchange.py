"""Rows travel to the ranks that hold their experts, whatever the routers choose: a rank may be sent all rows, or none."""

import pytest
import torch

from pretrain.config.schema import Config

CHOICES = {  # by rank, the experts of each token; ranks 0 and 1 hold experts 0-1 and 2-3
    "all rows go to one rank, and one of its experts has none": [[[0, 0]] * 5, [[0, 0]] * 2],
    "a rank has no token": [[[3, 0], [1, 2], [3, 2]], []],
    "no rank has a token": [[], []],
    "rows of an expert come from both ranks": [[[0, 3], [3, 1]], [[2, 3], [3, 0], [0, 1]]],
}


def results_and_gradients(chosen: list[list[list[int]]]) -> tuple[dict, dict]:
    """Those of this rank, which exchanges rows, and those of one process with the tokens of all ranks."""
    from pretrain.distributed import ranks as distributed
    from pretrain.distributed.mesh import Mesh
    from pretrain.models.experts import Experts, dispatch
    from pretrain.parallel.expert import ExpertAxis

    rank, _, world_size = distributed.launched_ranks()
    mesh = Mesh({"shard": world_size, "expert": world_size}, distributed.start(Config(), alone=False))
    generator = torch.Generator().manual_seed(0)
    sizes = [len(part) for part in chosen]
    x_ND = torch.randn(sum(sizes), 6, generator=generator, dtype=torch.float64)
    weights_NK = torch.rand(sum(sizes), 2, generator=generator, dtype=torch.float64)
    choice_NK = torch.tensor([token for part in chosen for token in part], dtype=torch.int64).view(-1, 2)
    values = {}
    found = []
    for together in (True, False):
        with torch.device("meta"):
            experts = Experts(4, 6, 8, "silu", gated=True, bias=True)
        if together:
            ExpertAxis(mesh).split(torch.nn.Sequential(experts))
        experts.to_empty(device="cpu").double()
        for name, parameter in experts.named_parameters():
            values.setdefault(name, torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            local = parameter.data.to_local() if together else parameter.data
            local.copy_(values[name][2 * rank : 2 * rank + 2] if together else values[name])
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) if together else slice(None)
        x = x_ND[own].clone().requires_grad_()
        y_ND = dispatch(experts, x, choice_NK[own], weights_NK[own])
        y_ND.square().sum().backward()
        gradients = {name: p.grad.full_tensor() if together else p.grad for name, p in experts.named_parameters()}
        own = slice(None) if together else slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        found.append({"y": y_ND.detach()[own], "x": x.grad[own], **gradients})
    distributed.stop()
    return tuple(found)


@pytest.mark.parametrize("name", CHOICES)
def test_whatever_is_chosen_rows_and_gradients_are_those_of_one_process(pool, name):
    for together, alone in pool.launch(2, results_and_gradients, CHOICES[name]):
        assert together.keys() == alone.keys() and len(alone) == 8
        for key, expected in alone.items():
            assert torch.allclose(together[key], expected, rtol=0, atol=1e-12), key
