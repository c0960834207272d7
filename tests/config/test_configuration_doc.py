"""The documentation of the configuration is the schema's, and every shipped configuration loads."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
from documentation.configuration import configuration_page

from pretrain.config.keys import AtResume
from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.config.written import to_yaml
from pretrain.parallel.legality import check_options
from pretrain.train.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
# Those of configs/models/ are no runs by themselves: tests/models/test_presets.py loads them.
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "models")


def keys(kind: type, path: str) -> list[str]:
    found = []
    for name, hint in typing.get_type_hints(kind).items():
        item = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
        if dataclasses.is_dataclass(hint):
            found += keys(hint, f"{path}{name}.")
        else:
            found.append(f"{path}{name}")
            found += keys(item, f"{path}{name}[].") if dataclasses.is_dataclass(item) else []
    return found


def test_the_documentation_is_the_one_generated_from_the_schema():
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == configuration_page(), (
        "run: python tools/make_docs.py"
    )


def test_every_key_has_a_row_of_five_columns():
    rows = [line for line in configuration_page().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == keys(Config, "")
    for row in rows:
        columns = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(columns) == 5 and all(columns), row
        assert columns[4] in typing.get_args(AtResume), row
        assert columns[3].endswith((".", ":")), row


def test_there_are_shipped_configurations():
    assert ROOT / "configs" / "quickstart.yaml" in CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_shipped_configuration_loads_and_loads_back(path, tmp_path):
    config = resolve(load_config(path)[0])
    check_options(config)
    (tmp_path / "printed.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "printed.yaml")[0] == config
