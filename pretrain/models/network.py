"""What the rest of the program knows of a model: any network that follows this is trained, sharded by DDP and FSDP2, saved and resumed alike.

Other axes, experts and statistics of layers know more of our own networks. `models/decoder.py` has all of it, and `models/hf/hf_model.py` nothing:
it is the one to begin from.

    pipeline            keep, hidden_like, flops_by_layer
    tensor, context     rows_at_hand, make_mask
    experts             routers, and their reports
    statistics          watch_layer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn

from pretrain.models.loss import Losses

Initial = tuple[float, float] | Callable[[int], Tensor]
"""Mean and standard deviation of normally distributed values (0: a constant); or what gives all values on the CPU, from a seed."""


@dataclass(frozen=True)
class Unit:
    """Modules that a strategy treats together: shards, gathers, recomputes or compiles them."""

    modules: list[nn.Module]
    role: Literal["first", "block", "last"]
    """Blocks are recomputed and compiled. What comes `first` embeds tokens; what comes `last` makes logits and losses."""
    reshard: bool = True
    """Whether gathered weights may be freed after forward. It is no use for the last unit, whose backward comes at once."""
    apart: bool = True
    """Whether its weights are its own. Weights that it shares with other units stay with the root."""
    lends_to: nn.Module | None = None
    """A module that is called after it with its table: a tied head. It has no weight of its own."""


class Network(Protocol):
    """A `torch.nn.Module` with these members. It is built on the meta device; buffers it has keep their values in `to_empty`.

    It reads as single-device code: no process group, no DTensor, no rank.
    """

    def forward(self, *, with_cross_entropy: bool = False, **inputs: Tensor) -> Tensor | Losses:
        """The summed token losses of each sequence [B], fp32, of a micro-step's tensors, all of which have B rows.

        This is what is minimised. `with_cross_entropy`: return the cross-entropy of the targets alone beside it.
        """

    def units(self) -> list[Unit]:
        """How the network may be cut, in the order of its forward. Parameters that are in no unit belong to the root."""

    def initial(self, name: str) -> Initial:
        """A parameter's initial values, by its name. They must not depend on a layout."""

    def matmul_parameters(self) -> int:
        """Parameters that a token is multiplied with, those of experts as far as they are active. For FLOP counts."""

    def flops_per_token(self, *lengths: float) -> int:
        """FLOPs of one forward and backward pass per token of sequences of a length.

        An encoder-decoder takes the mean lengths of sources and of targets, and counts per target token.
        """
