"""docs/adding_a_family.md is done as it stands, in a copy of the tree, and the family it adds is compared with transformers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "adding_a_family.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_page_adds_a_family_that_computes_what_transformers_computes(tmp_path):
    for name in ("pretrain", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    written, done = [], ""
    for language, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "python":
            path = tmp_path / re.match(r"# (\S+\.py)\n", text)[1]
            assert not path.exists()
            path.write_text(text.partition("\n")[2])
            written.append(path)
        elif "run.py" not in text:  # which needs data; every command of the pages is looked at in test_documentation.py
            result = subprocess.run(["bash", "-euc", text], cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
            done += result.stdout
    assert [path.name for path in written] == ["granite.py", "granite.py"]
    assert len(written[0].read_text().splitlines()) <= 60
    # Nine tests of each of five configurations, and three of the family.
    dots = sum(line.count(".") for line in done.splitlines() if re.fullmatch(r"[.]+ +\[ *\d+%\]", line))
    assert dots == 9 * 5 + 3 and "failed" not in done and "skipped" not in done
