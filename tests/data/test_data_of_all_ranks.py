"""Every rank reads the same data with the same tokenizer, and every node checks what lies on its own disk."""

import json
import os
import shutil
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from running import run_main

from pretrain.data import data_of_all_ranks
from pretrain.data.data_of_all_ranks import verify_everywhere
from pretrain.data.inspection.integrity import check_integrity
from pretrain.data.order import Mixture, Stage
from pretrain.data.packing import open_index
from pretrain.data.pairs.prepared_pairs import PreparedPairs
from pretrain.data.samples import Packed, Windows
from pretrain.data.shards.reader import PreparedData
from pretrain.data.shards.writer import ShardWriter
from pretrain.data.sources import check_tokenizers
from pretrain.data.stream import Shuffle, Stream
from pretrain.data.tokenizers.tokenizer import copy_difference, identity_of, load_tokenizer
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.distributed.ranks import Ranks
from pretrain.errors import DataError
from pretrain.storage import sealed_json, sha256_of, unsealed
from pretrain.train.identity import check_changes, identity_changes


@dataclass(frozen=True)
class Thread(Ranks):
    """Ranks as threads of this process."""

    said: list = field(default_factory=list)
    barrier_of_threads: threading.Barrier | None = None

    def gather(self, name, value):
        self.said[self.rank] = name, value
        self.barrier_of_threads.wait(20)
        names, values = zip(*self.said)
        self.barrier_of_threads.wait(20)
        assert set(names) == {name}
        return list(values)


def on_ranks(streams: list[Stream], full: bool = True) -> list[str | bool]:
    """What `verify_everywhere` returns or raises on each rank, of which each has a stream of its own."""
    said, barrier = [None] * len(streams), threading.Barrier(len(streams))
    outcomes: list = [None] * len(streams)

    def run(rank: int) -> None:
        ranks = Thread(rank, rank, len(streams), torch.device("cpu"), said=said, barrier_of_threads=barrier)
        try:
            outcomes[rank] = verify_everywhere(streams[rank].holdings, full, ranks)
        except DataError as error:
            outcomes[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


def stream_of(*samples) -> Stream:
    return Stream(
        list(samples),
        Mixture([Stage(None, (1.0,) * len(samples))], [len(s) for s in samples], [None] * len(samples), 0),
        Shuffle(0),
    )


def write(path: Path, tokenizer: Path, lengths: list[int], shard_tokens: int = 100) -> Path:
    ends, loaded = np.cumsum(lengths), load_tokenizer(tokenizer)
    tokens = np.arange(ends[-1]) % 97
    tokens[ends - 1] = loaded.eod_id
    with ShardWriter.create(path, loaded, shard_tokens) as writer:
        writer.add(tokens, np.array(lengths))
    return path


def opened(path: Path, cache: Path | None = None):
    data = PreparedData.open(path, sizes=False)
    return Windows("a", data, 16) if cache is None else Packed("a", data, 16, open_index(data, "best_fit", 16, cache))


def test_small_sources_are_shared_evenly(tmp_path, byte_tokenizer, monkeypatch):
    """The first shard of every source was the first rank's: with many sources of few shards, most ranks hashed nothing."""
    sources = [write(tmp_path / f"source-{number}", byte_tokenizer, [20, 20]) for number in range(7)]
    hashed: dict[int, set[Path]] = defaultdict(set)
    monkeypatch.setattr(
        "pretrain.data.shards.reader.check_content", lambda file, sha256, seen: hashed[threading.get_ident()].add(file.parent)
    )
    streams = [stream_of(*[Windows("a", PreparedData.open(path), 16) for path in sources]) for _ in range(3)]
    assert on_ranks(streams) == [True] * 3
    assert sorted(map(len, hashed.values())) == [2, 2, 3] and set.union(*hashed.values()) == set(sources)


def flip(file: Path, place: int = 8) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_ranks_that_see_one_directory_share_the_work_and_those_with_copies_do_not(tmp_path, byte_tokenizer, monkeypatch):
    """D-D1: a copy on a node's disk is hashed on that node, and a packing index in a node's cache too."""
    path = write(tmp_path / "data", byte_tokenizer, [20] * 60)
    shutil.copytree(path, tmp_path / "copy")
    seen = []
    monkeypatch.setattr(
        PreparedData, "verify", lambda self, part, parts, hashes, **_: seen.append((self.path.name, part, parts, hashes))
    )
    monkeypatch.setattr(
        "pretrain.data.packing.PackIndex.verify",
        lambda self, part, parts, hashes, **_: seen.append((self.path.parents[1].name, part, parts, hashes)),
    )
    one = lambda name, cache: stream_of(opened(tmp_path / name, tmp_path / cache))  # noqa: E731
    assert (
        on_ranks([one("data", "cache-a"), one("data", "cache-a"), one("data", "cache-b"), one("copy", "cache-b")]) == [True] * 4
    )
    data = [("copy", 0, 1), ("data", 0, 3), ("data", 1, 3), ("data", 2, 3)]
    parts = [("cache-a", 0, 2), ("cache-a", 1, 2), ("cache-b", 0, 2), ("cache-b", 1, 2), *data]
    assert sorted(seen) == [(*part, True) for part in parts]
    seen.clear()
    assert on_ranks([one("data", "cache-a")] * 2, full=False) == [False] * 2
    assert sorted(seen) == [("cache-a", 0, 2, False), ("cache-a", 1, 2, False), ("data", 0, 2, False), ("data", 1, 2, False)]


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        *((kind, [(0, 4), (1, 4), (2, 4), (3, 4)]) for kind in ("lustre", "gpfs", "nfs4", "fuse.juicefs")),
        *((kind, [(0, 2), (0, 2), (1, 2), (1, 2)]) for kind in ("ext4", "btrfs", "zfs", "overlay", "tmpfs", "fuse.squashfuse", None)),
    ],
)
def test_nodes_share_the_work_on_a_network_file_system_and_on_no_other(tmp_path, byte_tokenizer, monkeypatch, kind, parts):
    """Lustre has a device number like a disk's: every node hashed all data. btrfs and zfs have none, and a copy of a disk was taken for the disk."""
    path, seen = write(tmp_path / "data", byte_tokenizer, [20] * 60), []
    process = tmp_path / "process"
    process.mkdir()
    if kind:  # else the kernel does not say
        with open(path / "manifest.json") as file:
            facts = Path(f"/proc/self/fdinfo/{file.fileno()}").read_text()
        number = facts.partition("mnt_id:")[2].split()[0]
        mounts = [f"{number}7 1 0:9 / / rw - ext4 /dev/vda rw", f"{number} 1 0:9 / /my\\040data rw shared:1 - {kind} /dev/{kind} rw,lazystatfs"]
        (process / "mountinfo").write_text("\n".join(mounts) + "\n")
        (process / "fdinfo").symlink_to("/proc/self/fdinfo")
    monkeypatch.setattr(data_of_all_ranks, "_file_system", partial(data_of_all_ranks._file_system, process=process))
    names = iter(["node-a", "node-a", "node-b", "node-b"])
    monkeypatch.setattr("pretrain.data.data_of_all_ranks.socket.gethostname", lambda: next(names))
    monkeypatch.setattr(PreparedData, "verify", lambda self, part, parts, **_: seen.append((part, parts)))
    assert on_ranks([stream_of(opened(path)) for _ in range(4)]) == [True] * 4
    assert sorted(seen) == parts


def hashing_for_long(seconds: float, config_file: str, *overrides: str) -> tuple[int, str]:
    """A run whose rank 1 takes so long for one shard, piece by piece."""
    slow = []

    def slowly(path, *seen):
        if os.environ["RANK"] == "1" and not slow:
            slow.append(path)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.1)
                for tell in seen:
                    tell(1)
        return sha256_of(path, *seen)

    with patch("pretrain.data.shards.manifest.sha256_of", slowly):
        return run_main(config_file, *overrides)


def test_hashing_the_data_may_take_longer_than_ranks_wait_for_each_other(pool, config_file):
    """A rank with less on its node's disk waited parallel.timeout_seconds for one with more, and ended the run."""
    overrides = ("data.verify=full", "parallel.strategy=ddp", "parallel.timeout_seconds=5", "run.steps=2")
    results = pool.launch(2, hashing_for_long, 13.0, str(config_file), *overrides)
    assert [code for code, _ in results] == [0, 0], results[0][1]


def test_the_ranks_share_even_the_sizes_of_files(tmp_path, byte_tokenizer, monkeypatch):
    """Every rank asked for the size of every file: 10^4 shards and 1,024 ranks are 31 million questions to one file system."""
    path, looked = write(tmp_path / "data", byte_tokenizer, [20] * 60), defaultdict(list)
    assert not PreparedData.open(path, sizes=False).is_remote
    monkeypatch.setattr(
        "pretrain.data.shards.reader.check_size", lambda file, size: looked[threading.get_ident()].append(os.path.basename(file))
    )
    unseen = [Windows("a", PreparedData.open(path, sizes=False), 16) for _ in range(4)]
    assert not looked
    assert on_ranks([stream_of(samples) for samples in unseen], full=False) == [False] * 4
    files = [file.name for file in path.glob("shard-*")]
    assert len(looked) == 4 and sorted(sum(looked.values(), [])) == sorted(files) and len(files) == 36
    assert max(map(len, looked.values())) == 9


@pytest.mark.parametrize("full", [True, False])
def test_a_shard_that_is_missing_or_cut_is_named_with_its_key(tmp_path, byte_tokenizer, full):
    path = write(tmp_path / "data", byte_tokenizer, [20] * 60)
    streams = [stream_of(Windows("a", PreparedData.open(path, sizes=False), 16)) for _ in range(3)]
    (path / "shard-00001.idx").write_bytes((path / "shard-00001.idx").read_bytes()[:-1])
    named = f"rank 1: data.sources.0: {path}/shard-00001.idx: "
    assert on_ranks(streams, full) == [named + "truncated: 39 bytes where manifest.json says 40"] * 3
    (path / "shard-00001.idx").unlink()
    assert on_ranks(streams, full) == [named + "missing, though manifest.json lists it"] * 3


def test_a_damaged_copy_on_one_node_is_found(tmp_path, byte_tokenizer):
    """D-D1: whichever rank would have hashed that shard elsewhere."""
    path = write(tmp_path / "data", byte_tokenizer, [20] * 60)
    shutil.copytree(path, tmp_path / "copy")
    for shard in ("shard-00001.bin", "shard-00002.idx"):
        flip(tmp_path / "copy" / shard)
        outcomes = on_ranks([stream_of(opened(path)), stream_of(opened(path)), stream_of(opened(tmp_path / "copy"))])
        assert len(set(outcomes)) == 1 and outcomes[0].startswith(f"rank 2: data.sources.0: {tmp_path}/copy/{shard}: ")
        flip(tmp_path / "copy" / shard)


def test_a_damaged_packing_index_is_found_on_the_node_that_has_it(tmp_path, byte_tokenizer):
    """D-D1: not by rank 0 alone."""
    path = write(tmp_path / "data", byte_tokenizer, [20] * 60)
    streams = [stream_of(opened(path, tmp_path / cache)) for cache in ("a", "a", "b")]
    assert on_ranks(streams) == [True] * 3
    index = next((tmp_path / "b" / "packing").glob("*/pieces.idx"))
    flip(index)
    assert set(on_ranks(streams)) == {
        f"rank 2: data.sources.0: {index}: content does not match its hash in manifest.json; remove {index.parent}"
    }


# One tokenizer, one end of documents.


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, corpus) -> tuple[Path, Path]:
    """A tokenizer, and the same file with another end-of-document token, as the chat release of a base model has it."""
    root = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer([str(corpus)], root / "base", "byte_bpe", 400, special_tokens=["<|im_end|>"])
    shutil.copytree(root / "base", root / "chat")
    set_end(root / "chat", "<|im_end|>")
    return root / "base", root / "chat"


def set_end(folder: Path, token: str) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": token}))


def test_sources_of_one_tokenizer_with_different_end_tokens_are_refused(tmp_path, tokenizers):
    """D-D2: document masks would leak over the documents of the second."""
    base, chat = (opened(write(tmp_path / name, path, [20] * 60)) for name, path in zip(("base", "chat"), tokenizers))
    assert base.data.tokenizer.sha256 == chat.data.tokenizer.sha256
    check_tokenizers([base, base])
    message = "one tokenizer but different end-of-document tokens, <|endoftext|> (398) and <|im_end|> (399); prepare both with the same tokenizer"
    with pytest.raises(DataError) as caught:
        check_tokenizers([base, chat])
    assert str(caught.value) == f"{tmp_path}/base and {tmp_path}/chat were prepared with {message}"


def test_a_copy_of_the_tokenizer_with_another_configuration_is_refused(tmp_path, tokenizers):
    """Exports take it along. Only its end token was compared."""
    path = write(tmp_path / "data", tokenizers[0], [20] * 60)
    file = path / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"clean_up_tokenization_spaces": True}))
    with pytest.raises(DataError, match="tokenizer_config.json has other content; restore it or prepare again"):
        check_tokenizers([opened(path)])
    [damage] = check_integrity(str(path)).damaged
    assert damage.problem == "tokenizer_config.json has other content"
    content = unsealed((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(sealed_json(content | {"tokenizer_config_sha256": None}))
    check_tokenizers([opened(path)])
    file.unlink()
    with pytest.raises(DataError, match="tokenizer_config.json ends documents with None, not"):
        check_tokenizers([opened(path)])


def test_a_copy_of_the_tokenizer_with_another_end_token_is_refused(tmp_path, tokenizers):
    """D-D2: what checkpoints and exports would take along."""
    path = write(tmp_path / "data", tokenizers[0], [20] * 60)
    check_tokenizers([opened(path)])
    set_end(path / "tokenizer", "<|im_end|>")
    with pytest.raises(
        DataError,
        match=r"data/tokenizer is not the tokenizer that .*data was prepared with: tokenizer_config.json ends documents",
    ):
        check_tokenizers([opened(path)])
    set_end(path / "tokenizer", "<|endoftext|>")
    flip(path / "tokenizer" / "tokenizer.json", 1000)
    with pytest.raises(DataError, match="tokenizer.json has other content; restore it or prepare again"):
        check_tokenizers([opened(path), opened(path)])


def test_a_tokenizer_is_compared_without_its_library(tokenizers, trained):
    base = identity_of(load_tokenizer(tokenizers[0]))
    assert base.eod_token == "<|endoftext|>" and copy_difference(tokenizers[0], base) is None
    assert "ends documents with <|im_end|>, not <|endoftext|>" in copy_difference(tokenizers[1], base)
    assert copy_difference(trained["bpe"], identity_of(load_tokenizer(trained["bpe"]))) is None
    assert (
        copy_difference(trained["unigram"], identity_of(load_tokenizer(trained["bpe"]))) == "tokenizer.model has other content"
    )
    assert base.difference(base._replace(vocab_size=401)) == "one tokenizer but vocabularies of 400 and 401 tokens"


def test_pairs_whose_documents_end_elsewhere_are_other_pairs(tmp_path, byte_tokenizer):
    """D-D1: pairs are read by the document index."""
    from pretrain.data.pairs.prepared_pairs import Split, prepare_pairs

    for name, lines in (("a", ["ab", "c"]), ("b", ["a", "bc"])):
        (tmp_path / name).write_text("\n".join(lines))
    prepare_pairs(tmp_path / "pairs", Split([str(tmp_path / "a")], [str(tmp_path / "b")]), None, byte_tokenizer)
    pairs = PreparedPairs.open(tmp_path / "pairs")
    assert set(pairs.identity(0)) == {"sources.0", "sources.0.documents", "sources.0.path"}
    assert pairs.identity(0)["sources.0.documents"] != pairs.source.documents_fingerprint


# What a checkpoint says.

HASH, OTHER = "a" * 64, "b" * 64


def test_changed_data_are_named_by_their_paths():
    """D-D2, house.md 2.13: not by two hashes of 64 digits."""
    saved = {
        "data.sources.0": HASH,
        "data.sources.0.path": "data/old",
        "data.sources.0.documents": HASH,
        "data.tokenizer": HASH,
    }
    own = {**saved, "data.sources.0": OTHER, "data.sources.0.path": "data/new", "data.tokenizer": OTHER}
    with pytest.raises(Exception) as caught:
        check_changes("ckpt", identity_changes(saved, own), [], [])
    line = str(caught.value)
    assert f"data.sources.0 was data/old (sha256 {HASH[:12]}) and is data/new (sha256 {OTHER[:12]})" in line
    assert f"data.tokenizer was sha256 {HASH[:12]} and is sha256 {OTHER[:12]}" in line and HASH not in line


def test_a_moved_source_is_the_same_and_other_content_is_refused():
    own = {
        "data.sources.0": HASH, "data.sources.0.path": "x", "data.sources.0.documents": HASH, "data.packing": "best_fit", "data.packing.index.0": HASH,
        "data.tokenizer": HASH, "data.tokenizer.eod_id": 3, "data.tokenizer.vocab_size": 9,
    }  # fmt: skip
    check_changes("ckpt", identity_changes({**own, "data.sources.0.path": "elsewhere"}, own), [], [])
    for name, value in (
        ("data.sources.0.documents", OTHER),
        ("data.packing.index.0", OTHER),
        ("data.tokenizer.eod_id", 4),
        ("data.sources.0", OTHER),
    ):
        with pytest.raises(Exception, match=name.replace(".", r"\.")):
            check_changes("ckpt", identity_changes({**own, name: value}, own), [], [])
        kind = {"data.packing.index.0": "data.packing", "data.tokenizer.eod_id": "data.tokenizer"}.get(name, "data.sources")
        check_changes("ckpt", identity_changes({**own, name: value}, own), [], [kind])
