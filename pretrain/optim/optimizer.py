"""The optimizer, and which parameters it decays."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pretrain.config.schema import Optim
from pretrain.models.layers import Embedding


def decayed(model: nn.Module) -> dict[str, bool]:
    """Whether weight decay applies to each parameter that is trained: to matrices, not to norms and biases (vectors) nor embeddings."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, (Embedding, nn.Embedding))}
    return {
        # The biases of all experts together are a matrix.
        name: p.dim() > 1 and id(p) not in tables and not name.endswith("bias")
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def build_optimizer(model: nn.Module, config: Optim) -> torch.optim.Optimizer:
    """AdamW over groups, decayed and not. Call after the model is placed: sharding replaces parameters."""
    decays = decayed(model)
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # sharded and whole tensors cannot share a group: a fused update takes one kind
            groups.setdefault((decays[name], isinstance(parameter, DTensor)), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": list(p), "weight_decay": config.weight_decay if decay else 0.0} for (decay, _), p in groups.items()],
        lr=config.lr,
        betas=tuple(config.betas),
        eps=config.eps,
        fused=True,
    )
