"""Prepared directories made of random numbers, for benchmarks that need no corpus."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.shards.writer import ShardWriter
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.data.tokenizers.training import train_tokenizer

_MEAN_LOG, _DEVIATION = 6.2, 1.2  # of document lengths: a median of 490 tokens and a mean of 1,010, as of text on the web
_GROUP = 4096


def byte_tokenizer(work: Path) -> Tokenizer:
    """The tokenizer of bytes, made in the folder `work` if it is not there."""
    path = work / "byte_tokenizer"
    if not path.is_dir():
        train_tokenizer([], path, "byte")
    return load_tokenizer(path)


def document_lengths(random: np.random.Generator, count: int) -> np.ndarray:
    """Log-normal lengths with the end-of-document token, int64."""
    return np.clip(random.lognormal(_MEAN_LOG, _DEVIATION, count).astype(np.int64), 2, 1 << 20)


def write_tokens(path: Path, tokenizer: Tokenizer, tokens: int, shard_tokens: int) -> Path:
    """A new prepared directory of about so many random tokens."""
    random = np.random.default_rng(0)
    with ShardWriter.create(path, tokenizer, shard_tokens) as writer:
        while writer.tokens < tokens:
            lengths = document_lengths(random, _GROUP)
            ends = np.cumsum(lengths)
            count = max(1, int(np.searchsorted(ends, tokens - writer.tokens)))
            ids = random.integers(0, tokenizer.eod_id, ends[count - 1], dtype=np.uint16)
            ids[ends[:count] - 1] = tokenizer.eod_id
            writer.add(ids, lengths[:count])
    return path


def write_many_shards(path: Path, tokenizer: Tokenizer, shards: int, shard_tokens: int) -> Path:
    """A new prepared directory of equal shards of one document each, which passes `open` but not `verify`: the first shard is
    written, and the others have its index and, for tokens, holes that read as zeros and occupy no disk.
    """
    document = np.zeros(shard_tokens, dtype=np.uint16)
    document[-1] = tokenizer.eod_id
    with ShardWriter.create(path, tokenizer, shard_tokens) as writer:
        writer.add(document, np.array([shard_tokens]))
    content = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    first = content["shards"][0]
    names = [value for key, value in first.items() if key.endswith("file")]
    for number in range(1, shards):
        for name in names:
            if name == first["file"]:
                with (path / _renamed(name, number)).open("wb") as file:
                    file.truncate((path / name).stat().st_size)
            else:
                (path / _renamed(name, number)).write_bytes((path / name).read_bytes())
        content["shards"].append({key: _renamed(value, number) for key, value in first.items()})
    content["documents"], content["tokens"] = shards, shards * shard_tokens
    (path / "manifest.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def _renamed(value: Any, number: int) -> Any:
    """A value of the first shard's entry as that of another: its name, and a hash that is no other's."""
    if not isinstance(value, str):
        return value
    if len(value) == 64:
        return hashlib.sha256(f"{value}{number}".encode()).hexdigest()
    return value.replace("shard-00000", f"shard-{number:05d}")
