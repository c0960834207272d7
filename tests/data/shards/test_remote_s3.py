"""Prepared data on an S3-compatible server (moto's, on the loopback), directly and through a proxy that misbehaves."""

import gzip
import io
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from faulty_server import faulty_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from object_server import object_server, use_server
from running import run_main

from pretrain.data.preparation.prepare import prepare
from pretrain.data.shards.reader import PreparedData
from pretrain.data.shards.remote_files import open_remote
from pretrain.data.shards.shard_cache import ShardCache
from pretrain.errors import DataError
from pretrain.observe.metrics import read_metrics
from pretrain.transfer import Patience, Remote

URL = "s3://corpus/code/train"
SHARD = "shard-00001.bin"
QUICK = Patience(stall=20, first_delay=0.02, longest_delay=0.1, give_up=20)
SHORT = Patience(stall=1.0, first_delay=0.02, longest_delay=0.1, give_up=1.0)
BIG = 10**9


@pytest.fixture(scope="session")
def endpoint(prepared):
    """The address of a server with the prepared data under URL."""
    with object_server("corpus") as (url, client):
        for file in prepared.rglob("*"):
            if file.is_file():
                client.put_object(Bucket="corpus", Key=f"code/train/{file.relative_to(prepared)}", Body=file.read_bytes())
        yield url


@pytest.fixture
def environment(endpoint, monkeypatch, tmp_path):
    """What a user sets. Returns a way to choose another endpoint."""

    def choose(url: str) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        s3fs.S3FileSystem.clear_instance_cache()

    use_server(monkeypatch, tmp_path, endpoint)
    import s3fs

    return choose


@pytest.fixture
def proxy(endpoint, environment):
    with faulty_server(upstream=endpoint) as proxy:
        environment(proxy.url)
        yield proxy


@pytest.fixture
def cache(tmp_path) -> ShardCache:
    return ShardCache(tmp_path / "cache", BIG)


def opened(cache: ShardCache, patience: Patience = QUICK) -> PreparedData:
    remote, manifest = open_remote(URL, cache, Remote(patience))
    return PreparedData(URL, manifest, remote)


def whole(data: PreparedData) -> np.ndarray:
    return data.read(0, data.tokens)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_windows_equal_the_local_copy(environment, prepared, tmp_path, data):
    local, remote = PreparedData.open(prepared), PreparedData.open(URL, ShardCache(tmp_path / "cache", 120_000))
    assert (remote.tokens, remote.documents, remote.fingerprint) == (local.tokens, local.documents, local.fingerprint)
    start = data.draw(st.integers(0, local.tokens))
    count = data.draw(st.integers(0, local.tokens - start))
    assert np.array_equal(remote.read(start, count), local.read(start, count))
    document = data.draw(st.integers(0, local.documents - 1))
    assert remote.document_span(document) == local.document_span(document)


def test_training_from_s3_equals_training_from_the_folder(environment, config_file, prepared):
    logged = []
    for name, path in (("local", str(prepared)), ("remote", URL)):
        code, printed = run_main(
            str(config_file), "run.steps=5", f"run.name={name}", f"data.sources=[{{path: '{path}', name: code}}]"
        )
        assert code == 0, printed
        run = config_file.parent / "runs" / name
        logged.append([(record["step"], record["loss"], record["grad_norm"]) for record in read_metrics(run)])
        (tokenizer,) = run.glob("checkpoints/*/tokenizer/tokenizer.json")
        assert tokenizer.read_bytes() == (prepared / "tokenizer" / "tokenizer.json").read_bytes()
    assert logged[0] == logged[1] and len(logged[0]) == 5


@pytest.mark.parametrize("faults", [[503, 500, 429], ["reset", "truncate", "wrong"]])
def test_what_passes_is_retried_by_us_and_logged(proxy, cache, prepared, faults, caplog):
    proxy.faults[SHARD] = list(faults)
    assert np.array_equal(whole(opened(cache)), whole(PreparedData.open(prepared)))
    assert proxy.count(SHARD) == len(faults) + 1  # the library's own retries are off
    assert caplog.text.count(f"{URL}/{SHARD}: ") == len(faults)


def test_a_transfer_that_stands_still_is_given_up_and_tried_again(proxy, cache, prepared, caplog):
    proxy.faults[SHARD] = ["stall"]
    data = opened(cache, Patience(stall=1.5, first_delay=0.02))
    assert np.array_equal(whole(data), whole(PreparedData.open(prepared)))
    assert f"{URL}/{SHARD}: " in caplog.text and "trying again" in caplog.text


def test_a_short_answer_to_a_range_is_continued_where_it_ended(proxy, cache, prepared):
    proxy.faults[SHARD] = ["half"]
    assert np.array_equal(whole(opened(cache)), whole(PreparedData.open(prepared)))
    assert proxy.count(SHARD) == 2


def test_a_server_that_stays_broken_ends_in_an_error(proxy, cache):
    data = opened(cache, SHORT)
    proxy.faults[SHARD] = [503] * 1000
    began = time.monotonic()
    with pytest.raises(DataError, match=rf"{URL}/{SHARD}: still failing after [1-9]\d* s of retries: .*; check the server"):
        whole(data)
    assert time.monotonic() - began < 30


def test_bytes_that_stay_wrong_name_the_url_and_both_hashes(proxy, cache):
    data = opened(cache)
    proxy.faults[SHARD] = ["wrong"] * 10
    expected = data.manifest.shards[1].sha256
    with pytest.raises(DataError, match=f"{URL}/{SHARD}: downloaded 3 times, each time sha256 (?!{expected}).* {expected}"):
        whole(data)


def test_refused_access_and_missing_objects_fail_at_once(proxy, cache, monkeypatch, environment, caplog):
    data = opened(cache)
    proxy.faults[SHARD] = [403]
    with pytest.raises(DataError, match=f"{URL}/{SHARD}: access refused .* set the credentials in the environment"):
        whole(data)
    proxy.faults[SHARD] = [404]
    with pytest.raises(DataError, match=f"{URL}/{SHARD}: missing, though manifest.json lists it"):
        whole(data)
    assert proxy.count(SHARD) == 2
    for url in ("s3://corpus/none", "s3://nobucket/train"):
        with pytest.raises(DataError, match=f"{url}/manifest.json: missing; is this a directory written by"):
            PreparedData.open(url, cache)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    environment(proxy.url)
    with pytest.raises(DataError, match="access refused .*redentials.* set the credentials"):
        opened(cache, QUICK)
    assert "trying again" not in caplog.text  # each retry is logged


def test_an_object_replaced_after_opening_never_reaches_the_reader(endpoint, environment, cache, prepared, tmp_path):
    import boto3

    client = boto3.client("s3")
    for file in prepared.rglob("*"):
        if file.is_file():
            client.put_object(Bucket="corpus", Key=f"other/{file.relative_to(prepared)}", Body=file.read_bytes())
    data = PreparedData.open("s3://corpus/other", cache)
    assert len(data.read(0, 10)) == 10
    content = Path(prepared, SHARD).read_bytes()
    client.put_object(Bucket="corpus", Key=f"other/{SHARD}", Body=content[::-1])
    remote, manifest = open_remote("s3://corpus/other", cache, Remote(QUICK))
    with pytest.raises(DataError, match=f"s3://corpus/other/{SHARD}: downloaded 3 times, each time sha256"):
        PreparedData("s3://corpus/other", manifest, remote).verify(fetch=True)
    client.put_object(Bucket="corpus", Key=f"other/{SHARD}", Body=content)
    assert np.array_equal(whole(data), whole(PreparedData.open(prepared)))


# Preparing from there.


@pytest.fixture
def corpus_on_s3(environment, texts_of_inputs, monkeypatch):
    """Objects under s3://corpus/text/, and the texts in them, in order."""
    import boto3

    monkeypatch.setattr("pretrain.data.preparation.inputs._STORE", Remote())  # without connections to another test's endpoint
    for name, content in texts_of_inputs[0].items():
        boto3.client("s3").put_object(Bucket="corpus", Key=f"text/{name}", Body=content)
    return texts_of_inputs[1]


@pytest.fixture(scope="session")
def texts_of_inputs() -> tuple[dict[str, bytes], list[str]]:
    texts = [f"document {number} " * (1 + number % 9) for number in range(600)]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    table = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": texts[400:]}), table, row_group_size=20)
    files = {
        "a.jsonl": b"".join(lines[:200]),
        "b.jsonl.gz": gzip.compress(b"".join(lines[200:400])),
        "c.parquet": table.getvalue(),
    }
    return files, texts


def texts_in(path) -> list[str]:
    data = PreparedData.open(path)
    spans = [data.document_span(number) for number in range(data.documents)]
    return [bytes(data.read(start, end - start)[:-1].tolist()).decode() for start, end in spans]


def test_a_corpus_is_prepared_from_s3(corpus_on_s3, byte_tokenizer, tmp_path):
    """D-D4: patterns and folders of objects; cut into units like local files, in several processes."""
    for number, url in enumerate(("s3://corpus/text", "s3://corpus/text/*.*")):
        prepare([url], byte_tokenizer, tmp_path / str(number), unit_bytes=8000, workers=1 + number)
        assert texts_in(tmp_path / str(number)) == corpus_on_s3
        assert PreparedData.open(tmp_path / str(number)).origin(199) == ("s3://corpus/text/a.jsonl", 199)
    assert prepare(["s3://corpus/text"], byte_tokenizer, tmp_path / "0", unit_bytes=8000).repeated
    with pytest.raises(DataError, match="s3://corpus/none: no such input file"):
        prepare(["s3://corpus/none"], byte_tokenizer, tmp_path / "out")


@pytest.mark.parametrize("faults", [[503, "reset"], ["half"], ["truncate", 429]])
def test_a_unit_is_begun_again_where_a_server_fails_in_passing(
    corpus_on_s3, proxy, byte_tokenizer, tmp_path, faults, monkeypatch
):
    """D-D4: an answer that ends early is no short document."""
    monkeypatch.setattr("pretrain.transfer.Patience", lambda: QUICK)
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        proxy.faults[f"text/{name}"] = list(faults)
    prepare(["s3://corpus/text"], byte_tokenizer, tmp_path / "out", unit_bytes=2000)
    assert texts_in(tmp_path / "out") == corpus_on_s3
    assert not any(proxy.faults.values())


def test_an_object_that_changes_meanwhile_is_named(corpus_on_s3, byte_tokenizer, tmp_path, monkeypatch):
    import boto3

    from pretrain.data.preparation import unit_work

    original = unit_work.PieceReader.documents

    def documents(self):
        boto3.client("s3").put_object(Bucket="corpus", Key="text/a.jsonl", Body=b'{"text": "other"}\n')
        return original(self)

    monkeypatch.setattr(unit_work.PieceReader, "documents", documents)
    monkeypatch.setattr("pretrain.data.preparation.prepare.sample_texts", lambda *_: iter(()))
    with pytest.raises(DataError, match="s3://corpus/text/a.jsonl: (was changed during the preparation|cannot be read)"):
        prepare(["s3://corpus/text/a.jsonl"], byte_tokenizer, tmp_path / "out")
