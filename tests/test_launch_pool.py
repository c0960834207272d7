"""The processes that the tests of several ranks run in."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CASE = """
import multiprocessing, os, signal, sys
from pathlib import Path
from launch_pool import _run_once

def compute(pipe):
    pipe.send(os.getpid())
    while True:
        pass

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=_run_once, args=({}, list(sys.path), Path(sys.argv[1]), compute, (theirs,))).start()
    print(ours.recv(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_rank_that_computes_ends_with_pytest(tmp_path):
    """After a killed run, ranks took the cores for as long as what they computed lasted."""
    (tmp_path / "case.py").write_text(CASE)
    here = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with open(tmp_path / "printed", "w+") as printed:  # a rank that goes on would hold a pipe open
        ended = subprocess.run([sys.executable, tmp_path / "case.py", tmp_path / "of-rank"], env=here, stdout=printed, timeout=60)
        assert ended.returncode == -signal.SIGKILL
        printed.seek(0)
        rank, limit = Path("/proc", printed.read().strip()), time.monotonic() + 20
    try:
        while _computes(rank) and time.monotonic() < limit:
            time.sleep(0.05)
        assert not _computes(rank)
    finally:
        if _computes(rank):
            os.kill(int(rank.name), signal.SIGKILL)


def _computes(process: Path) -> bool:
    """Whether it runs still. One that has ended stays a zombie until someone asks for its exit code."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
