"""Gradient clipping by global norm: one function for every layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their global 2-norm is at most `max_norm` (0: leave them); return the norm before.

    Gradients are grouped by device mesh, since torch adds norms within one mesh only; plain tensors are whole on every rank.
    The result is a plain fp32 scalar on the gradients' device, equal on all ranks (Pascanu et al., arXiv 1211.5063).
    """
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            groups.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(parameter)
    norms = []
    for group in groups.values():
        norm = get_total_norm([p.grad for p in group], foreach=True)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))
    if max_norm > 0:
        for group in groups.values():
            clip_grads_with_norm_(group, max_norm, total, foreach=True)
    return total
