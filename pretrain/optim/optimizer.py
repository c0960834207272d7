"""The optimizer, and which parameters it decays."""

from __future__ import annotations

import torch
from torch import nn

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
    """AdamW over two groups, decayed and not. Call after the model is placed: sharding replaces parameters."""
    decays = decayed(model)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for n, p in named.items() if decays[n]], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named.items() if not decays[n]], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=tuple(config.betas), eps=config.eps, fused=True
    )
