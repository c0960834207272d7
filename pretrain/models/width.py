"""Scaling with the width of a model (muP: Yang et al., arXiv 2203.03466, table 3, for Adam), so that small models are tuned for large ones.

With m = model.dim / optim.base_width:

    what                         initial values    learning rate    weight decay
    tables, vectors              x 1               x 1              x 1
    matrices of blocks           x 1 / sqrt(m)     x 1 / m          x m, so that it takes the same share of a weight per step
      updated by Muon            x 1 / sqrt(m)     x 1 / sqrt(m)    x sqrt(m), likewise
    output head, routers         x 1 / m           x 1 / m          x m

The largest singular value of an update limits what a step can change of the matrix's outputs (Yang, Simon and Bernstein, arXiv 2310.17813). Let the
elements of updates have the same size at every width. Then it grows with m for Adam, whose updates are nearly of rank one, and with sqrt(m) for
Muon, whose singular values are equal. A router writes as many numbers at every width. With Muon, too, each of them changes m times as much.

Everything that a matrix of a block reads or writes must be m times as wide: the MLP, ranks of latent attention, and heads by their number. The width
of a head stays, and with it the scale of attention.
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
    if dimensions < 2 or name.endswith(("bias", "bias.table.weight", "filter")) or "embedding" in name:
        return Kind.INPUT
    return Kind.OUTPUT if name == "output.weight" or name.endswith(("router.weight", "shared_gate.weight")) else Kind.HIDDEN


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
