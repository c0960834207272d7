"""Networks, as single-device code."""

from __future__ import annotations

import torch
from torch import nn

from pretrain.config.model_schema import Model
from pretrain.config.schema import Config, Loss


def build_network(model: Model, loss: Loss | None = None) -> nn.Module:
    """The network (`models/network.py`) of a complete `model` section, trained on a loss: cross-entropy alone by default.

    Build it on the meta device.
    """
    from pretrain.models.families import family_of

    return family_of(model.family).build(model, loss)


def network_without_values(config: Config) -> nn.Module:
    """The network of a complete configuration, on the meta device."""
    with torch.device("meta"):
        return build_network(config.model, config.loss)
