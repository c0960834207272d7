"""The state of a run as named tensors, the same names under every strategy (invariant 5), and nothing but tensors.

    model.<parameter>                 weights
    optim.<state>.<parameter>         optimizer state, e.g. optim.exp_avg.layers.0.mlp.up.weight
    rng.<rank>.cpu | cuda             torch's generators, per rank

Hyper-parameters are not here: they follow from the configuration and the step. Because every item is a tensor, reading a payload
never needs to unpickle an object.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pretrain.distributed.ranks import Ranks
from pretrain.optim.optimizer import OptimizerSet


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights, by name; sharing memory with the model."""
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def optimizer_tensors(optimizer: OptimizerSet) -> dict[str, Tensor]:
    """The optimizers' state by state and parameter name. The tensors share memory with the optimizers. Creates a state that does not exist yet."""
    return {f"optim.{name}": tensor for name, tensor in optimizer.tensors().items()}


@torch.no_grad()
def first_nonfinite(tensors: dict[str, Tensor]) -> str | None:
    """The first tensor of which this rank's part holds a value that is not finite; None where there is no such value.

    One pass over the values where they are: the 2-norm of a tensor is not finite where one of its values is not. Those of huge values
    overflow as well, so that suspects are looked at again. (The maximum norm, which cannot, is 50 times slower on a CPU.)
    """
    local = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    found: list[str] = []
    for device in {tensor.device for tensor in local.values()}:
        here = {n: t for n, t in local.items() if t.device == device and t.is_floating_point() and t.numel()}
        norms = torch._foreach_norm(list(here.values()), 2) if here else []
        finite = torch.stack([norm.double() for norm in norms]).isfinite().tolist() if norms else []
        found += [name for name, good in zip(here, finite) if not good and not here[name].isfinite().all()]
    return min(found, key=list(tensors).index, default=None)


def rng_tensors(ranks: Ranks) -> dict[str, Tensor]:
    """This rank's random generators. The rank is in the name: a payload keeps one of several plain tensors of one name."""
    tensors = {f"rng.{ranks.rank}.cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        tensors[f"rng.{ranks.rank}.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return tensors


def restore_rng(tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Set this rank's generators from `rng_tensors` that were read back."""
    for name, value in tensors.items():
        if name == f"rng.{ranks.rank}.cpu":
            torch.set_rng_state(value)
        elif name == f"rng.{ranks.rank}.cuda":
            torch.cuda.set_rng_state(value, ranks.device)
