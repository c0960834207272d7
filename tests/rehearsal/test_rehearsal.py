"""What needs a GPU runs on a pretended one, which finds what a real one would refuse (docs/parallelism.md, "Rehearsing a GPU")."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build_device import build

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch"),
    pytest.mark.skipif("REHEARSAL_LIBRARY" in os.environ, reason="this is a rehearsal"),
]


def rehearse(*command: str) -> subprocess.CompletedProcess:
    here = {"REHEARSAL_LIBRARY": str(build(ROOT / "build" / "rehearsal")), "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | here, capture_output=True, text=True)


REFUSED = """
import torch

def message(act):
    try:
        act()
    except RuntimeError as error:
        return str(error)

there, here = torch.ones(3, device="cuda"), torch.ones(3)
assert "at least two devices" in message(lambda: there + here)
assert torch.equal((there * 2).cpu(), here * 2) and torch.cuda.max_memory_allocated() >= 24
torch.cuda.set_sync_debug_mode("error")
chosen = there > 0
waiting = (
    there.sum().item, there.cpu, here.cuda, there.nonzero, lambda: here.pin_memory().cuda(), lambda: there[chosen], lambda: torch.equal(there, there),
    lambda: there.repeat_interleave(there.long()), lambda: bool(chosen.all()), lambda: torch.tensor([1.0], device="cuda"),
)
for act in waiting:
    assert "synchronizing" in (message(act) or ""), act
assert message(lambda: there[there.long() - 1]) is None
assert message(lambda: there.repeat_interleave(there.long(), output_size=3)) is None
assert message(lambda: here.pin_memory().cuda(non_blocking=True)) is None
assert message(lambda: torch.empty(3, pin_memory=True).copy_(there, non_blocking=True)) is None
assert message(lambda: there.to("cpu", non_blocking=True)) is None  # into memory that torch pins
print("as on a GPU")
"""


def test_a_pretended_gpu_refuses_what_a_gpu_refuses():
    done = rehearse("-c", REFUSED)
    assert done.stdout == "as on a GPU\n", done.stderr


def test_steps_on_a_pretended_gpu_never_make_the_host_wait_and_can_be_recorded():
    chosen = "-p no:cacheprovider -m cuda tests/test_cuda.py -k".split()
    done = rehearse("-m", "pytest", *chosen, "(host_wait and (recorded or pipeline)) or (computes_the_same and documents)")
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_that_needs_a_gpu_passes_on_a_pretended_one():
    done = rehearse("-m", "pytest", "-p", "no:cacheprovider", "-m", "cuda", "-n", "2", "tests")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
