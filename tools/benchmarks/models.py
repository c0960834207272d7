"""A model of a configuration file, for what is measured without data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.train.resolve import resolve


def resolved_model(file: Path, overrides: Sequence[str] = ()) -> Config:
    """The complete configuration. Raises ConfigError if the size of a vocabulary is left to the data."""
    config = resolve(load_config(file, list(overrides))[0])
    model, key = config.model, None
    if model.encoder.layers and not model.encoder.share_embedding and model.encoder.vocab_size is None:
        key = "model.encoder.vocab_size"
    if model.vocab_size is None:
        key = "model.vocab_size"
    if key is not None:
        raise ConfigError(f"{file}: {key} is left to the data, which is not read here; set it in a copy of the file")
    return config
