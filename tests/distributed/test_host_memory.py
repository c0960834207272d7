"""A process that trains on a CPU keeps freed memory, so that the system does not fill pages with zeros for every large tensor."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.config.parallel_schema import Parallel
from pretrain.config.schema import Config, Run
from pretrain.distributed import ranks
from pretrain.distributed.host_memory import SETTINGS, keep_freed_memory

ROOT = Path(__file__).resolve().parents[2]
TENSORS = """
import resource, sys, torch
from pretrain.distributed.host_memory import keep_freed_memory
kept = sys.argv[1] == "keep" and keep_freed_memory()
def step():
    for megabytes in (1, 40, 3, 100, 7, 2200):
        torch.empty(megabytes << 18)[::16384].fill_(1)  # one page in 16
for _ in range(4):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(asked: str) -> tuple[bool, int]:
    """Whether memory is kept, and pages that the system had to give out in the last two of six steps with tensors of up to 2,200 MB.

    glibc before 2.38 places a tensor of the largest size up to four times, until what it takes from the end of its memory begins at a multiple
    of 64 bytes: in a quarter of all processes the fourth step is the last that maps anything.
    """
    typed = [sys.executable, "-c", TENSORS, asked]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(typed, env=variables, cwd=ROOT, capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this system's malloc is not glibc's")
def test_large_tensors_find_the_memory_of_earlier_ones():
    (_, by_default), (kept, count) = faults("default"), faults("keep")
    assert kept and count < by_default / 10, (count, by_default)


@pytest.mark.parametrize("name", [*SETTINGS, "GLIBC_TUNABLES"])
def test_settings_in_the_environment_hold(name, monkeypatch):
    monkeypatch.setenv(name, "glibc.malloc.top_pad=131072" if name == "GLIBC_TUNABLES" else "131072")
    assert keep_freed_memory() is False


def test_a_run_on_a_cpu_keeps_it(monkeypatch):
    calls = []
    monkeypatch.setattr(ranks, "keep_freed_memory", lambda: calls.append(True))
    ranks.start(Config(run=Run(device="cpu"), parallel=Parallel(strategy="single")), alone=True)
    assert calls == [True]
