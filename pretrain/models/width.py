"""Scaling with the width of a model (muP: Yang et al., arXiv 2203.03466, table 3, for Adam), so that small models are tuned for large ones.

With m = model.dim / optim.base_width:

    what                         initial values    learning rate    weight decay
    tables, vectors              x 1               x 1              x 1
    matrices of blocks           x 1 / sqrt(m)     x 1 / m          x m, so that it takes the same share of a weight per step
      updated by Muon            x 1 / sqrt(m)     x 1 / sqrt(m)    x sqrt(m), likewise
    output head, routers         x 1 / m           x 1 / m          x m

What a step changes of a matrix's outputs goes with the largest singular value of the update (Yang, Simon and Bernstein, arXiv 2310.17813). Where
elements have the same size at every width, that is about m times as much for Adam, whose updates are nearly of rank one, and sqrt(m) times for Muon,
whose singular values are equal. A router has as many outputs at every width, so that each gets m times as much from Muon, too.

All that a matrix reads must be m times as wide: the MLP, and the heads by their number. Their width stays, and with it the scale of attention.
No output is multiplied by a number, so that an export needs none.
"""

from __future__ import annotations

from enum import Enum

from torch import nn


class Kind(Enum):
    """How a parameter depends on the width: not at all in its inputs, in inputs and outputs, or in its inputs alone."""

    INPUT = "input"
    HIDDEN = "hidden"
    OUTPUT = "output"


def kind_of(name: str, dimensions: int) -> Kind:
    """The kind of a parameter in one of our networks, by its name."""
    if dimensions < 2 or name.endswith(("bias", "bias.table.weight")) or "embedding" in name:
        return Kind.INPUT
    return Kind.OUTPUT if name == "output.weight" or name.endswith("router.weight") else Kind.HIDDEN


def update_scale(kind: Kind, optimizer: str, share: float) -> float:
    """The factor of a parameter's learning rate. `share`: the base width as a share of the width, 1/m."""
    if kind is Kind.INPUT:
        return 1.0
    return share**0.5 if kind is Kind.HIDDEN and optimizer == "muon" else share


def initial_scales(network: nn.Module, base_width: int | None) -> dict[str, float]:
    """The factors of the parameters' initial values that are not one, by name."""
    if base_width is None:
        return {}
    share = base_width / network.config.dim
    factors = {Kind.HIDDEN: share**0.5, Kind.OUTPUT: share}
    kinds = {name: kind_of(name, p.dim()) for name, p in network.named_parameters()}
    return {name: factors[kind] for name, kind in kinds.items() if kind in factors}
