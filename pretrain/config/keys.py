"""How a key of the configuration is declared: default, documentation, legal range."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def key(default: Any, help: str, *, ge=None, gt=None, le=None, lt=None, only=None) -> Any:
    """A configuration key: default value, one line of documentation with units, and its legal range.

    `only` names the single value that is legal today for a key whose other values are not built yet.
    """
    metadata = {"help": help, "ge": ge, "gt": gt, "le": le, "lt": lt, "only": only}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type) -> Any:
    """A nested section with that dataclass's own defaults; its docstring is its documentation."""
    return field(default_factory=kind, metadata={"help": kind.__doc__})
