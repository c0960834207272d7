"""docs/adding_a_family.md leaves nothing out: done in a copy of the tree without its family, it gives the tree as it is.

What comes out is what the rest of the suite tests, so whoever follows the page ends with a suite that passes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "adding_a_family.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SCHEMA = Path("pretrain/config/model_schema.py")
NOT_HERE = ("pytest", "tests/run.sh", "pretrain/run.py")  # the suite itself; a check of a run that needs data


def granite_files(root: Path) -> set[Path]:
    found = [
        path for folder in ("pretrain", "tests/models/family_cases", "configs") for path in (root / folder).rglob("granite*")
    ]
    return {path.relative_to(root) for path in found if path.suffix in (".py", ".yaml") and not is_of_hybrid(path.name)}


def is_of_hybrid(text: str) -> bool:
    """Whether it is about the family that came after Granite and uses its file."""
    return "granite_hybrid" in text or "granite4" in text


@pytest.fixture
def without_granite(tmp_path) -> Path:
    """A copy of the tree as if Granite had never been in it. The generated pages are emptied, and other presets left out for speed."""
    for name in ("pretrain", "tests/models/family_cases", "docs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "configs" / "models").mkdir(parents=True)
    for path in [path for path in tmp_path.rglob("granite*") if path.is_file()]:
        path.unlink()
    schema = tmp_path / SCHEMA
    schema.write_text(schema.read_text().replace('"granite", "granite_hybrid", ', ""))
    models = tmp_path / "docs" / "models.md"
    models.write_text(re.sub(r"^\| `.*\n", "", models.read_text(), flags=re.MULTILINE))
    (tmp_path / "docs" / "configuration.md").write_text("")
    for folder in ("pretrain", "tests", "configs"):
        assert not [path for path in (tmp_path / folder).rglob("*.*") if "granite" in path.read_text().lower()]
    return tmp_path


def test_the_page_does_everything_that_adding_a_family_takes(without_granite):
    root = without_granite
    environment = {**os.environ, "PYTHONPATH": str(root), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for language, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "bash":
            if not any(word in text for word in NOT_HERE):
                subprocess.run(["bash", "-euc", text], cwd=root, env=environment, check=True)
        else:
            path = root / re.match(r"# (\S+)\n", text)[1]
            assert not path.exists()
            path.write_text(text.partition("\n")[2], encoding="utf-8")
    files = granite_files(root)
    assert files == granite_files(ROOT) and len(files) == 4
    for path in (*files, SCHEMA, Path("docs/configuration.md")):
        expected = re.sub('"?granite_hybrid"?, ', "", (ROOT / path).read_text(encoding="utf-8"))
        assert (root / path).read_text(encoding="utf-8") == expected, path
    pages = [(tree / "docs" / "models.md").read_text().splitlines() for tree in (root, ROOT)]
    rows = [[line for line in page if "| `granite" in line and not is_of_hybrid(line)] for page in pages]
    assert rows[0] == rows[1] and len(rows[0]) == 3
    assert all(len((root / path).read_text().splitlines()) <= 60 for path in files if path.parts[0] == "pretrain")


def test_the_page_asks_for_the_whole_suite():
    text = PAGE.read_text(encoding="utf-8")
    assert "python -m pytest tests/models -k granite\nbash tests/run.sh --thorough\n" in text
