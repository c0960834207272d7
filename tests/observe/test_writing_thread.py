"""The thread that writes what observes a run: order, completeness, waiting, failures."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from pretrain.observe import writing_thread
from pretrain.observe.writing_thread import WritingThread
from pretrain.train.run_directory import RunDirectory


def test_writes_are_made_in_order_and_the_caller_does_not_wait():
    made, gate = [], threading.Event()
    writer = WritingThread()
    writer.put(gate.wait)
    for number in range(100):
        writer.put(lambda number=number: made.append((number, threading.current_thread().name)))
    assert made == []
    gate.set()
    writer.drain()
    assert made == [(number, "writer") for number in range(100)]
    writer.close()
    writer.put(lambda: made.append("after the end"))  # it is made at once
    assert made[-1] == "after the end"


def test_a_caller_waits_when_too_many_writes_do_and_none_is_dropped(monkeypatch):
    monkeypatch.setattr(writing_thread, "MOST_WAITING", 3)
    made, waits = [], []

    @contextlib.contextmanager
    def waiting():
        waits.append(len(made))
        yield

    writer = WritingThread(waiting)
    for number in range(8):
        writer.put(lambda number=number: (time.sleep(0.02), made.append(number)))
        assert number - len(made) < 3
    assert waits  # the wait has a name that other ranks can see
    writer.close()
    assert made == list(range(8))


def test_a_failure_is_raised_once_by_the_next_call_and_keeps_nothing_from_being_written():
    made = []
    writer = WritingThread()

    def fail():
        raise ZeroDivisionError("a defect")

    writer.put(lambda: (time.sleep(0.05), fail()))
    writer.put(lambda: made.append(1))
    with pytest.raises(ZeroDivisionError, match="a defect"):
        writer.drain()
    writer.put(lambda: made.append(2))
    writer.close()
    assert made == [1, 2]
    writer = WritingThread()
    writer.put(fail)
    with pytest.raises(ZeroDivisionError):
        writer.close()
    writer.close()


def test_a_failed_run_gives_storage_up_that_hangs(monkeypatch, caplog):
    monkeypatch.setattr(writing_thread, "FAILED_SECONDS", 0.05)
    gate, made = threading.Event(), []
    writer = WritingThread()
    writer.put(gate.wait)
    writer.put(lambda: made.append("late"))
    writer.close(failed=True)
    assert caplog.messages == ["storage hangs: no log line could be written in 0.05 s, so 2 writes were given up"]
    gate.set()
    writer._thread.join()
    assert made == []  # nothing is written when the directory may be another start's


def test_a_status_never_goes_back(tmp_path, monkeypatch):
    """The end of a run is written by the main thread, or by the monitor, while older ones may still wait."""
    directory, gate = RunDirectory(tmp_path), threading.Event()
    directory.writer = WritingThread()
    directory.writer.put(gate.wait)
    directory.write_status("running", 1)
    directory.write_status("running", 2)
    assert directory.status() == {}
    monkeypatch.setattr("pretrain.train.run_directory._WRITER_SECONDS", 0.05)
    directory.write_status("failed", 3, "storage hangs")
    gate.set()
    directory.writer.close()
    assert [directory.status()[name] for name in ("state", "step")] == ["failed", 3]
