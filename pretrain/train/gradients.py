"""Gradients: write whole ones to disk, to compare layouts (tools/check_equivalence.py), and check that every weight has one."""

from __future__ import annotations

import logging
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pretrain.distributed.mesh import Mesh
from pretrain.errors import TrainingError


def write_gradients(directory: Path, step: int, model: nn.Module, mesh: Mesh) -> None:
    """gradients/step-N.safetensors with the full gradient of every parameter. All ranks call; the main rank writes.

    Raises TrainingError on all ranks if that fails, because the user asked for it.
    """
    # It warns that tensors that are sharded twice are gathered in two steps, as they are.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    own, keeps = {}, mesh.is_source("replicate", "shard", "context", "tensor")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            if keeps:  # each other rank of a host would fill its memory too
                own[name] = whole.detach().cpu().contiguous()
    path = directory / "gradients" / f"step-{step:08d}.safetensors"
    parts = [path.with_suffix(f".part-{stage}") for stage in range(1, mesh.sizes["pipeline"])]

    def save() -> None:
        if keeps:
            stage = mesh.coordinates["pipeline"]
            _write(parts[stage - 1] if stage else path, own)

    def join() -> None:
        others = [load_file(part) for part in parts]
        _write(path, {name: gradient for part in (*others, own) for name, gradient in part.items()})
        for part in parts:
            part.unlink()

    mesh.ranks.attempt("gradients of a step", save, TrainingError)
    if parts:  # a rank of a pipeline has the gradients of its layers
        mesh.ranks.on_main("gradients of all layers", join, TrainingError)


def _write(path: Path, gradients: dict[str, Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    try:
        save_file(gradients, path)
    except SafetensorError as error:
        raise TrainingError(f"{path}: the gradients of log.gradients_at cannot be written: {error}") from error


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
