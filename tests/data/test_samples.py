"""Every way of cutting documents into samples: every token is a target once, documents stay whole, and the index is right."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pretrain.data.packing as packing
from pretrain.conventions import IGNORED
from pretrain.data.packing import open_index, pack
from pretrain.data.samples import Packed, Windows
from pretrain.data.shards.reader import PreparedData
from pretrain.data.shards.writer import ShardWriter
from pretrain.data.tasks import documents_of
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import DataError

EOD = 256
ONCE = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, tokenizer: Path, lengths: list[int], shard_tokens: int = 10**6) -> PreparedData:
    """Documents of so many tokens each (the end of document included), their tokens counting up modulo 251."""
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1]) % 251
    tokens[ends - 1] = EOD
    with ShardWriter.create(path, load_tokenizer(tokenizer), shard_tokens) as writer:
        writer.add(tokens, np.array(lengths))
    return PreparedData.open(path)


def samples_of(data: PreparedData, packing: str, length: int, cache: Path, boundary_loss: bool = True) -> Windows | Packed:
    if packing == "concatenate":
        return Windows("a", data, length, boundary_loss)
    return Packed("a", data, length, open_index(data, packing, length, cache), boundary_loss)


def read(samples: Windows | Packed, index: int) -> tuple[np.ndarray, np.ndarray]:
    tokens, targets = np.full((2, 1, samples.sequence_length), -7)
    samples.fill(np.array([index]), np.array([0]), tokens, targets)
    return tokens[0], targets[0]


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@pytest.mark.parametrize("mode", ["best_fit", "padded"])
@pytest.mark.parametrize("boundary_loss", [True, False])
@ONCE
@given(lengths=lengths, length=st.integers(2, 24), number=st.integers(0, 10**9), shard_tokens=st.sampled_from([50, 10**6]))
def test_packed_samples_have_every_token_once_and_every_inner_target_once(
    tmp_path, byte_tokenizer, mode, boundary_loss, lengths, length, number, shard_tokens
):
    folder = tmp_path / f"{number}-{len(list(tmp_path.iterdir()))}"
    data = write(folder, byte_tokenizer, lengths, shard_tokens)
    samples = samples_of(data, mode, length, tmp_path / "cache", boundary_loss)
    stream, seen, predicted = data.read(0, data.tokens), np.zeros(data.tokens, int), np.zeros(data.tokens, int)
    begins = np.concatenate(([0], np.cumsum(lengths)))
    for index in range(len(samples)):
        tokens, targets = read(samples, index)
        pieces = samples.pieces(index)
        places = np.concatenate([np.arange(start, start + size) for start, size in pieces])
        used = len(places)
        assert tokens.tolist() == stream[places].tolist() + [EOD] * (length - used)
        seen[places] += 1
        for i, place in enumerate(places):
            inside = stream[place] != EOD
            next_piece = i + 1 < used and not inside
            expected = stream[place + 1] if inside else stream[places[i + 1]] if next_piece and boundary_loss else IGNORED
            assert targets[i] == expected
            if inside:
                predicted[place + 1] += 1
        assert (targets[used:] == IGNORED).all()
        for start, size in pieces:
            # A document is cut only when it is longer than a sample, and then at multiples of the sample's length.
            document = np.searchsorted(begins, start, side="right") - 1
            whole = (start, size) == (begins[document], lengths[document])
            assert whole or (lengths[document] > length and (start - begins[document]) % length == 0)
            assert len(pieces) == 1 or mode == "best_fit"
    assert (seen == 1).all()
    inner = np.ones(data.tokens, bool)
    inner[begins[:-1]] = False
    assert predicted[inner].tolist() == [1] * int(inner.sum())
    assert samples.index.fill == data.tokens / (len(samples) * length)
    assert samples.index.cut_documents == sum(n > length for n in lengths)


@ONCE
@given(lengths=lengths, length=st.integers(2, 24), number=st.integers(0, 10**9))
def test_the_samples_of_a_document_are_found_by_its_place_in_the_stream(tmp_path, byte_tokenizer, lengths, length, number):
    data = write(tmp_path / f"{number}-{len(list(tmp_path.iterdir()))}", byte_tokenizer, [*lengths, 30])
    for mode in ("concatenate", "best_fit", "padded"):
        samples = samples_of(data, mode, length, tmp_path / "cache")
        holders: dict[int, set[int]] = {}
        for index, (start, size) in itertools.chain.from_iterable(
            ((i, piece) for piece in samples.pieces(i)) for i in range(len(samples))
        ):
            for place in range(start, start + size):
                holders.setdefault(data.document_at(place), set()).add(index)
        for document in range(data.documents):
            assert samples.find(*data.document_span(document)).tolist() == sorted(holders.get(document, set()))


@ONCE
@given(st.data())
def test_packing_is_best_fit_decreasing(data):
    capacity = data.draw(st.integers(1, 40))
    sizes = np.array(data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=80)))
    sample_of, count = pack(sizes, capacity)
    rooms: list[int] = []  # the textbook's algorithm, one piece at a time
    for size in sorted(sizes.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - size)
    assert count == len(rooms)
    assert sorted((capacity - np.bincount(sample_of, weights=sizes)).astype(int).tolist()) == sorted(rooms)


def test_best_fit_wastes_little_on_documents_of_natural_lengths():
    # Log-normal with a median of 400 tokens, as web text roughly is.
    sizes = np.minimum(2048, np.random.default_rng(0).lognormal(6, 1.2, 65_536).astype(int) + 1)
    _, count = pack(sizes, 2048)
    assert sizes.sum() / (count * 2048) > 0.999


def test_groups_of_documents_are_packed_each_by_itself(tmp_path, byte_tokenizer, monkeypatch):
    monkeypatch.setattr(packing, "GROUP", 10)
    sizes = np.random.default_rng(1).integers(1, 30, 95).tolist()
    data = write(tmp_path / "data", byte_tokenizer, sizes, shard_tokens=300)
    samples = samples_of(data, "best_fit", 16, tmp_path / "cache")
    groups = [{data.document_at(start) // 10 for start, _ in samples.pieces(i)} for i in range(len(samples))]
    assert all(len(group) == 1 for group in groups)
    assert [min(group) for group in groups] == sorted(min(group) for group in groups)
    assert sum(size for i in range(len(samples)) for _, size in samples.pieces(i)) == data.tokens


def test_documents_are_numbered_from_their_end_tokens_and_padding_is_alone():
    tokens = np.array([[5, 6, EOD, 7, EOD, EOD, EOD], [EOD, 1, 1, 1, 1, 1, 1]])
    assert documents_of(tokens, EOD).tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]


def test_windows_leave_out_the_first_token_of_documents_on_request(tmp_path, byte_tokenizer):
    data = write(tmp_path / "data", byte_tokenizer, [5, 3, 9, 4])
    tokens, targets = read(samples_of(data, "concatenate", 20, tmp_path), 0)
    assert targets.tolist() == data.read(1, 20).tolist()
    tokens, without = read(samples_of(data, "concatenate", 20, tmp_path, boundary_loss=False), 0)
    assert np.flatnonzero(without == IGNORED).tolist() == [4, 7, 16]
    assert (without[without != IGNORED] == targets[without != IGNORED]).all()


def _open(path: str, cache: str) -> int:
    return open_index(PreparedData.open(path), "best_fit", 16, Path(cache)).samples


def test_processes_that_come_together_make_the_index_once(tmp_path, byte_tokenizer):
    data = write(tmp_path / "data", byte_tokenizer, np.random.default_rng(0).integers(1, 60, 3000).tolist())
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        counts = pool.starmap(_open, [(str(tmp_path / "data"), str(tmp_path / "cache"))] * 4)
    assert len(set(counts)) == 1
    folder = tmp_path / "cache" / "packing"
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1
    samples = samples_of(data, "best_fit", 16, tmp_path / "cache")
    samples.pieces(3)
    assert pickle.loads(pickle.dumps(samples)).pieces(3) == samples.pieces(3)


def test_a_damaged_index_is_refused_by_name(tmp_path, byte_tokenizer):
    data = write(tmp_path / "data", byte_tokenizer, [5] * 50)
    samples = samples_of(data, "best_fit", 16, tmp_path / "cache")
    samples.index.verify()
    file = samples.index.path / "pieces.idx"
    content = bytearray(file.read_bytes())
    content[9] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"pieces.idx: content does not match its hash"):
        samples.index.verify()
    file.write_bytes(content[:-3])
    with pytest.raises(DataError, match=r"pieces.idx: damaged: not \d+ bytes; remove .*cache.*, and it is made again"):
        samples_of(data, "best_fit", 16, tmp_path / "cache")
    (samples.index.path / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="not a packing index"):
        samples_of(data, "best_fit", 16, tmp_path / "cache")


def test_a_damaged_document_index_is_never_packed(tmp_path, byte_tokenizer):
    """D-D1: not even once; and the index of good data is made when they are restored."""
    good = write(tmp_path / "data", byte_tokenizer, [5, 9, 30, 4] * 20)
    file = tmp_path / "data" / "shard-00000.idx"
    content = np.fromfile(file, "<u8")
    damaged = content.copy()
    damaged[5] -= 3
    for mode in ("best_fit", "padded"):
        damaged.tofile(file)
        with pytest.raises(DataError, match=r"shard-00000\.idx: content does not match its hash in manifest\.json"):
            samples_of(good, mode, 16, tmp_path / "cache")
        assert not list((tmp_path / "cache" / "packing").glob("[!.]*"))
        content.tofile(file)
        expected = samples_of(good, mode, 16, tmp_path / "other")
        assert samples_of(good, mode, 16, tmp_path / "cache").index.content == expected.index.content
        shutil.rmtree(tmp_path / "cache")


def test_an_index_is_of_where_documents_end(tmp_path, byte_tokenizer):
    """D-D1: equal tokens with other documents are packed otherwise, and a run knows it."""
    one = write(tmp_path / "one", byte_tokenizer, [8] * 40)
    tokenizer, tokens = load_tokenizer(byte_tokenizer), one.read(0, 320)
    with ShardWriter.create(tmp_path / "two", tokenizer, 10**6) as writer:
        writer.add(tokens, np.full(20, 16))
    two = PreparedData.open(tmp_path / "two")
    assert one.fingerprint == two.fingerprint and one.content != two.content
    first, second = (samples_of(data, "best_fit", 24, tmp_path / "cache") for data in (one, two))
    assert first.index.path != second.index.path and first.index.content != second.index.content
    differing = {name for name, value in first.identity(3).items() if second.identity(3)[name] != value}
    assert differing == {"sources.3.documents", "sources.3.path", "packing.index.3"}


@pytest.mark.parametrize("name", ["starts.idx", "pieces.idx", "samples.idx"])
def test_an_index_that_shrinks_while_it_is_open_is_an_error_with_its_name(tmp_path, byte_tokenizer, name):
    """D-D11: the packing index too is read, not mapped."""
    write(tmp_path / "data", byte_tokenizer, [500] * 2000)
    code = f"""
import os
from pathlib import Path
import numpy as np
from pretrain.data.packing import open_index
from pretrain.data.shards.reader import PreparedData
from pretrain.errors import DataError
index = open_index(PreparedData.open({str(tmp_path / "data")!r}), "best_fit", 500, Path({str(tmp_path / "cache")!r}))
index.pieces(np.array([0])), index.find(0, 500)
os.truncate(index.path / {name!r}, 16)
try:
    index.pieces(np.array([1999])), index.find(999_500, 1_000_000)
except DataError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done
    assert f"{name}: truncated: it has 16 bytes now and is read up to byte " in done.stdout


def test_no_flipped_bit_in_the_manifest_of_an_index_goes_unnoticed(tmp_path, byte_tokenizer):
    data = write(tmp_path / "data", byte_tokenizer, [5, 9, 30] * 20)
    index = samples_of(data, "best_fit", 16, tmp_path / "cache").index
    file = index.path / "manifest.json"
    content, random = file.read_bytes(), np.random.default_rng(0)
    for place in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[place] ^= 1 << random.integers(8)
        file.write_bytes(damaged)
        try:
            assert samples_of(data, "best_fit", 16, tmp_path / "cache").index == index, place
        except DataError as error:
            assert "remove it, and it is made again" in str(error) and str(index.path) in str(error)


def test_an_index_that_cannot_be_written_is_an_error_that_names_the_key(tmp_path, byte_tokenizer):
    data = write(tmp_path / "data", byte_tokenizer, [5] * 50)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match=r"cannot be written: Not a directory; set data.cache.dir"):
        samples_of(data, "best_fit", 16, tmp_path / "file")


@pytest.mark.parametrize("packing", ["concatenate", "best_fit", "padded"])
def test_many_samples_are_filled_as_each_of_them_alone(tmp_path, byte_tokenizer, packing):
    data = write(tmp_path / "data", byte_tokenizer, [3, 40, 1, 17, 90, 5, 5, 23, 2, 64], 100)
    samples = samples_of(data, packing, 16, tmp_path / "cache", boundary_loss=False)
    order = np.random.default_rng(0).permutation(len(samples))
    tokens, targets = np.full((2, len(order), 16), -7)
    samples.fill(order, np.arange(len(order)), tokens, targets)
    for row, sample in enumerate(order):
        assert [tokens[row].tolist(), targets[row].tolist()] == [part.tolist() for part in read(samples, sample)]


def test_documents_of_a_row_count_from_nought_whatever_stands_in_the_others():
    tokens = np.array([[EOD, 1, EOD, EOD, 2], [1, 2, 3, 4, EOD], [5, EOD, 6, 7, 8]])
    assert documents_of(tokens, EOD).tolist() == [[0, 1, 1, 2, 3], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]
    assert documents_of(tokens[:0], EOD).shape == (0, 5)


@pytest.mark.parametrize("starts", [[-1, 3], [3, 200]])
def test_stretches_outside_the_stream_are_refused(tmp_path, byte_tokenizer, starts):
    data = write(tmp_path / "data", byte_tokenizer, [50, 50, 100], 100)
    with pytest.raises(IndexError):
        data.read_joined(np.array(starts), np.array([2, 2]))
