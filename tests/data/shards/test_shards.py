"""The on-disk format: what is written is what is read, and nothing damaged is read."""

import builtins
import errno
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.shards.manifest import directory_name, dtype_for
from pretrain.data.shards.reader import PreparedData
from pretrain.data.shards.writer import ShardWriter
from pretrain.errors import DataError
from pretrain.storage import read_object, replace_text, sealed_json, staged_directory, unsealed

ROOT = Path(__file__).resolve().parents[3]
SHARD_FILES = ["shard-00003.bin", "shard-00003.idx", "shard-00003.src"]


@dataclass
class FakeTokenizer:
    vocab_size: int = 1000
    eod_id: int = 2
    fingerprint: str = "ab" * 32
    file: Path = Path("tokenizer.model")

    def save(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "tokenizer.json").write_text("{}")


def documents(count: int = 40, vocab_size: int = 1000, seed: int = 0) -> list[np.ndarray]:
    """Documents of 1 to 30 tokens, each closed by token 2."""
    random = np.random.default_rng(seed)
    return [np.append(random.integers(3, vocab_size, random.integers(0, 30)), 2) for _ in range(count)]


def write(output: Path, parts: list[np.ndarray], shard_tokens: int = 100, vocab_size: int = 1000, batch: int = 7) -> Path:
    with ShardWriter.create(output, FakeTokenizer(vocab_size), shard_tokens) as writer:
        for first in range(0, len(parts), batch):
            some = parts[first : first + batch]
            writer.add(np.concatenate(some), np.array([len(part) for part in some]))
    return output


@pytest.fixture
def prepared(tmp_path) -> Path:
    return write(tmp_path / "data", documents())


def edit_manifest(path: Path, **changes) -> None:
    content = unsealed((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(sealed_json({**content, **changes}))


def test_every_window_is_the_slice_of_the_concatenated_documents(prepared):
    stream = np.concatenate(documents())
    data = PreparedData.open(prepared)
    assert (data.tokens, data.documents, len(data.manifest.shards)) == (len(stream), 40, 7)
    for start in range(0, len(stream), 13):
        for count in (0, 1, 50, 99, 100, 250):
            count = min(count, len(stream) - start)
            window = data.read(start, count)
            assert window.dtype == np.int64
            assert np.array_equal(window, stream[start : start + count])
    assert np.array_equal(data.read(0, len(stream)), stream)


@pytest.mark.parametrize("start, count", [(-1, 2), (0, -1), (0, 10**9), (10**9, 1)])
def test_reading_outside_the_stream_is_an_index_error(prepared, start, count):
    with pytest.raises(IndexError, match="outside"):
        PreparedData.open(prepared).read(start, count)


def test_document_spans_are_where_the_documents_are(prepared):
    data = PreparedData.open(prepared)
    for number, expected in enumerate(documents()):
        start, end = data.document_span(number)
        assert np.array_equal(data.read(start, end - start), expected)
    numbers = np.random.default_rng(1).permutation(np.repeat(np.arange(40), 2))
    assert np.array_equal(np.stack(data.spans(numbers)).T, [data.document_span(n) for n in numbers.tolist()])
    assert [x.size for x in data.spans(np.empty(0, dtype=np.int64))] == [0, 0]
    for outside in (-1, 40):
        with pytest.raises(IndexError):
            data.document_span(outside)
        with pytest.raises(IndexError):
            data.spans(np.array([0, outside]))


def test_shards_end_at_documents_and_keep_to_their_size(tmp_path):
    lengths = [60, 40, 1, 250, 99, 2, 100]
    parts = [np.append(np.full(length - 1, 5), 2) for length in lengths]
    shards = PreparedData.open(write(tmp_path / "data", parts)).manifest.shards
    assert [shard.tokens for shard in shards] == [100, 1, 250, 99, 2, 100]
    assert [shard.documents for shard in shards] == [2, 1, 1, 1, 1, 1]


def test_how_documents_are_batched_changes_no_byte(tmp_path):
    contents = []
    for batch in (1, 3, 40):
        path = write(tmp_path / f"batch-{batch}", documents(), batch=batch)
        contents.append({file.name: file.read_bytes() for file in path.iterdir() if file.is_file()})
    assert contents[0] == contents[1] == contents[2]


def test_the_files_are_what_the_format_says(tmp_path):
    path = write(tmp_path / "data", [np.array([7, 300, 2]), np.array([2])])
    tokens, index = (path / "shard-00000.bin").read_bytes(), (path / "shard-00000.idx").read_bytes()
    assert tokens == bytes([7, 0, 44, 1, 2, 0, 2, 0])
    assert index == (3).to_bytes(8, "little") + (4).to_bytes(8, "little")
    origin = (path / "shard-00000.src").read_bytes()
    assert origin == bytes([0, 0, 0, 0, 0, 0, 0, 0]) + bytes([0, 0, 0, 0, 1, 0, 0, 0])
    assert unsealed((path / "manifest.json").read_bytes()) == {
        "format": "pretrain-shards",
        "version": 4,
        "dtype": "uint16",
        "vocab_size": 1000,
        "eod_id": 2,
        "eod_token": None,
        "tokenizer_sha256": "ab" * 32,
        "documents": 2,
        "tokens": 4,
        "inputs_sha256": hashlib.sha256((path / "inputs.json").read_bytes()).hexdigest(),
        "preparation": {},
        "shards": [
            {
                "file": "shard-00000.bin",
                "index_file": "shard-00000.idx",
                "origin_file": "shard-00000.src",
                "documents": 2,
                "tokens": 4,
                "bytes": 0,
                "longest": 3,
                "sha256": hashlib.sha256(tokens).hexdigest(),
                "index_sha256": hashlib.sha256(index).hexdigest(),
                "origin_sha256": hashlib.sha256(origin).hexdigest(),
            }
        ],
        "plan_sha256": None,
        "invalid_sha256": None,
        "tokenizer_config_sha256": None,
    }
    assert sorted(os.listdir(path)) == [
        "inputs.json",
        "manifest.json",
        "shard-00000.bin",
        "shard-00000.idx",
        "shard-00000.src",
        "tokenizer",
    ]


def test_ids_above_16_bits_are_kept(tmp_path):
    assert [dtype_for(size) for size in (1, 65536, 65537)] == ["uint16", "uint16", "uint32"]
    for vocab_size, itemsize in ((65536, 2), (65537, 4)):
        data = PreparedData.open(write(tmp_path / str(vocab_size), [np.array([vocab_size - 1, 2])], vocab_size=vocab_size))
        assert data.dtype.itemsize == itemsize
        assert data.read(0, 2).tolist() == [vocab_size - 1, 2]


@pytest.mark.parametrize(
    "tokens, lengths, message",
    [
        ([5, 2], [3], "sum to 2"),
        ([5, 2], [2, 0], "positive"),
        ([5, 2, 6], [2, 1], "end-of-document"),
        ([1000, 2], [2], "0..999"),
        ([-1, 2], [2], "0..999"),
    ],
)
def test_the_writer_refuses_what_would_not_be_documents(tmp_path, tokens, lengths, message):
    with pytest.raises(ValueError, match=message):
        with ShardWriter.create(tmp_path / "data", FakeTokenizer()) as writer:
            writer.add(np.array(tokens), np.array(lengths))
    assert not any(tmp_path.iterdir())


def test_the_fingerprint_is_of_the_content_not_of_the_place(prepared, tmp_path):
    fingerprint = PreparedData.open(prepared).fingerprint
    shutil.move(prepared, tmp_path / "elsewhere")
    assert PreparedData.open(tmp_path / "elsewhere").fingerprint == fingerprint
    other = write(tmp_path / "other", documents(seed=1))
    assert PreparedData.open(other).fingerprint != fingerprint
    assert len(fingerprint) == 64


def test_threads_read_the_same_tokens(prepared):
    stream, data = np.concatenate(documents()), PreparedData.open(prepared)
    starts = np.random.default_rng(1).integers(0, len(stream) - 60, 500)
    with ThreadPoolExecutor(8) as pool:
        windows = list(pool.map(lambda start: data.read(int(start), 60), starts))
    assert all(np.array_equal(window, stream[start : start + 60]) for start, window in zip(starts, windows))


def test_pickling_carries_the_place_and_not_the_tokens(tmp_path):
    data = PreparedData.open(write(tmp_path / "data", [np.append(np.full(100_000, 5), 2)], shard_tokens=2**20))
    data.read(0, 10)
    content = pickle.dumps(data)
    assert len(content) < 2000
    assert pickle.loads(content).read(99_999, 2).tolist() == [5, 2]


def test_every_document_knows_where_it_comes_from(prepared):
    data = PreparedData.open(prepared)
    assert [data.origin(number) for number in range(40)] == [("(no file)", number) for number in range(40)]
    for outside in (-1, 40):
        with pytest.raises(IndexError):
            data.origin(outside)
    (prepared / "inputs.json").write_text('["another"]')
    with pytest.raises(DataError, match=r"inputs\.json: content does not match its hash in manifest\.json"):
        PreparedData.open(prepared).origin(0)


@pytest.mark.slow
def test_ten_thousand_shards_are_opened_in_twice_the_time_of_looking_at_their_files(tmp_path):
    """python -m pytest tests/data/shards/test_shards.py -m slow -k ten_thousand -s"""
    path = write(tmp_path / "data", [np.array([5, 2])] * 10_000, shard_tokens=2, batch=10_000)
    opened, looked = [], []  # seconds of the CPU, in turns
    for _ in range(10):
        begin = time.process_time()
        data = PreparedData.open(path)
        assert data.read(10_001, 3).tolist() == [2, 5, 2]
        opened.append(time.process_time() - begin)
        begin = time.process_time()
        shards = len(json.loads((path / "manifest.json").read_text())["shards"])
        files = sum(file.stat().st_size > 0 for file in path.iterdir())
        looked.append(time.process_time() - begin)
    assert shards == len(data.manifest.shards) == 10_000 and files > 3 * shards
    print(f"opened and read in {min(opened):.3f} s; manifest parsed and files looked at in {min(looked):.3f} s")
    assert min(opened) < 2 * min(looked)


# Damage.


@pytest.mark.parametrize("name", SHARD_FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "too long"])
def test_a_shard_of_another_size_is_named_when_opening(prepared, name, damage):
    file = prepared / name
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes({"empty": b"", "truncated": content[:-1], "too long": content + b"\0"}[damage])
    with pytest.raises(DataError, match=rf"{name}: {damage}"):
        PreparedData.open(prepared)


@pytest.mark.parametrize("name", SHARD_FILES)
def test_one_flipped_bit_is_found_by_the_part_that_hashes_its_shard(prepared, name):
    PreparedData.open(prepared).verify()
    content = bytearray((prepared / name).read_bytes())
    content[5] ^= 1
    (prepared / name).write_bytes(content)
    data = PreparedData.open(prepared)
    for part in (1, 2):
        data.verify(part, 3)
    data.verify(0, 2)
    for part, parts in ((0, 1), (0, 3), (1, 2)):
        if 3 % parts == part:
            with pytest.raises(DataError, match=f"{name}: content does not match"):
                data.verify(part, parts)


def test_a_shard_that_shrinks_after_opening_is_named(prepared):
    data = PreparedData.open(prepared)
    (prepared / "shard-00000.bin").write_bytes(b"")
    with pytest.raises(DataError, match="shard-00000.bin: empty"):
        data.read(0, 1)


@pytest.mark.parametrize("name", ["shard-00000.bin", "shard-00000.idx"])
def test_a_file_that_shrinks_while_it_is_open_is_an_error_with_its_name(tmp_path, name):
    """D-D11: not a bus error of the process."""
    path = write(tmp_path / "data", [np.append(np.full(5000, 5), 2)] * 20, shard_tokens=10**6)
    code = f"""
import os
from pretrain.data.shards.reader import PreparedData
from pretrain.errors import DataError
data = PreparedData.open({str(path)!r})
data.read(0, 10), data.document_ends(0, 1)
os.truncate({str(path / name)!r}, 8)
try:
    data.read(90_000, 5000), data.document_ends(0, 20)
except DataError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done
    assert done.stdout.startswith(f"{path / name}: truncated: it has 8 bytes now and is read up to byte ")


def test_a_file_that_cannot_be_read_any_more_is_named(prepared, monkeypatch):
    """D-D11: an I/O error of a network disk."""
    data = PreparedData.open(prepared)
    data.read(0, 10)
    monkeypatch.setattr(os, "pread", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(DataError, match="shard-00000.bin: cannot be read: Input/output error"):
        data.read(0, 10)


def test_files_stay_open_beyond_256_shards(tmp_path, monkeypatch):
    """D-D10: random reads over many shards open each file once."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    data = PreparedData.open(write(tmp_path / "data", [np.array([5, 2])] * 300, shard_tokens=2, batch=300))
    places = np.random.default_rng(0).permutation(600)
    for place in places.tolist():
        data.read(place, 1)
    opened = []
    for module, name in ((os, "open"), (builtins, "open")):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda path, *more, _open=original, **rest: opened.append(path) or _open(path, *more, **rest)
        )
    found = [data.read(place, 1)[0] for place in places.tolist()]
    assert not [path for path in opened if str(path).endswith(".bin")]
    assert found == np.tile([5, 2], 300)[places].tolist()


def test_reading_makes_do_with_few_open_files(tmp_path, monkeypatch):
    """D-D10: where the limit cannot be raised, files are closed and opened again; the soft limit is raised where it can be."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    write(tmp_path / "data", [np.array([5, 2])] * 300, shard_tokens=2, batch=300)
    code = f"""
import os, resource, sys
import numpy as np
from pretrain.data.shards.reader import PreparedData
resource.setrlimit(resource.RLIMIT_NOFILE, (100, int(sys.argv[1])))
sources = [PreparedData.open({str(tmp_path / "data")!r}) for _ in range(3)]
for place in np.random.default_rng(0).permutation(600).tolist():
    assert [data.read(place, 1)[0] for data in sources] == [[5, 2][place % 2]] * 3
print(len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    for hard, least, most in ((100, 40, 100), (4000, 900, 1000)):
        done = subprocess.run([sys.executable, "-c", code, str(hard)], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert least < int(done.stdout.split()[0]) < most


@pytest.mark.parametrize(
    "ends, message", [([30, 20, 40], "do not rise"), ([10, 10, 40], "do not rise"), ([10, 20, 30], "ends at token 30 of 40")]
)
def test_documents_that_do_not_rise_to_the_end_are_refused_whatever_the_hash(tmp_path, ends, message):
    """D-D1: an index that was written wrong has the right hash."""
    path = write(tmp_path / "data", [np.append(np.full(length - 1, 5), 2) for length in (10, 10, 20)])
    content = np.array(ends, dtype="<u8").tobytes()
    (path / "shard-00000.idx").write_bytes(content)
    shards = unsealed((path / "manifest.json").read_bytes())["shards"]
    edit_manifest(path, shards=[{**shards[0], "index_sha256": hashlib.sha256(content).hexdigest()}])
    data = PreparedData.open(path)
    for check in (data.verify, data.verify_documents):
        with pytest.raises(DataError, match=rf"shard-00000\.idx: .*{message}"):
            check()


def test_an_end_token_that_is_not_the_one_of_the_documents_is_found(prepared):
    """D-D2"""
    content = unsealed((prepared / "manifest.json").read_bytes())
    (prepared / "manifest.json").write_text(sealed_json(content | {"eod_id": 3}))
    with pytest.raises(
        DataError, match=r"shard-00000\.bin: ends with token 2, but manifest\.json says that documents end with 3"
    ):
        PreparedData.open(prepared).verify()


def test_no_flipped_bit_in_a_manifest_goes_unnoticed(prepared):
    """Each byte of it, one bit: refused by name, or (white space) the same manifest."""
    file = prepared / "manifest.json"
    content, manifest = file.read_bytes(), PreparedData.open(prepared).manifest
    random = np.random.default_rng(0)
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 1 << random.integers(8)
        file.write_bytes(damaged)
        try:
            assert PreparedData.open(prepared).manifest == manifest, place
        except DataError as error:
            assert "\n" not in str(error) and str(prepared) in str(error)


def test_missing_paths_are_told_apart(tmp_path):
    with pytest.raises(DataError, match="absent: no such directory"):
        PreparedData.open(tmp_path / "absent")
    with pytest.raises(DataError, match="manifest.json: missing"):
        PreparedData.open(tmp_path)
    with staged_directory(tmp_path / "both") as parent:
        write(parent / "train", documents(3))
    with pytest.raises(DataError, match=r"did you mean .*both/train\?"):
        PreparedData.open(tmp_path / "both")


@pytest.mark.parametrize("path, name", [
    ("data/web", "web"),
    ("data/web/train", "web"),
    ("train", "train"),
    ("s3://bucket/web/validation/", "web"),
    ("https://user:word@host/web/train?signature=a/secret", "web"),
    ("https://host/web?signature=a/secret", "web"),
])  # fmt: skip
def test_the_name_of_data_is_that_of_its_directory_and_holds_no_secret(path, name):
    """A source behind a signed URL was named by its signature, in logs and trackers."""
    assert directory_name(path) == name


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": "other"}', "[" * 100_000, '"\\ud800"'])
def test_a_manifest_that_is_none_is_refused(prepared, content):
    (prepared / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json: not ") as caught:
        PreparedData.open(prepared)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 3}, "manifest.json: format version 3, this program reads 4; prepare the data again"),
        ({"version": True}, "format version True"),
        ({"dtype": "float16"}, "dtype must be one of uint16, uint32, got 'float16'"),
        ({"dtype": ["uint16"]}, "dtype must be one of"),
        ({"vocab_size": -5}, "vocab_size must be an integer of at least 1, got -5"),
        ({"vocab_size": 70000}, "uint16 cannot hold a vocabulary of 70000"),
        ({"eod_id": 1000}, "eod_id 1000 is outside"),
        ({"eod_id": 1.0}, "eod_id must be an integer"),
        ({"tokens": True}, "tokens must be an integer"),
        ({"tokens": 5}, "tokens is 5 but the shards have"),
        ({"documents": 41}, "documents is 41 but the shards have 40"),
        ({"tokenizer_sha256": "xyz"}, "tokenizer_sha256 must be a sha256"),
        ({"shards": []}, "shards must be a non-empty list"),
        ({"shards": [3]}, r"shards\[0\] must be an object"),
        ({"inputs_sha256": 3}, "inputs_sha256 must be a sha256"),
        ({"preparation": []}, "preparation must be an object"),
        ({"preparation": {"options": []}}, "preparation.options must be a single value"),
        ({"extra": 1}, "extra is not a known key"),
    ],
)
def test_a_manifest_is_read_strictly(prepared, change, message):
    edit_manifest(prepared, **change)
    with pytest.raises(DataError, match=message):
        PreparedData.open(prepared)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokens": -3}, r"shards\[1\].tokens must be an integer of at least 1, got -3"),
        ({"file": "../outside.bin"}, r"shards\[1\].file must be a plain file name"),
        ({"index_file": "/etc/passwd"}, r"shards\[1\].index_file must be a plain file name"),
        ({"origin_file": "a/b"}, r"shards\[1\].origin_file must be a plain file name"),
        ({"bytes": -1}, r"shards\[1\].bytes must be an integer of at least 0"),
        ({"longest": 0}, r"shards\[1\].longest must be an integer of at least 1"),
        ({"origin_sha256": "x"}, r"shards\[1\].origin_sha256 must be a sha256"),
        ({"sha256": None}, r"shards\[1\].sha256 must be a sha256"),
        ({"surprise": 1}, r"shards\[1\].surprise is not a known key"),
    ],
)
def test_a_shard_entry_is_read_strictly(prepared, change, message):
    shards = unsealed((prepared / "manifest.json").read_bytes())["shards"]
    shards[1].update(change)
    edit_manifest(prepared, shards=shards)
    with pytest.raises(DataError, match=message):
        PreparedData.open(prepared)


# Publication.


def test_an_existing_output_is_left_alone(prepared):
    before = (prepared / "manifest.json").read_bytes()
    with pytest.raises(DataError, match="data: already exists"):
        write(prepared, documents(3))
    assert (prepared / "manifest.json").read_bytes() == before


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "data").mkdir()
    assert PreparedData.open(write(tmp_path / "data", documents(3))).documents == 3


def test_a_link_to_an_empty_directory_is_refused_before_the_work(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "data").symlink_to("there")
    with pytest.raises(DataError, match="data: is a link, which a finished directory cannot replace; give the place that it leads to"):
        write(tmp_path / "data", documents(3))


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "data").write_text("mine")
    with pytest.raises(DataError, match="data: already exists"):
        write(tmp_path / "data", documents(3))


def test_nothing_is_visible_before_the_end_nor_after_a_failure(tmp_path):
    with pytest.raises(RuntimeError, match="power"):
        with ShardWriter.create(tmp_path / "data", FakeTokenizer(), 100) as writer:
            writer.add(np.array([5, 2]), np.array([2]))
            assert not (tmp_path / "data").exists()
            raise RuntimeError("power")
    assert not any(tmp_path.iterdir())


def test_writing_no_document_is_an_error(tmp_path):
    with pytest.raises(DataError, match="data: no documents"):
        write(tmp_path / "data", [])
    assert not any(tmp_path.iterdir())


def test_of_two_racing_writers_the_first_wins_whole(tmp_path):
    first, second = documents(20, seed=1), documents(30, seed=2)
    with pytest.raises(DataError, match="was created by another process"):
        with ShardWriter.create(tmp_path / "data", FakeTokenizer()) as slow:
            slow.add(np.concatenate(first), np.array([len(part) for part in first]))
            write(tmp_path / "data", second)
    data = PreparedData.open(tmp_path / "data")
    data.verify()
    assert data.documents == 30
    assert os.listdir(tmp_path) == ["data"]


def test_a_file_that_cannot_be_replaced_is_as_it_was_and_nothing_is_left_beside_it(tmp_path):
    """Only the system's errors removed the hidden file."""
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "a.json", "a\ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "{}")]


def test_json_that_nests_too_deeply_is_no_object(tmp_path):
    """It was a traceback."""
    (tmp_path / "a.json").write_text("[" * 100_000)
    assert read_object(tmp_path / "a.json") == {}
