"""Finds slips in a family's file when it is loaded. Its names must be those of our keys, and a field that is read twice must say what each key gets."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from pretrain.models.families.declare.typed_values import keys_of_model


def check_names(family: str, names: Iterable[str]) -> None:
    """Raise ValueError for a name that is no key of the model."""
    known = keys_of_model()
    if unknown := next((name for name in names if name not in known), None):
        near = difflib.get_close_matches(unknown, known, n=1, cutoff=0.5)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise ValueError(f"family {family}: {unknown} is no key of pretrain/config/model_schema.py{hint}")


def check_shared(family: str, fields: Sequence[Any], same: Any) -> None:
    """Raise ValueError where `fields`, each a `Field`, that are read twice do not say what each key gets. `same`: the `back` that says nothing."""
    shared: dict[str, list[Any]] = {}
    for item in fields:
        shared.setdefault(item.theirs, []).append(item)
    for theirs, items in shared.items():
        if len(items) > 1 and (any(item.back is same for item in items) or any(i.default != items[0].default for i in items)):
            raise ValueError(
                f"family {family}: {', '.join(item.ours for item in items)} all read {theirs}: give each of them the same default, "
                "and a `back` of its own"
            )
