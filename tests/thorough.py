"""The list thorough.yaml of what `bash tests/run.sh` leaves to `bash tests/run.sh --thorough`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import yaml


def mark_thorough(items: list[pytest.Item], complete: bool) -> None:
    """Mark what thorough.yaml names. If files were collected `complete`, a name in it that no test of theirs has is a UsageError."""
    folder = Path(__file__).parent
    thorough = yaml.safe_load((folder / "thorough.yaml").read_text(encoding="utf-8"))
    found = defaultdict(set)
    for item in items:
        file, (test, _, case) = item.path.relative_to(folder).as_posix(), item.name.partition("[")
        case = case.removesuffix("]")
        found[file].add(test)
        found[file, test].add(case)
        if test in thorough.get(file, {}) and case not in thorough[file][test]:
            item.add_marker("thorough")
    for file, tests in thorough.items() if complete else ():
        missing = sorted(tests.keys() - found[file]) + [
            f"{test}[{case}]" for test in tests.keys() & found[file] for case in set(tests[test]) - found[file, test]
        ]
        if missing and (found[file] or not (folder / file).exists()):
            raise pytest.UsageError(f"tests/thorough.yaml: {file} has no {missing[0]}; name what there is, or take it out")
