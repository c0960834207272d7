"""What the rest of the program knows of a model: any network that follows this is trained, sharded, saved and resumed alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from pretrain.config.model_schema import Model
from pretrain.config.schema import Loss
from pretrain.models.loss import Losses

Initial = tuple[float, float] | Callable[[int], Tensor]
"""Mean and standard deviation of normally distributed values (0: a constant); or what gives all values on the CPU, from a seed."""


@dataclass(frozen=True)
class Parts:
    """The modules that a strategy wraps: each in `embedding` and `blocks` by itself, those of `head` together.

    What is in none of them stays with the root. `blocks` are those whose activations are recomputed and that are compiled.
    """

    embedding: list[nn.Module]
    blocks: list[nn.Module]
    head: list[nn.Module]


class Network(Protocol):
    """A `torch.nn.Module` with these members. It is built on the meta device; buffers it has keep their values in `to_empty`."""

    recompute_blocks: bool
    """Whether the activations of blocks are recomputed in backward instead of stored."""

    def forward(self, *, with_cross_entropy: bool = False, **inputs: Tensor) -> Tensor | Losses:
        """The summed token losses of each sequence [B], fp32, of a micro-step's tensors, all of which have B rows.

        This is what is minimised. `with_cross_entropy`: return the cross-entropy of the targets alone beside it.
        """

    def parts(self) -> Parts:
        """The modules that strategies wrap."""

    def initial(self, name: str) -> Initial:
        """A parameter's initial values, by its name. They must not depend on a layout."""


def build_network(model: Model, loss: Loss | None = None) -> nn.Module:
    """The network of a complete `model` section, trained on a loss: cross-entropy alone by default. Build it on the meta device."""
    if model.family == "hf":
        from pretrain.models.hf_model import HfModel

        return HfModel(model, loss)
    if model.encoder_layers:
        from pretrain.models.encoder_decoder import EncoderDecoder

        return EncoderDecoder(model, loss)
    from pretrain.models.decoder import Decoder

    return Decoder(model, loss)
