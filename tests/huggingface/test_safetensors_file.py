"""Our files are read by the safetensors library, the library's files by us, and what the library refuses is refused."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pretrain.errors import CheckpointError
from pretrain.huggingface.safetensors_file import (
    CODES,
    INDEX,
    MOST_TENSORS,
    SafetensorsFile,
    ShardedWriter,
    Spec,
    cut_into_shards,
    header_of,
)

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
listed = st.dictionaries(names, shapes, min_size=1, max_size=8)


def values(spec: Spec) -> torch.Tensor:
    """Any bits at all, NaN among them."""
    generator = torch.Generator().manual_seed(math.prod(spec.shape) + len(spec.name))
    raw = torch.randint(256, (math.prod(spec.shape) * spec.dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(spec.dtype).reshape(spec.shape)


def bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=listed, dtype=st.sampled_from(list(CODES)), shard_bytes=st.integers(1, 400))
def test_what_is_written_is_what_the_library_and_we_read(tmp_path_factory, tensors, dtype, shard_bytes):
    directory = tmp_path_factory.mktemp("written")
    specs = [Spec(name, shape, dtype) for name, shape in tensors.items()]
    with ShardedWriter(directory, specs, shard_bytes) as writer:
        for spec in specs:
            writer.write(spec.name, values(spec))
    assert {path.name for path in directory.glob("*.safetensors")} == writer.shards.keys()
    read = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert read.keys() == tensors.keys()
    for file, shard in writer.shards.items():
        assert len(shard) == 1 or sum(spec.nbytes for spec in shard) <= shard_bytes
        opened = SafetensorsFile(directory / file)
        assert list(opened.places) == [spec.name for spec in shard]
        with safe_open(directory / file, framework="pt") as theirs:
            assert theirs.metadata() == {"format": "pt"}
        for spec in shard:
            assert bits(opened.read(spec.name)) == bits(read[spec.name]) == bits(values(spec))
    assert (directory / INDEX).is_file() == (len(writer.shards) > 1)


def test_a_header_that_would_take_minutes_is_refused_before_it_is_read(tmp_path):
    """A header of a million empty tensors took 18 s and 1.3 GB to be refused."""
    one = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path = tmp_path / "x.safetensors"

    def opened(header: bytes) -> SafetensorsFile:
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        return SafetensorsFile(path)

    entry = json.dumps(one)
    many = ",".join(f'"{n}":{entry}' for n in range(MOST_TENSORS + 1))
    with pytest.raises(CheckpointError, match="x.safetensors: its header has 100,001 tensors, and 100,000 are read at most"):
        opened(("{" + many + "}").encode())
    with pytest.raises(CheckpointError, match="its header says 16,777,224 bytes, and 16,777,216 are read at most"):
        opened(b"{}" + b" " * (2**24 + 6))
    with pytest.raises(CheckpointError, match=r"name has more than 1,000 characters: a{80}\.\.\. \(1,001 characters\)"):
        opened(json.dumps({"a" * 1001: one}).encode())
    assert list(opened(json.dumps({"a" * 1000: one}).encode()).places) == ["a" * 1000]


def test_no_file_is_written_with_more_tensors_than_are_read():
    """One file of all tensors was legal, whatever their number."""
    specs = [Spec(str(n), (1,), torch.bfloat16) for n in range(MOST_TENSORS + 1)]
    assert [len(shard) for shard in cut_into_shards(specs, 10**9).values()] == [MOST_TENSORS, 1]


@pytest.mark.parametrize("dtype", CODES)
def test_what_the_library_wrote_is_read(tmp_path, dtype):
    tensors = {n: values(Spec(n, s, dtype)) for n, s in (("b", (3, 4)), ("a", ()), ("c", (0, 2)), ("d", (7,)))}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"anything": "else"})
    opened = SafetensorsFile(tmp_path / "x.safetensors")
    assert opened.places.keys() == tensors.keys()
    assert all(bits(opened.read(name)) == bits(tensor) for name, tensor in tensors.items())


def test_data_begins_at_a_multiple_of_eight():
    for length in range(1, 20):
        assert len(header_of([Spec("n" * length, (1,), torch.float32)])) % 8 == 0


def test_shards_are_filled_in_order_and_numbered():
    specs = [Spec(str(i), (size,), torch.bfloat16) for i, size in enumerate([10, 10, 30, 1, 1])]
    assert {name: [s.name for s in shard] for name, shard in cut_into_shards(specs, 40).items()} == {
        "model-00001-of-00003.safetensors": ["0", "1"],
        "model-00002-of-00003.safetensors": ["2"],
        "model-00003-of-00003.safetensors": ["3", "4"],
    }
    assert list(cut_into_shards(specs, 104)) == ["model.safetensors"]


def test_tensors_out_of_order_or_missing_are_a_defect(tmp_path):
    specs = [Spec(name, (2,), torch.float32) for name in ("a", "b")]
    for written in (["b"], ["a"]):
        with pytest.raises(RuntimeError), ShardedWriter(tmp_path, specs, 100) as writer:
            for name in written:
                writer.write(name, torch.zeros(2))
    with pytest.raises(RuntimeError), ShardedWriter(tmp_path, specs, 100) as writer:
        writer.write("a", torch.zeros(2, dtype=torch.float16))


@pytest.mark.parametrize("length", [0, 3, 8, 40, -1])
def test_a_truncated_file_is_named(tmp_path, length):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(9)}, path)
    os.truncate(path, length % path.stat().st_size)
    with pytest.raises(CheckpointError, match=f"^{path}: damaged: ") as caught:
        SafetensorsFile(path)
    assert "\n" not in str(caught.value)


HEADERS = [
    b"[]",
    b"{",
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    b'{"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}}',
    b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
    b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}}',
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_that_lies_is_refused(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=f"^{path}: damaged: "):
        SafetensorsFile(path)


def test_a_header_longer_than_the_file_allocates_nothing(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="damaged"):
        SafetensorsFile(path)


def test_a_file_that_is_cut_short_after_it_was_opened_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(9)}, path)
    opened = SafetensorsFile(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(CheckpointError, match=f"^{path}: was cut short while it was read$"):
        opened.read("a")


def test_an_index_says_where_every_tensor_is(tmp_path):
    specs = [Spec(str(i), (4,), torch.float32) for i in range(3)]
    with ShardedWriter(tmp_path, specs, 20) as writer:
        for spec in specs:
            writer.write(spec.name, torch.full((4,), float(spec.name)))
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 48
    assert index["weight_map"] == {str(i): f"model-{i + 1:05d}-of-00003.safetensors" for i in range(3)}
