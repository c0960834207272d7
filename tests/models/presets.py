"""The files of configs/models/, each loaded once for all tests, and what was published of the models they are the shapes of."""

from __future__ import annotations

import functools
from pathlib import Path

from documentation import model_tables as show
from family_cases import collected

from pretrain.config.model_schema import Model

PRESETS = {path.stem: path for path in sorted((Path(__file__).resolve().parents[2] / "configs" / "models").glob("*.yaml"))}
PUBLISHED = collected("PUBLISHED")
COUNTS = collected("COUNTS") | {
    # google-t5, google (t5-v1_1 and flan-t5); test_t5.py has the shapes of T5
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
}


@functools.cache
def preset(name: str) -> Model:
    """The complete model of a preset."""
    return show.read_preset(PRESETS[name])


@functools.cache
def counted(name: str) -> tuple[Model, int]:
    """The same, and its parameters, for which the network is built (without weights)."""
    return preset(name), show.published_parameters(preset(name))
