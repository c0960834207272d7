"""Whole gradients on disk, so that layouts can be compared (tools/check_equivalence.py)."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.distributed.tensor import DTensor

from pretrain.distributed.ranks import Ranks


def write_gradients(directory: Path, step: int, model: nn.Module, ranks: Ranks) -> None:
    """gradients/step-N.safetensors with the full gradient of every parameter. All ranks call; the main rank writes."""
    whole = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        whole[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().cpu().contiguous()
    if ranks.is_main:
        from safetensors.torch import save_file

        (directory / "gradients").mkdir(exist_ok=True)
        save_file(whole, directory / "gradients" / f"step-{step:08d}.safetensors")
