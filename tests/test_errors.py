"""How command-line tools end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TOOL = "from pretrain.errors import DataError, run_tool\nimport os\n{}\nraise SystemExit(run_tool(work))"


def ended(work: str, read: bool = False) -> tuple[int, str]:
    """The exit code and the errors of a tool whose output nobody reads, unless `read`."""
    reader, writer = os.pipe()
    if not read:
        os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": ""}  # so that short output waits for the end, as a user's does
    command = [sys.executable, "-c", TOOL.format(work)]
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environment)
    if read:
        os.close(reader)
    return done.returncode, done.stderr


@pytest.mark.parametrize("options", ["", ", flush=True", ", end=100000 * 'b'"])
def test_a_tool_whose_output_is_not_read_ends_silently(options):
    assert ended(f"def work(): print('a'{options})") == (141, "")


def test_errors_that_come_first_are_still_told():
    code, said = ended("def work():\n    print('a')\n    raise DataError('x.bin: damaged')")
    assert code == 1 and said == "error: x.bin: damaged\n"


def test_another_pipe_without_a_reader_is_a_defect():
    code, said = ended("def work():\n    reader, writer = os.pipe(); os.close(reader); os.write(writer, b'a')", read=True)
    assert code == 1 and "BrokenPipeError" in said
