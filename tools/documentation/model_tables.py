"""Tables within pages: docs/models.md from the families and the files of configs/models/, docs/metrics.md from `StepRecord`.

A table stands between the markers `<!-- NAME -->` and `<!-- /NAME -->`; the rest of the page is not changed.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch

from pretrain.config.load import load_config
from pretrain.config.model_schema import Model
from pretrain.models import build_network
from pretrain.models.families import complete, families
from pretrain.observe.metrics import StepRecord


def family_table() -> str:
    """Every family with its fixed switches and its defaults."""
    rows = ["| `model.family` | transformers | always | unless set |", "|---|---|---|---|"]
    for family in families():
        defaults = {name: value for name, value in family.defaults.items() if name not in family.fixed}
        rows.append(f"| `{family.name}` | `{family.architecture}` | {_switches(family.fixed)} | {_switches(defaults)} |")
    return "\n".join(rows)


def preset_table(presets: dict[str, tuple[Model, int]]) -> str:
    """Presets by name, each a complete model and its parameters."""
    rows = [
        "| preset | family | layers × dim | heads (key-value) | ffn | vocabulary | tied | longest | parameters |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (model, count) in sorted(presets.items(), key=lambda item: (item[1][0].family, item[1][1], item[0])):
        cells = [
            f"`{name}`",
            model.family,
            f"{f'{model.encoder.layers} + ' if model.encoder.layers else ''}{model.layers} × {model.dim}",
            f"{model.heads} ({model.kv_heads}) of {model.head_dim}",
            f"{model.ffn_dim:,}",
            f"{model.vocab_size:,}",
            "yes" if model.tie_embeddings else "no",
            f"{model.max_sequence_length:,}",
            f"{count:,}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def read_preset(path: Path) -> Model:
    """The complete model of a preset."""
    return complete(load_config(path)[0].model)


def published_parameters(model: Model) -> int:
    """Parameters by the count of their publishers: a tied head once, and without the corrections that balance experts."""
    with torch.device("meta"):
        return sum(p.numel() for p in build_network(model).parameters() if p.requires_grad)


def with_tables(page: str, tables: dict[str, str]) -> str:
    """The page with these tables between their markers. ValueError for a marker that is missing."""
    for name, table in tables.items():
        page, found = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda match, text=table: f"{match[1]}{text}\n{match[2]}",
            page,
            flags=re.DOTALL,
        )
        if found != 1:
            raise ValueError(f"the page has {found} places for the table {name}: expected one pair of markers")
    return page


def _switches(values: dict[str, Any]) -> str:
    return ", ".join(f"`{name}: {_shown(value)}`" for name, value in values.items()) or "–"


def _shown(value: Any) -> str:
    if callable(value):
        return "derived from the sizes"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_shown(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) and value < 1e-3 else str(value)


def model_page(page: Path, presets: Path) -> str:
    """docs/models.md with its tables made anew; `presets`: configs/models."""
    models = {path.stem: read_preset(path) for path in presets.glob("*.yaml")}
    counted = {name: (model, published_parameters(model)) for name, model in models.items()}
    tables = {"families": family_table(), "presets": preset_table(counted)}
    return with_tables(page.read_text(encoding="utf-8"), tables)


def metrics_page(page: Path) -> str:
    """docs/metrics.md with the table of a record's fields made anew."""
    rows = ["| name | what it is | unit | of | when |", "|---|---|---|---|---|"]
    for field in dataclasses.fields(StepRecord):
        rows.append(f"| `{field.name}` | {' | '.join(field.metadata[part] for part in ('meaning', 'unit', 'of', 'when'))} |")
    return with_tables(page.read_text(encoding="utf-8"), {"record": "\n".join(rows)})
