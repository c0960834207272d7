"""pretrain: language-model pretraining whose parallelism is one line of configuration.

Importing this package is light: torch and everything heavier are imported by the parts that use them. So are the names below, when they are
first used.
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
