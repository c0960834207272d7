"""What each layer of a model is, by the patterns and switches of its section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pretrain.config.model_schema import Model


@dataclass(frozen=True)
class LayerSpec:
    """What one layer is. A block holds its own, so that it is the same layer wherever it is run."""

    mixer: Literal["attention", "latent", "gated_delta", "mamba2"]
    placement: Literal["pre", "post", "reordered", "sandwich"]
    """Where its sublayers are normed: see `Block`."""
    window: int
    """Positions that a position attends to, itself included; 0: all earlier ones."""
    rope: bool
    """Whether queries and keys are rotated."""
    experts: bool
    """Whether a mixture of experts is in place of the MLP."""

    @property
    def mask_kind(self) -> int | None:
        """What decides its mask: the window, or None for linear attention, which needs to know where documents begin."""
        return None if self.linear else self.window

    @property
    def linear(self) -> bool:
        """Whether it has linear attention, of either kind."""
        return self.mixer in ("gated_delta", "mamba2")


def layer_specs(model: Model) -> list[LayerSpec]:
    """The layers of a complete model, in order; of an encoder-decoder those of the decoder."""
    windows = cycled(model.attention.window_pattern, model.layers)
    rotated = cycled(model.rope.pattern, model.layers)
    linear = cycled(model.linear_attention.pattern, model.layers)
    return [
        LayerSpec(
            mixer=model.linear_attention.kind if linear[layer] else "latent" if model.latent.kv_rank else "attention",
            placement=_placement(model) if linear[layer] else model.norm.placement,
            window=model.attention.window if windows[layer] and not linear[layer] else 0,
            rope=model.positions == "rope" and rotated[layer] and not linear[layer],
            experts=model.experts.count > 0 and layer not in model.experts.dense_layers,
        )
        for layer in range(model.layers)
    ]


def _placement(model: Model) -> Any:
    """Where layers with linear attention are normed."""
    own = model.linear_attention.norm_placement
    return model.norm.placement if own == "same" else own


def has_windows(model: Model) -> list[bool]:
    """By layer, whether it has the sliding window."""
    return [layer.window > 0 for layer in layer_specs(model)]


def cycled(pattern: list[Any], layers: int) -> list[Any]:
    """A pattern repeated over so many layers."""
    return [pattern[layer % len(pattern)] for layer in range(layers)]


def shortest_period(values: list[Any]) -> list[Any]:
    """The shortest list that gives `values` when it is repeated, its last repetition perhaps cut short."""
    return next(values[:n] for n in range(1, len(values) + 1) if all(v == values[i % n] for i, v in enumerate(values)))
