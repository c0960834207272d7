"""pretrain: language-model pretraining whose parallelism is one line of configuration.

Importing this package is light: the parts that use torch and other heavy libraries import them. The names below are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "open_model": "pretrain.huggingface.open_model",
    "generate": "pretrain.models.generate",
    "load_config": "pretrain.config.load",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
