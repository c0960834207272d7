"""A process that trains on a CPU keeps freed memory, so that the system does not fill pages with zeros for every large tensor."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.config.parallel_schema import Parallel
from pretrain.config.schema import Config, Run
from pretrain.distributed import ranks

ROOT = Path(__file__).resolve().parents[2]
TENSORS = """
import resource, sys, torch
from pretrain.distributed.host_memory import keep_freed_memory
kept = sys.argv[1] == "keep" and keep_freed_memory()
def step():
    for megabytes in (1, 40, 3, 100, 7):
        torch.ones(megabytes << 18)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(asked: str, **environment: str) -> tuple[bool, int]:
    """Whether memory is kept, and pages that the system had to give out when 150 MB of tensors are made ten times more."""
    typed = [sys.executable, "-c", TENSORS, asked]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(typed, env=variables | environment, cwd=ROOT, capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this system's malloc is not glibc's")
def test_large_tensors_find_the_memory_of_earlier_ones():
    (_, by_default), (kept, count) = faults("default"), faults("keep")
    assert kept and count < by_default / 10, (count, by_default)


def test_an_allocator_with_settings_of_its_own_is_left_as_it_is():
    assert faults("keep", MALLOC_TOP_PAD_="131072")[0] is False


def test_a_run_on_a_cpu_keeps_it(monkeypatch):
    calls = []
    monkeypatch.setattr(ranks, "keep_freed_memory", lambda: calls.append(True))
    ranks.start(Config(run=Run(device="cpu"), parallel=Parallel(strategy="single")), alone=True)
    assert calls == [True]
