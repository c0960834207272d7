"""What torch.compile makes of our functions for a GPU is compiled to its machine code, on a host without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_for_a_gpu_compile(tmp_path):
    """A constant of 33 bits times a place in a row of 32: a step of a matrix with one row or column, in bf16, would have ended in an error."""
    pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    program = [sys.executable, str(Path(__file__).with_name("gpu_kernels.py"))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.endswith(": compiles")]
    assert done.returncode == 0 and len(lines) >= 8, done.stdout + done.stderr[-2000:]
