"""Prepared data over http from a server that misbehaves: what passes is waited for, what does not is an error at once."""

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from faulty_server import FaultyServer, faulty_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.config.load import load_config
from pretrain.data.shards import open_files
from pretrain.data.shards.reader import PreparedData
from pretrain.data.shards.remote_files import open_remote
from pretrain.data.shards.shard_cache import ShardCache
from pretrain.data.sources import open_sources
from pretrain.errors import ConfigError, DataError, without_secrets
from pretrain.transfer import Patience, Remote, is_url, join

QUICK = Patience(stall=20, first_delay=0.02, longest_delay=0.1, give_up=20)
SHORT = Patience(stall=1.0, first_delay=0.02, longest_delay=0.1, give_up=1.0)
BIG = 10**9
SHARD = "shard-00001.bin"


def opened(url: str, cache: ShardCache, patience: Patience = QUICK) -> PreparedData:
    remote, manifest = open_remote(url, cache, Remote(patience))
    return PreparedData(url, manifest, remote)


@pytest.fixture
def folder(tmp_path, prepared) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "www" / "train"))


@pytest.fixture
def server(folder):
    pytest.importorskip("aiohttp", reason='https:// needs aiohttp: pip install -e ".[remote]"')
    with faulty_server(folder.parent) as server:
        yield server


@pytest.fixture
def cache(tmp_path) -> ShardCache:
    return ShardCache(tmp_path / "cache", BIG)


def whole(data: PreparedData) -> np.ndarray:
    return data.read(0, data.tokens)


def test_any_backend_reads_what_lies_in_the_folder(folder, cache):
    import fsspec

    fsspec.filesystem("memory").put(str(folder), "/bucket/train", recursive=True)
    expected = whole(PreparedData.open(folder))
    for number, url in enumerate(("file://" + str(folder), "memory://bucket/train/", "simplecache::memory://bucket/train")):
        data = PreparedData.open(url, ShardCache(cache.directory / str(number), BIG))
        assert np.array_equal(whole(data), expected)
        assert [data.document_span(i) for i in (0, 299)] == [PreparedData.open(folder).document_span(i) for i in (0, 299)]
        assert sorted(f.name for f in data.tokenizer_path.iterdir()) == sorted(f.name for f in (folder / "tokenizer").iterdir())


def test_an_order_that_needs_any_shard_is_refused_for_more_than_the_cache_holds(folder, tmp_path):
    """Each sample would have downloaded a shard, and dropped another one."""
    kept = f"data.cache={{dir: {tmp_path / 'cache'}, limit_gb: 1.0e-6}}"
    short = ["data.sequence_length=16", "batch={sequences: 4, micro_sequences: 4}", kept]
    remote, local = (f"data.sources=[{{path: '{path}'}}]" for path in (f"file://{folder}", folder))
    with pytest.raises(ConfigError, match=r"data.shuffle=full .*limit_gb=1e-06 holds less .* set data.shuffle=shards, or raise data.cache.limit_gb"):
        open_sources(load_config(None, [*short, remote])[0])
    for allowed in ([remote, "data.shuffle=shards"], [local]):
        assert len(open_sources(load_config(None, [*short, *allowed])[0])) == 1


def test_reading_a_local_folder_imports_no_fsspec(folder):
    program = (
        "import sys; from pretrain.data.shards.reader import PreparedData; PreparedData.open(sys.argv[1]).read(0, 10); "
        "assert not {'fsspec', 'aiohttp', 's3fs', 'pretrain.data.shards.remote_files'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_windows_equal_the_local_copy_in_a_cache_of_one_and_a_half_shards(prepared, tmp_path, data):
    local = PreparedData.open(prepared)
    largest = max(2 * shard.tokens for shard in local.manifest.shards)
    remote = PreparedData.open(f"file://{prepared}", ShardCache(tmp_path / "cache", largest * 3 // 2))
    for _ in range(3):
        start = data.draw(st.integers(0, local.tokens))
        count = data.draw(st.integers(0, local.tokens - start))
        assert np.array_equal(remote.read(start, count), local.read(start, count))
    document = data.draw(st.integers(0, local.documents - 1))
    assert remote.document_span(document) == local.document_span(document)


@pytest.mark.parametrize(
    "faults", [[503], [500, 502, 429], ["reset"], ["truncate"], ["wrong"], ["half"], [408, "reset", "wrong"]]
)
def test_what_passes_is_retried_and_logged(server, folder, cache, faults, caplog):
    server.faults[SHARD] = list(faults)
    data = opened(server.url + "/train", cache)
    assert np.array_equal(whole(data), whole(PreparedData.open(folder)))
    assert server.count(SHARD) == len(faults) + 1
    retries = [record.getMessage() for record in caplog.records if record.name == "pretrain.transfer"]
    assert len(retries) == len(faults)
    assert all(message.startswith(f"{server.url}/train/{SHARD}: ") and "trying again in" in message for message in retries)


def test_a_transfer_that_stands_still_or_crawls_is_given_up_and_tried_again(server, folder, cache, caplog):
    server.faults[SHARD] = ["slow", "stall"]
    data = opened(server.url + "/train", cache, Patience(stall=1.0, first_delay=0.02))
    assert np.array_equal(whole(data), whole(PreparedData.open(folder)))
    assert server.count(SHARD) >= 3  # more where this machine itself stood still for a second
    assert caplog.text.count("nothing came for 1 s; trying again in 0.0 s") >= 2


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer/tokenizer.json"])
def test_the_small_files_are_retried_too(server, folder, cache, name):
    server.faults[name] = [503, "truncate", "reset"]
    assert np.array_equal(whole(opened(server.url + "/train", cache)), whole(PreparedData.open(folder)))


@pytest.mark.parametrize("status", [401, 403, 404, 410, 400])
def test_what_does_not_pass_fails_at_once_in_one_line(server, cache, status, caplog):
    server.faults[SHARD] = [status]
    data = opened(server.url + "/train", cache)
    with pytest.raises(DataError) as error:
        whole(data)
    message = str(error.value)
    expected = {
        401: "access refused",
        403: "access refused",
        404: "missing, though",
        410: "missing, though",
        400: "cannot be read",
    }
    assert message.startswith(f"{server.url}/train/{SHARD}: {expected[status]}") and "\n" not in message
    assert server.count(SHARD) == 1 and "trying again" not in caplog.text
    assert np.array_equal(data.read(0, 10), data.read(0, 10))  # the other shards still work


def test_a_server_that_stays_broken_ends_in_an_error_after_the_time_limit(server, cache):
    data = opened(server.url + "/train", cache, SHORT)
    server.faults[SHARD] = [503] * 1000
    began = time.monotonic()
    with pytest.raises(DataError, match=rf"{SHARD}: still failing after [1-9]\d* s of retries: .*503.*check the server"):
        whole(data)
    assert 1.0 < time.monotonic() - began < 30.0
    assert 3 < server.count(SHARD) < 100  # delays grow to 0.1 s and no further
    server.faults.clear()
    assert len(whole(data)) == data.tokens


@pytest.mark.parametrize("fault, found", [("wrong", "sha256 [0-9a-f]{64}"), ("half", "[0-9]+ bytes")])
def test_bytes_that_stay_wrong_name_the_url_what_is_expected_and_what_is_found(server, cache, fault, found):
    data = opened(server.url + "/train", cache)
    server.faults[SHARD] = [fault] * 10
    shard = data.manifest.shards[1]
    expected = shard.sha256 if fault == "wrong" else str(2 * shard.tokens)
    with pytest.raises(
        DataError, match=rf"{server.url}/train/{SHARD}: downloaded 3 times, each time {found} where .* {expected}"
    ):
        whole(data)
    assert server.count(SHARD) == 3
    assert not cache.path(shard.sha256).exists() and list((cache.directory / "partial").iterdir()) == []


def test_a_shard_altered_during_the_run_never_reaches_the_reader(server, folder, tmp_path):
    before = whole(PreparedData.open(folder))
    data = opened(server.url + "/train", ShardCache(tmp_path / "a", BIG))
    assert np.array_equal(data.read(0, 100), before[:100])
    changed = bytearray((folder / SHARD).read_bytes())
    changed[7] ^= 1
    (folder / SHARD).write_bytes(changed)
    with pytest.raises(DataError, match=f"{SHARD}: downloaded 3 times, each time sha256"):
        whole(data)
    data.verify()  # what is here is right
    with pytest.raises(DataError, match=f"{SHARD}: downloaded 3 times"):
        data.verify(fetch=True)


def test_data_replaced_at_the_same_url_is_read_anew(server, folder, cache, byte_tokenizer):
    from running import write_prepared

    first = whole(opened(server.url + "/train", cache))
    shutil.rmtree(folder)
    write_prepared(folder, byte_tokenizer, seed=1, documents=300)
    second = whole(opened(server.url + "/train", cache))
    assert np.array_equal(second, whole(PreparedData.open(folder))) and not np.array_equal(first[:100], second[:100])


def test_equal_content_behind_two_urls_is_fetched_once(server, folder, cache):
    shutil.copytree(folder, folder.parent / "mirror")
    whole(opened(server.url + "/train", cache))
    whole(opened(server.url + "/mirror", cache))
    assert server.count(".bin") == 3


def test_verify_hashes_the_copies_and_brings_damaged_ones_anew(server, folder, cache, caplog):
    data = opened(server.url + "/train", cache)
    data.verify()
    assert server.count(".bin") == 0
    data.verify(fetch=True)
    assert server.count(".bin") == 3
    assert server.count(".idx") == len({shard.index_sha256 for shard in data.manifest.shards})  # equal files are one
    copy = cache.path(data.manifest.shards[1].sha256)
    damaged = bytearray(copy.read_bytes())
    damaged[0] ^= 1
    copy.write_bytes(damaged)
    data.verify(part=0, parts=2)
    assert "is damaged" not in caplog.text  # shard 1 belongs to the other part
    data.verify(part=1, parts=2)
    assert "is damaged; it is downloaded again" in caplog.text
    assert np.array_equal(whole(data), whole(PreparedData.open(folder))) and server.count(SHARD) == 2


@pytest.mark.parametrize(
    "url, message",
    [
        ("train/none", r"/train/none/manifest.json: missing; is this a directory written by tools/prepare_data.py"),
        ("", r"/manifest.json: missing; .* \(try /train\)"),
    ],
)
def test_a_wrong_url_says_what_is_missing(server, cache, url, message):
    with pytest.raises(DataError, match=message):
        opened(f"{server.url}/{url}", cache)


def test_a_damaged_manifest_or_tokenizer_names_the_url(server, folder, cache):
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest[:-20])
    with pytest.raises(DataError, match=rf"^{server.url}/train/manifest.json: not valid JSON"):
        opened(server.url + "/train", cache)
    (folder / "manifest.json").write_text(manifest)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(
        DataError, match=rf"^{server.url}/train/tokenizer is not the tokenizer that {server.url}/train was prepared"
    ):
        opened(server.url + "/train", cache)
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(DataError, match=r"/train/tokenizer/tokenizer.model: missing; upload it again"):
        opened(server.url + "/train", cache)


@pytest.mark.parametrize(
    "protocol, package", [("gs", "gcsfs"), ("s3", "s3fs"), ("hf", "huggingface_hub"), ("https", "aiohttp")]
)
def test_a_missing_backend_is_one_line_with_the_package(cache, monkeypatch, protocol, package):
    from fsspec.registry import _registry

    monkeypatch.setitem(sys.modules, package, None)
    for module in [
        name for name in sys.modules if name == "fsspec.implementations.http" or name.startswith("huggingface_hub.hf_file")
    ]:
        monkeypatch.delitem(sys.modules, module)
    for name in ("gs", "s3", "hf", "https"):
        if name in _registry:
            monkeypatch.delitem(_registry, name)
    with pytest.raises(
        DataError,
        match=rf'needs the package {package}, which is not installed; run pip install -c constraints.txt -e "\.\[remote\]"$',
    ):
        PreparedData.open(f"{protocol}://bucket/train", cache)
    with pytest.raises(DataError, match="Protocol not known: nonsense"):
        PreparedData.open("nonsense://bucket/train", cache)


def test_offline_mode_of_the_hub_is_an_error_at_once(cache):
    program = (
        "import sys, time; from pretrain.data.shards.reader import PreparedData; from pretrain.data.shards.shard_cache import ShardCache\n"
        "PreparedData.open('hf://datasets/somebody/corpus/train', ShardCache(sys.argv[1]))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program, str(cache.directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "trying again" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "pretrain.errors.DataError: hf://datasets/somebody/corpus/train/manifest.json: "
    )


def test_prefetch_brings_the_shards_of_a_stretch_and_reading_them_asks_nobody(server, folder, cache, wait_for_prefetching):
    data = opened(server.url + "/train", cache)
    starts = np.cumsum([0, *(shard.tokens for shard in data.manifest.shards)])
    data.prefetch(int(starts[1]), 1)
    wait_for_prefetching(data)
    assert [server.count(f"shard-0000{i}.bin") for i in range(3)] == [0, 1, 0] and server.count(".idx") == 1
    data.prefetch(int(starts[1]) - 1, 2)
    data.prefetch(data.tokens - 1, 10**9)
    data.prefetch(data.tokens, 10)
    data.prefetch(5, 0)
    wait_for_prefetching(data)
    assert server.count(".bin") == 3
    assert np.array_equal(whole(data), whole(PreparedData.open(folder))) and server.count(".bin") == 3
    PreparedData.open(folder).prefetch(0, 10)  # nothing to do


def test_prefetch_takes_no_more_than_half_of_the_cache_and_reports_failures_in_the_log(server, tmp_path, caplog, wait_for_prefetching):
    data = opened(server.url + "/train", ShardCache(tmp_path / "cache", 120_000))
    server.faults["shard-00000.bin"] = [403]
    data.prefetch(0, data.tokens)
    wait_for_prefetching(data)
    assert server.count(".bin") == 1
    assert "prefetch: " in caplog.text and "access refused" in caplog.text


def test_threads_that_prefetch_end_with_close_and_with_the_data(server, cache, wait_for_prefetching):
    server.faults[SHARD] = ["stall"]
    data = opened(server.url + "/train", cache, Patience(stall=60))
    data.prefetch(0, data.tokens)
    threads = data._url_files._prefetcher.threads
    assert server.stalled.wait(5) and [thread.is_alive() and thread.daemon for thread in threads] == [True, True]
    began = time.monotonic()
    data._url_files._prefetcher.close()
    assert not any(thread.is_alive() for thread in threads) and time.monotonic() - began < 20
    assert list((cache.directory / "partial").iterdir()) == []
    data.prefetch(0, data.tokens)  # closed: nothing happens
    server.faults.clear()
    data = opened(server.url + "/train", cache)
    data.prefetch(0, data.tokens)
    wait_for_prefetching(data)
    threads = data._url_files._prefetcher.threads
    assert any(thread.is_alive() for thread in threads)
    del data
    gc.collect()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def test_a_pickled_and_a_forked_reader_read_the_same(server, folder, cache):
    expected = whole(PreparedData.open(folder))
    data = opened(server.url + "/train", cache)
    data.read(0, 10)
    assert np.array_equal(whole(pickle.loads(pickle.dumps(data))), expected)
    shutil.rmtree(cache.directory / "files")
    (cache.directory / "files").mkdir()
    data = opened(server.url + "/train", cache)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def child() -> None:
        data.prefetch(0, data.tokens)
        send.send(whole(data))

    process = context.Process(target=child)
    process.start()
    assert receive.poll(20) and np.array_equal(receive.recv(), expected)
    process.join(10)
    assert process.exitcode == 0


def test_open_files_that_were_dropped_are_let_go_and_used_ones_are_touched(prepared, tmp_path, monkeypatch):
    cache = ShardCache(tmp_path / "cache", BIG)
    data = PreparedData.open(f"file://{prepared}", cache)
    whole(data)
    first, second, _ = (cache.path(shard.sha256) for shard in data.manifest.shards)
    os.utime(first, (0, 0))
    os.utime(second, (0, 0))

    def held() -> set[str]:
        paths = {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
        return {path for path in paths if str(cache.directory) in path}

    monkeypatch.setattr(open_files, "_SWEEP_SECONDS", 0.0)
    data._files._next_sweep = 0.0
    data.read(0, 10)
    assert first.stat().st_mtime > 0 and str(first) in held()
    second.unlink()
    time.sleep(0.01)
    data.read(0, 10)
    data.read(0, 10)
    assert held() == {str(first)}


_READER = """
import sys, time
import numpy as np
from pretrain.data.shards.shard_cache import ShardCache
from pretrain.data.shards.reader import PreparedData
url, local, folder, limit, seed, rounds = sys.argv[1:]
local = PreparedData.open(local)
data = PreparedData.open(url, ShardCache(folder, int(limit)))
random = np.random.default_rng(int(seed))
for _ in range(int(rounds)):
    start = int(random.integers(0, data.tokens - 500))
    assert np.array_equal(data.read(start, 500), local.read(start, 500))
assert int(rounds) or np.array_equal(data.read(0, data.tokens), local.read(0, data.tokens))
"""


def readers(server: FaultyServer, folder: Path, cache: Path, limit: int, count: int, rounds: int) -> list[subprocess.Popen]:
    arguments = [server.url + "/train", str(folder), str(cache), str(limit)]
    return [
        subprocess.Popen([sys.executable, "-c", _READER, *arguments, str(seed), str(rounds)], stderr=subprocess.PIPE, text=True)
        for seed in range(count)
    ]


def test_three_processes_fetch_each_shard_once(server, folder, tmp_path):
    for process in readers(server, folder, tmp_path / "cache", BIG, count=3, rounds=0):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert [server.count(f"shard-0000{i}.bin") for i in range(3)] == [1, 1, 1]


def test_concurrent_readers_of_three_times_the_limit_keep_to_it(server, folder, tmp_path, usage):
    shards = PreparedData.open(folder).manifest.shards
    limit = max(max(2 * shard.tokens for shard in shards), sum(2 * shard.tokens for shard in shards) // 3) + 100
    processes = readers(server, folder, tmp_path / "cache", limit, count=2, rounds=60)
    cache, samples = ShardCache(tmp_path / "cache", limit), []
    while any(process.poll() is None for process in processes):
        samples.append(usage(cache))
        time.sleep(0.002)
    for process in processes:
        assert process.returncode == 0, process.stderr.read()
    assert 0 < max(samples) <= limit and len(samples) > 50
    assert server.count(".bin") > 3  # they did push each other out


def test_a_reader_killed_in_mid_download_blocks_nobody(server, folder, cache):
    server.faults[SHARD] = ["stall"]
    (process,) = readers(server, folder, cache.directory, BIG, count=1, rounds=0)
    assert server.stalled.wait(30)
    data = opened(server.url + "/train", cache, Patience(stall=30))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(whole, data)
        time.sleep(0.2)
        assert not waiting.done() and server.count(SHARD) == 1
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert np.array_equal(waiting.result(timeout=20), whole(PreparedData.open(folder)))
    assert list((cache.directory / "partial").iterdir()) == []


@pytest.mark.parametrize("secret", ["https://user:password@host/d", "https://host/d?token=password"])
def test_secrets_in_a_url_are_not_shown(secret, cache, caplog):
    assert without_secrets(secret) == "https://host/d"


def test_names_are_joined_to_every_kind_of_url():
    assert join("s3://b/d/", "x") == "s3://b/d/x"
    assert join("https://h/d?sig=1", "x") == "https://h/d/x?sig=1"
    assert join("zip://d::s3://b/f.zip", "x") == "zip://d/x::s3://b/f.zip"
    assert join("simplecache::s3://b/d", "x") == "simplecache::s3://b/d/x"
    assert [is_url(path) for path in ("s3://b", "simplecache::s3://b", "/a/b", "a/b", "C:/x", Path("/a"), "a//b", "std::vec.txt")] == [
        True
    ] * 2 + [False] * 6


def test_no_secret_of_a_url_is_shown():
    for url, seen in (
        ("https://h/f.jsonl?se=2026-12-31T08:00:00Z&sig=SECRET", "https://h/f.jsonl"),
        ("https://user:SECRET@h/f?token=a::SECRET", "https://h/f"),
        ("zip://d/*.csv::https://h/f.zip?sig=SECRET", "zip://d/*.csv::https://h/f.zip"),
        ("filecache::s3://KEY:SECRET@bucket/a", "filecache::s3://bucket/a"),
    ):
        assert without_secrets(url) == seen
