"""What each layer of a model is, by the patterns and switches of its section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pretrain.config.model_schema import Model

MaskKind = int | Literal["begins", "none"]


@dataclass(frozen=True)
class LayerSpec:
    """What one layer is. A block holds its own, so that it is the same layer wherever it is run."""

    mixer: Literal["attention", "latent", "gated_delta", "mamba2", "none"]
    """What mixes positions."""
    mlp: Literal["mlp", "experts", "none"]
    """The sublayer behind it: a plain MLP, or a mixture of experts in its place."""
    placement: Literal["pre", "post", "reordered", "sandwich"]
    """Where its sublayers are normed: see `Block`."""
    window: int
    """Positions that a position attends to, itself included; 0: all earlier ones."""
    rope: bool
    """Whether queries and keys are rotated."""

    @property
    def mask_kind(self) -> MaskKind:
        """What decides its mask: the window; for linear attention, which needs to know where documents begin, "begins"."""
        return "none" if self.mixer == "none" else "begins" if self.linear else self.window

    @property
    def experts(self) -> bool:
        """Whether it has a mixture of experts."""
        return self.mlp == "experts"

    @property
    def has_scores(self) -> bool:
        """Whether it has attention proper, whose queries meet keys."""
        return self.mixer in ("attention", "latent")

    @property
    def linear(self) -> bool:
        """Whether it has linear attention, of either kind."""
        return self.mixer in ("gated_delta", "mamba2")


def layer_specs(model: Model) -> list[LayerSpec]:
    """The layers of a complete model, in order; of an encoder-decoder those of the decoder."""
    patterns = (model.sublayers, model.attention.window_pattern, model.rope.pattern, model.linear_attention.pattern)
    own = model.linear_attention.norm_placement
    found = []
    for layer, (sublayers, window, rotated, linear) in enumerate(zip(*(cycled(each, model.layers) for each in patterns))):
        mixes, linear = sublayers != "mlp", linear and sublayers != "mlp"
        softmax = "latent" if model.latent.kv_rank else "attention"
        routed = model.experts.count > 0 and layer not in model.experts.dense_layers
        found.append(
            LayerSpec(
                mixer="none" if not mixes else model.linear_attention.kind if linear else softmax,
                mlp="none" if sublayers == "mixer" else "experts" if routed else "mlp",
                placement=own if linear and own != "same" else model.norm.placement,
                window=model.attention.window if window and mixes and not linear else 0,
                rope=model.positions == "rope" and rotated and mixes and not linear,
            )
        )
    return found


def has_windows(model: Model) -> list[bool]:
    """By layer, whether it has the sliding window."""
    return [layer.window > 0 for layer in layer_specs(model)]


def cycled(pattern: list[Any], layers: int) -> list[Any]:
    """A pattern repeated over so many layers."""
    return [pattern[layer % len(pattern)] for layer in range(layers)]


def shortest_period(values: list[Any]) -> list[Any]:
    """The shortest list that gives `values` when it is repeated, its last repetition perhaps cut short."""
    return next(values[:n] for n in range(1, len(values) + 1) if all(v == values[i % n] for i, v in enumerate(values)))
