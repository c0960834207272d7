"""How command-line tools end."""

from __future__ import annotations

import io
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from pretrain import progress
from pretrain.distributed import ranks

ROOT = Path(__file__).resolve().parents[1]
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


def test_a_full_disk_is_a_line_though_the_system_names_no_file():
    """It was a traceback: only opening a file says which one it is."""
    code, said = ended("def work():\n    with open('/dev/full', 'w') as file:\n        file.write('a')")
    assert code == 1
    assert said == "error: a file cannot be written: No space left on device; make room and start the same command again\n"


def test_a_run_without_a_place_for_temporary_files_is_a_line():
    """It was a traceback of torch's import."""
    command = [sys.executable, str(ROOT / "pretrain" / "run.py"), "--config", str(ROOT / "configs" / "pretrain" / "llama-125m.yaml"), "--check"]
    no_room = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=no_room)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: No usable temporary directory found in [") and "set TMPDIR" in done.stderr


def test_a_run_in_a_removed_folder_is_a_line(tmp_path):
    """torch's libraries ended the process."""
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && {sys.executable} {ROOT / 'pretrain' / 'run.py'} --config {ROOT / 'configs' / 'pretrain' / 'llama-125m.yaml'} --check"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: the folder in which this command was started was removed; change to one that exists\n")


def test_errors_that_come_first_are_still_told():
    code, said = ended("def work():\n    print('a')\n    raise DataError('x.bin: damaged')")
    assert code == 1 and said == "error: x.bin: damaged\n"


def test_another_pipe_without_a_reader_is_a_defect():
    code, said = ended("def work():\n    reader, writer = os.pipe(); os.close(reader); os.write(writer, b'a')", read=True)
    assert code == 1 and "BrokenPipeError" in said


def test_a_character_that_the_terminal_cannot_show_is_escaped():
    """tools/watch.py ended with UnicodeEncodeError where the locale is not UTF-8."""
    done = subprocess.run([sys.executable, "-c", TOOL.format("def work(): print('bar \u2581')")], capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, b"bar \\u2581\n"), done.stderr


LOST = {
    "a pipe without a reader": "r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2)",
    "a full disk": "w = os.open('/dev/full', os.O_WRONLY); os.dup2(w, 1); os.dup2(w, 2)",
    "a terminal that is gone": "m, s = os.openpty(); os.dup2(s, 1); os.dup2(s, 2); os.close(s); os.close(m)",
    "closed by the caller": "sys.stdout = sys.stderr = None",
}


@pytest.mark.parametrize("how", LOST.values(), ids=LOST)
@pytest.mark.parametrize("what", [
    "Monitor(0, 0, 10.0)._end('rank 3 is gone')",
    "lock = RunLock(Path(sys.argv[1]), 'flock'); lock.acquire(); (lock.path).write_text(lock.path.read_text().replace(lock.owner.token, 'another'))",
])  # fmt: skip
def test_a_process_that_has_to_end_does_although_it_cannot_say_so(tmp_path, how, what):
    """The last word raised an error in the thread that ends the process: a rank hung for ever, and two trainers went on in one directory."""
    program = f"""
import os, sys, threading, time
from pathlib import Path
from pretrain.distributed.monitor import Monitor
from pretrain.train import run_lock
from pretrain.train.run_lock import RunLock
run_lock.BEAT_SECONDS = 0.1
{how}
def work(): {what}
threading.Thread(target=work, daemon=True).start()
time.sleep(10)
os._exit(77)
"""
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.DEVNULL).returncode == 1


def test_a_run_ends_well_whose_output_was_closed(monkeypatch):
    """`pretrain/run.py >&-` finished, and then ended with AttributeError and exit code 1."""
    monkeypatch.setattr(sys, "stdout", None)
    ranks.stop()


@pytest.mark.parametrize("stream", [None, "/dev/full"])
def test_work_goes_on_whose_progress_cannot_be_printed(monkeypatch, stream):
    """A preparation ended at its first line on standard error, if that was closed (`2>&-`), or its log on a full disk."""
    monkeypatch.setattr(sys, "stderr", stream and open(stream, "w"))
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    with progress.CorpusProgress("preparing") as corpus, progress.ByteProgress("reading", 10) as read:
        corpus.add(1, 2, 3)
        read.add(4)
    assert (corpus.tokens, read.done) == (2, 4)


def test_a_bar_says_what_it_counts(monkeypatch):
    """The bar of a corpus that was assembled showed tokens as bytes."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.stderr.isatty = lambda: True
    with progress.CorpusProgress("assembling", 4000, " tokens") as corpus, progress.ByteProgress("reading", 9000) as read:
        for bar, add in ((corpus._bar, partial(corpus.add, 0, 0, 0)), (read._bar, read.add)):
            bar.mininterval = 0
            time.sleep(0.01)
            add(2000)
    shown = sys.stderr.getvalue()
    assert re.search(r"assembling: +50%.* tokens/s", shown) and re.search(r"reading: +22%.*B/s", shown)


def stopped(folder: Path, script: str, begun: Path, by: int) -> tuple[int, str]:
    """The exit code and the errors of a Python program that gets a signal once it has begun."""
    started = subprocess.Popen([sys.executable, "-c", script, str(folder)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not begun.exists():
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(by)
    errors = started.communicate(timeout=60)[1]
    return started.returncode, errors


def test_a_tool_that_a_scheduler_ends_removes_what_is_half_written(tmp_path):
    """`timeout`, Slurm and kubectl send SIGTERM. An export of a model's size stayed behind."""
    work = (
        "import pathlib, sys, time; from pretrain.storage import staged_directory; folder = pathlib.Path(sys.argv[1])\n"
        "def work():\n with staged_directory(folder / 'out') as made:\n  (made / 'half').write_text('x'); (folder / 'begun').touch(); time.sleep(600)"
    )
    assert stopped(tmp_path, TOOL.format(work), tmp_path / "begun", signal.SIGTERM) == (143, "ended by SIGTERM\n")
    assert [path.name for path in tmp_path.iterdir()] == ["begun"]


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_comparison_that_is_stopped_lets_the_launcher_end_its_ranks(tmp_path, by):
    """torchrun was killed by force, and its ranks lived on."""
    launcher = (
        "import pathlib, signal, sys, time; folder = pathlib.Path(sys.argv[1])\n"
        "def end(*_): (folder / 'ended').touch(); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, end); signal.signal(signal.SIGINT, signal.SIG_IGN); (folder / 'begun').touch(); time.sleep(600)"
    )
    work = (
        "import signal, sys, types; from pretrain.equivalence.comparison import start_processes\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"case = types.SimpleNamespace(name='a', command=lambda *_: [sys.executable, '-c', {launcher!r}, sys.argv[1]])\n"
        "def work(): start_processes(case, None, [])"
    )
    code, _ = stopped(tmp_path, TOOL.format(work), tmp_path / "begun", by)
    assert code == 128 + by and (tmp_path / "ended").exists()
