"""Gradients: write whole ones to disk, to compare layouts (tools/check_equivalence.py), and check that every weight has one."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import nn
from torch.distributed.tensor import DTensor

from pretrain.distributed.ranks import Ranks
from pretrain.errors import TrainingError


def write_gradients(directory: Path, step: int, model: nn.Module, ranks: Ranks) -> None:
    """gradients/step-N.safetensors with the full gradient of every parameter. All ranks call; the main rank writes.

    Raises TrainingError on all ranks if that fails, because the user asked for it.
    """
    # It warns that tensors that are sharded twice are gathered in two steps, as they are.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    whole = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        whole[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().cpu().contiguous()

    def save() -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = directory / "gradients" / f"step-{step:08d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        try:
            save_file(whole, path)
        except SafetensorError as error:
            raise TrainingError(f"{path}: the gradients of log.gradients_at cannot be written: {error}") from error

    ranks.on_main("gradients of a step", save, TrainingError)


def refuse_untrained(model: nn.Module, tokens: int) -> None:
    """Raise TrainingError naming a parameter without influence on a step's loss; `tokens`: the length of its sequences.

    Such models are transformers' own (`model.family: hf`). DeepSeek-V3.2's indexer picks positions and is trained by another loss, and
    DeepSeek-V4's compressors start at a length. DDP would wait for these gradients, and weight decay would shrink such weights.
    """
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        raise TrainingError(
            f"{missing[0]} gets no gradient on sequences of {tokens} tokens ({len(missing)} parameters in all), so it would not be trained, "
            "and weight decay would shrink it; use longer sequences if parts of the model begin at a length; otherwise this "
            "architecture cannot be trained on next tokens alone"
        )
