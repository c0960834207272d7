"""The files of configs/models/, each loaded once for all tests."""

from __future__ import annotations

import functools
from pathlib import Path

from pretrain.config.model_schema import Model
from pretrain.models.show import preset_parameters

PRESETS = {path.stem: path for path in sorted((Path(__file__).resolve().parents[2] / "configs" / "models").glob("*.yaml"))}


@functools.cache
def preset(name: str) -> tuple[Model, int]:
    """The complete model of a preset, and its parameters."""
    return preset_parameters(PRESETS[name])
