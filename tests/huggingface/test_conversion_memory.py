"""Conversion holds one entry of the weight map, never a model: counted on small ones, measured on one of 2 GB."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from converting import SMALL, write

from pretrain.checkpoint import planners
from pretrain.checkpoint.averaging import average_checkpoints
from pretrain.checkpoint.payload import Payload
from pretrain.checkpoint.planners import on_meta
from pretrain.checkpoint.save import write_checkpoint
from pretrain.distributed.ranks import ALONE
from pretrain.huggingface.directory import HfDirectory, plan_weights
from pretrain.huggingface.export_model import export
from pretrain.huggingface.import_model import import_model
from pretrain.huggingface.safetensors_file import SafetensorsFile
from pretrain.models.families import complete

MB = 2**20
ROOT = Path(__file__).resolve().parents[2]


class Alive:
    """Counts the bytes of tensors that a method returned and somebody still holds."""

    def __init__(self, monkeypatch, owner, name: str) -> None:
        self.now, self.most, self.calls, self.total = 0, 0, 0, 0
        method = getattr(owner, name)

        def counting(*arguments):
            result = method(*arguments)
            for tensor in result.values() if isinstance(result, dict) else result if isinstance(result, list) else [result]:
                self.add(tensor)
            return result

        monkeypatch.setattr(owner, name, counting)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.calls += 1
        self.total += storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self.drop, storage.nbytes())

    def drop(self, size: int) -> None:
        self.now -= size


def test_an_export_holds_the_tensors_of_one_entry_at_a_time(byte_tokenizer, tmp_path, monkeypatch):
    model = dataclasses.replace(SMALL, layers=6)
    checkpoint = write(tmp_path / "checkpoint", byte_tokenizer, model)
    largest = max(t.nbytes for t in Payload(checkpoint).read_all("model.").values())
    alive = Alive(monkeypatch, Payload, "read")
    done = export(checkpoint, tmp_path / "out", shard_bytes=20_000)
    assert alive.total == 4 * done.parameters
    assert alive.most == largest < alive.total / 5


def test_an_import_holds_the_tensors_of_one_entry_at_a_time(byte_tokenizer, tmp_path, monkeypatch):
    model = dataclasses.replace(SMALL, layers=6)
    export(write(tmp_path / "checkpoint", byte_tokenizer, model), tmp_path / "out", shard_bytes=20_000)
    theirs, ours = Alive(monkeypatch, SafetensorsFile, "read"), Alive(monkeypatch, HfDirectory, "read")
    done = import_model(tmp_path / "out", tmp_path / "imported")
    assert theirs.total == ours.total == 4 * done.parameters
    assert max(theirs.most, ours.most) == 4 * 257 * 32 < ours.total / 5


def test_a_mean_holds_one_tensor_of_one_checkpoint_at_a_time(byte_tokenizer, tmp_path, monkeypatch):
    model = dataclasses.replace(SMALL, layers=6)
    paths = [write(tmp_path / str(n), byte_tokenizer, model) for n in range(4)]
    tensors = Payload(paths[0]).read_all("model.").values()
    alive = Alive(monkeypatch, Payload, "read")
    done = average_checkpoints(paths, tmp_path / "mean")
    assert alive.total == 4 * 4 * done.parameters
    assert alive.most == max(t.nbytes for t in tensors) < alive.total / 30


def test_an_imported_tensor_lies_in_pieces_of_rows_that_are_read_one_by_one(byte_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(planners, "PIECE_BYTES", 1000)
    monkeypatch.setattr(planners, "FILE_BYTES", 30_000)
    checkpoint = write(tmp_path / "checkpoint", byte_tokenizer)
    export(checkpoint, tmp_path / "out")
    import_model(tmp_path / "out", tmp_path / "imported")
    pieces = Payload(tmp_path / "imported").items["model.embedding.weight"].chunks
    assert [(p.offsets[0], p.sizes[0]) for p in pieces] == [(i, min(8, 257 - i)) for i in range(0, 257, 8)]
    assert len(list((tmp_path / "imported").glob("*.distcp"))) > 3
    ours, again = Payload(checkpoint).read_all("model."), Payload(tmp_path / "imported").read_all("model.")
    assert ours.keys() == again.keys() and all(torch.equal(again[name], tensor) for name, tensor in ours.items())


BIG = dataclasses.replace(SMALL, dim=1536, layers=14, heads=16, kv_heads=4, ffn_dim=5632, vocab_size=32000, tie_embeddings=True)


def big_checkpoint(target: Path, tokenizer: Path) -> int:
    """A checkpoint of 2 GB, in whole tensors as a single process saves it; the bytes of its largest tensor."""
    model = complete(BIG, 96)
    tensors = on_meta({f"model.{name}": shape for name, shape in plan_weights(model).ours.items()}, torch.float32)
    state = {"step": 10, "samples": 1, "tokens": 1, "world_size": 1, "layout": "single", "model": dataclasses.asdict(model)}
    current: dict[str, torch.Tensor] = {}

    def read(name: str) -> torch.Tensor:
        if name not in current:
            current.clear()
            generator = torch.Generator().manual_seed(len(name))
            current[name] = torch.randn(tensors[name].shape, generator=generator).mul_(0.02)
        return current[name]

    with patch.multiple(planners, PIECES=1, PIECE_BYTES=2**40):
        write_checkpoint(target, tensors, state, {"tokenizer": tokenizer}, ALONE, read)
    assert sum(t.nbytes for t in tensors.values()) > 1.9e9
    return max(t.nbytes for t in tensors.values())


MEASURED = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tools")
import convert_checkpoint

def resident(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024

# The same on a small model first: what the libraries take differs from machine to machine, and is not what is measured.
small, big = json.loads(sys.argv[1])
codes = [convert_checkpoint.main(small)]
Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
before = resident("VmRSS")
codes.append(convert_checkpoint.main(big))
print(json.dumps([codes, before, resident("VmHWM")]))
"""


def added_memory(small: list[object], big: list[object]) -> int:
    """Bytes that `tools/convert_checkpoint.py BIG` had resident at most above what the process had after SMALL."""
    arguments = json.dumps([[str(item) for item in line] for line in (small, big)])
    done = subprocess.run([sys.executable, "-c", MEASURED, arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes, before, peak = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0, 0], done.stderr
    return peak - before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux says and forgets what was resident at most")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_of_2_gb_is_converted_in_bounded_memory(byte_tokenizer, tmp_path, dtype):
    """M-D16: bounds what the conversion adds; the libraries alone took more than the old limit on some processors.

    python -m pytest tests/huggingface/test_conversion_memory.py -m slow -s
    """
    largest = big_checkpoint(tmp_path / "checkpoint", byte_tokenizer)
    limit = 3 * largest + 64 * MB
    small = write(tmp_path / "small", byte_tokenizer)
    out = added_memory(
        ["to-hf", "--checkpoint", small, "--output", tmp_path / "small-hf", "--dtype", dtype],
        ["to-hf", "--checkpoint", tmp_path / "checkpoint", "--output", tmp_path / "hf", "--dtype", dtype],
    )
    back = added_memory(
        ["from-hf", "--model", tmp_path / "small-hf", "--output", tmp_path / "small-imported"],
        ["from-hf", "--model", tmp_path / "hf", "--output", tmp_path / "imported"],
    )
    print(f"{dtype}: to-hf {out / MB:.0f} MB, from-hf {back / MB:.0f} MB; largest {largest / MB:.0f}, limit {limit / MB:.0f}")
    assert largest < min(out, back) and max(out, back) < limit
    if dtype == "fp32":
        ours, again = Payload(tmp_path / "checkpoint"), Payload(tmp_path / "imported")
        assert ours.items.keys() == again.items.keys()
        assert all(torch.equal(ours.read([name])[name], again.read([name])[name]) for name in ours.items)
