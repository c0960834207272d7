"""What needs a GPU runs on a pretended one, which finds what a real one would refuse (docs/gpus.md, "Rehearsing a GPU")."""

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
import threading
import torch
from torch.nn import functional as F

def message(act):
    try:
        act()
    except RuntimeError as error:
        return str(error)

there, here, ids = torch.ones(3, device="cuda"), torch.ones(3), torch.tensor([0, 2])
square, elsewhere = torch.ones(3, 3, device="cuda"), torch.ones(3, 3, device="cuda:1")
mixed = (
    lambda: there + here, lambda: F.linear(here, square), lambda: F.linear(there, square, here), lambda: F.embedding(ids, square),
    lambda: F.embedding(ids.cuda(), torch.ones(3, 3)), lambda: torch.cat([there, here]), lambda: square @ elsewhere, lambda: square.gather(0, ids[None]),
    lambda: F.cross_entropy(square[:2], ids), lambda: torch.where(square > 0, square, torch.ones(3, 3)), lambda: torch.equal(there, here),
)
for number, act in enumerate(mixed):
    assert "at least two devices" in (message(act) or ""), number
assert torch.equal((there * 2).cpu(), here * 2) and torch.cuda.max_memory_allocated() >= 24
there + torch.tensor(2.0)  # a single number of the host may stand beside any device

torch.cuda.set_sync_debug_mode("error")
chosen, one = there > 0, torch.tensor(1.0)
number = torch.tensor([0]).pin_memory().to("cuda", non_blocking=True)
waiting = (
    there.sum().item, there.cpu, here.cuda, there.nonzero, lambda: here.pin_memory().cuda(), lambda: there[chosen], lambda: torch.equal(there, there + 1),
    lambda: there.repeat_interleave(there.long()), lambda: bool(chosen.all()), lambda: torch.tensor([1.0], device="cuda"), lambda: there[ids],
    lambda: there[[0, 2]], lambda: there.index_put_((number,), one), lambda: torch.where(chosen, there, one), lambda: there.histc(4),
    lambda: there.multinomial(1), lambda: torch.isin(there, there), torch.cuda.Stream().synchronize, there.tolist, there.unique,
)
for place, act in enumerate(waiting):
    assert "synchronizing" in (message(act) or ""), place
free = (
    lambda: there[there.long() - 1], lambda: there.repeat_interleave(there.long(), output_size=3), lambda: here.pin_memory().cuda(non_blocking=True),
    lambda: torch.empty(3, pin_memory=True).copy_(there, non_blocking=True), lambda: there.to("cpu", non_blocking=True),  # into memory that torch pins
    lambda: there.histc(4, 0, 2), torch.cuda.synchronize,
)
for act in free:
    assert message(act) is None, message(act)

# A thread in an operator changes nothing for the others.
big, failed = torch.ones(256, 256, device="cuda"), []
def multiply():
    for _ in range(200):
        if message(lambda: big @ big):
            failed.append(True)
threads = [threading.Thread(target=multiply) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed and "synchronizing" in message(there.sum().item)
print("as on a GPU")
"""


def test_a_pretended_gpu_refuses_what_a_gpu_refuses():
    done = rehearse("-c", REFUSED)
    assert done.stdout == "as on a GPU\n", done.stderr


def test_looking_torch_up_does_not_end_the_rehearsal():
    done = rehearse(
        "-c", "import importlib.util; importlib.util.find_spec('torch'); import torch; print(torch.cuda.is_available())"
    )
    assert done.stdout == "True\n", done.stderr


def test_steps_on_a_pretended_gpu_never_make_the_host_wait_and_can_be_recorded():
    chosen = "-p no:cacheprovider -m cuda tests/test_cuda.py -k".split()
    done = rehearse(
        "-m", "pytest", *chosen, "(host_wait and (recorded or pipeline)) or (computes_the_same and documents) or at_once"
    )
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_that_needs_a_gpu_passes_on_a_pretended_one():
    done = rehearse("-m", "pytest", "-p", "no:cacheprovider", "-m", "cuda", "-n", "2", "tests")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
