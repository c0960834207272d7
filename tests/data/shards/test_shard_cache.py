"""The cache of fetched files: bounded, shared between processes, and never in anybody's way."""

import fcntl
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pretrain.data.shards.shard_cache import ShardCache
from pretrain.errors import DataError

SIZE = 1000


def content(number: int, size: int = SIZE) -> bytes:
    return number.to_bytes(4, "little") * (size // 4)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fetch(cache: ShardCache, data: bytes, log: list | None = None, pause: float = 0.0) -> bytes:
    def download(descriptor: int) -> None:
        if log is not None:
            log.append(data[:4])
        os.write(descriptor, data[: len(data) // 2])
        time.sleep(pause)
        os.write(descriptor, data[len(data) // 2 :])

    with cache.open(sha(data), len(data), "here", download) as file:
        return file.read()


def test_a_file_is_fetched_once_and_found_afterwards_by_everybody(tmp_path):
    log: list = []
    assert fetch(ShardCache(tmp_path, 10**6), content(1), log) == content(1)
    assert fetch(pickle.loads(pickle.dumps(ShardCache(tmp_path, 10**6))), content(1), log) == content(1)
    assert log == [content(1)[:4]]


def test_the_least_recently_used_files_go_first(tmp_path, usage):
    cache = ShardCache(tmp_path, 3 * SIZE)
    for number in (1, 2, 3):
        fetch(cache, content(number))
    fetch(cache, content(1))  # used again
    fetch(cache, content(4))
    assert [cache.path(sha(content(number))).exists() for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert cache.touch(sha(content(3)))
    fetch(cache, content(5))
    assert [cache.path(sha(content(number))).exists() for number in (1, 3, 4, 5)] == [False, True, True, True]
    assert usage(cache) == 3 * SIZE and not cache.touch(sha(content(1)))


def test_a_file_larger_than_the_limit_names_both_sizes_and_the_key(tmp_path):
    with pytest.raises(DataError, match=r"here: 1000 bytes are more than data.cache.limit_gb=9.99e-07 \(999 bytes\)"):
        fetch(ShardCache(tmp_path, SIZE - 1), content(1))
    assert fetch(ShardCache(tmp_path, SIZE), content(1)) == content(1)  # exactly fits
    assert fetch(ShardCache(tmp_path, SIZE), content(2)) == content(2)


def test_a_file_that_was_dropped_stays_readable_where_it_is_open(tmp_path):
    cache = ShardCache(tmp_path, SIZE)
    file = cache.open(sha(content(1)), SIZE, "here", lambda descriptor: os.write(descriptor, content(1)))
    fetch(cache, content(2))
    assert not cache.path(sha(content(1))).exists()
    assert file.read() == content(1)


def test_threads_that_want_one_file_fetch_it_once(tmp_path):
    cache, log = ShardCache(tmp_path, 10**6), []
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: fetch(cache, content(1), log, pause=0.1), range(8)))
    assert results == [content(1)] * 8 and len(log) == 1
    assert list((tmp_path / "partial").iterdir()) == []


def test_room_is_taken_before_the_bytes_arrive(tmp_path, usage):
    cache = ShardCache(tmp_path, 3 * SIZE)
    seen = []

    def watched(descriptor: int) -> None:
        seen.append(usage(cache))
        os.write(descriptor, content(4))

    for number in (1, 2, 3):
        fetch(cache, content(number))
    cache.open(sha(content(4)), SIZE, "here", watched).close()
    assert seen == [3 * SIZE]  # one of the three had gone before the first byte


def test_downloads_together_above_the_limit_wait_for_each_other(tmp_path, usage):
    cache, samples, stop = ShardCache(tmp_path, 2 * SIZE), [], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            samples.append(usage(cache))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda number: fetch(cache, content(number), pause=0.02), range(12)))
    stop.set()
    watcher.join()
    assert results == [content(number) for number in range(12)]
    assert max(samples) <= 2 * SIZE


def test_waiting_for_room_ends_with_an_error(tmp_path):
    cache = ShardCache(tmp_path, SIZE, wait_seconds=0.2)
    started, finish = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        started.set()
        finish.wait()
        os.write(descriptor, content(1))

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(lambda: cache.open(sha(content(1)), SIZE, "here", slow).close())
        started.wait()
        try:
            with pytest.raises(DataError, match="no room in data.cache.dir=.* raise data.cache.limit_gb"):
                fetch(cache, content(2))
        finally:
            finish.set()
        first.result()


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_download_that_fails_leaves_nothing_and_blocks_nobody(tmp_path, error, usage):
    cache = ShardCache(tmp_path, SIZE)

    def broken(descriptor: int) -> None:
        os.write(descriptor, b"half")
        raise error

    with pytest.raises(type(error)):
        cache.open(sha(content(1)), SIZE, "here", broken)
    assert usage(cache) == 0 and list((tmp_path / "partial").iterdir()) == []
    assert fetch(cache, content(1)) == content(1)


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=f"no space left in data.cache.dir={tmp_path} for 1000 bytes"):
        ShardCache(tmp_path, SIZE).open(sha(content(1)), SIZE, "here", full)


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="data.cache.dir=.*cannot be created"):
        ShardCache(tmp_path / "file" / "cache", SIZE)


def test_a_copy_that_lost_bytes_is_fetched_again(tmp_path, caplog):
    cache, log = ShardCache(tmp_path, 10**6), []
    fetch(cache, content(1), log)
    os.truncate(cache.path(sha(content(1))), 10)
    assert fetch(cache, content(1), log) == content(1) and len(log) == 2
    assert "has 10 bytes, not 1000; downloading it again" in caplog.text


_STUCK = """
import os, sys, time
from pretrain.data.shards.shard_cache import ShardCache
def stuck(descriptor):
    os.write(descriptor, b"half")
    print("fetching", flush=True)
    time.sleep(60)
ShardCache(sys.argv[1], 10**6).open(sys.argv[2], 1000, "here", stuck)
"""


def stuck_process(folder: Path, data: bytes) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", _STUCK, str(folder), sha(data)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "fetching\n"
    return process


def test_who_waits_for_a_process_that_is_killed_fetches_in_its_place(tmp_path):
    process, cache, log = stuck_process(tmp_path, content(1)), ShardCache(tmp_path, 10**6), []
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(fetch, cache, content(1), log) for _ in range(3)]
        time.sleep(0.2)
        assert not any(future.done() for future in waiting)
        process.send_signal(signal.SIGKILL)
        assert [future.result(timeout=10) for future in waiting] == [content(1)] * 3
    process.wait()
    assert len(log) == 1 and list((tmp_path / "partial").iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_not_counted(tmp_path, usage):
    process, cache = stuck_process(tmp_path, content(1)), ShardCache(tmp_path, SIZE)
    process.kill()
    process.wait()
    assert usage(cache) == SIZE
    assert fetch(cache, content(2)) == content(2)
    assert usage(cache) == SIZE and list((tmp_path / "partial").iterdir()) == []


def test_a_child_forked_during_a_download_does_not_hold_its_lock(tmp_path):
    cache, forked = ShardCache(tmp_path, 10**6), []

    def forking(descriptor: int) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        forked.append(child)
        raise RuntimeError("broken")

    try:
        with pytest.raises(RuntimeError):
            cache.open(sha(content(1)), SIZE, "here", forking)
        with (tmp_path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert fetch(cache, content(1)) == content(1)
    finally:
        os.kill(forked[0], signal.SIGKILL)
        os.waitpid(forked[0], 0)


_FORKING = """
import os, sys, time
from pretrain.data.shards.shard_cache import ShardCache
def forking(descriptor):
    child = os.fork()
    if child == 0:
        time.sleep(60)
    print(child, flush=True)
    time.sleep(60)
ShardCache(sys.argv[1], 10**6).open(sys.argv[2], 1000, "here", forking)
"""


def test_a_killed_process_blocks_nobody_though_its_forked_child_lives_on(tmp_path):
    command = [sys.executable, "-c", _FORKING, str(tmp_path), sha(content(1))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(fetch, ShardCache(tmp_path, 10**6), content(1)).result(timeout=10) == content(1)
    finally:
        os.kill(child, signal.SIGKILL)
