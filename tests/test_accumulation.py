"""The numbers of docs/accumulation.md are those that docs/accumulation.py computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PER_ITEM = [0.9563, 0.3866, 0.0998]
ACCUMULATED = [0.9631, 0.3893, 0.1012]
WITHOUT_FACTOR = [0.8680, 0.3552, 0.0841]


@pytest.fixture(scope="module")
def output() -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(DOCS / "accumulation.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "weights", "reductions"),
    [
        ("one process, a step per item", PER_ITEM, 0),
        ("one process, accumulated", ACCUMULATED, 0),
        ("two DDP ranks, one item each", ACCUMULATED, 1),
        ("two DDP ranks, no factor (wrong)", WITHOUT_FACTOR, 1),
        ("two DDP ranks, both items, no_sync", ACCUMULATED, 1),
        ("two DDP ranks, both items, sync every", ACCUMULATED, 2),
    ],
)
def test_the_smallest_case_ends_at_the_weights_derived_by_hand(output, name, weights, reductions):
    line = next(line for line in output.splitlines() if line.startswith(name))
    numbers = line.removeprefix(name).split()
    assert [float(number) for number in numbers[:3]] == weights
    assert int(numbers[3]) == reductions


def test_the_page_shows_exactly_what_the_script_prints(output):
    assert f"```\n{output}```" in (DOCS / "accumulation.md").read_text(encoding="utf-8")


def test_the_weights_derived_by_hand_follow_from_the_gradients_on_the_page():
    gradients = [(-115.836, -38.612, -19.306), (-74.260, -29.704, -14.852)]
    start = (0.773, 0.321, 0.067)
    assert [round(w - 1e-3 * sum(g), 4) for w, *g in zip(start, *gradients)] == ACCUMULATED
    assert [round(w - 1e-3 * sum(g) / 2, 4) for w, *g in zip(start, *gradients)] == WITHOUT_FACTOR
