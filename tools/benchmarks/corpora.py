"""Prepared directories made of random numbers, for benchmarks that need no corpus."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

import numpy as np

from pretrain.data.shards.writer import ShardWriter
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.storage import sealed_json, unsealed

_MEAN_LOG, _DEVIATION = 6.2, 1.2  # document lengths: a median of 490 tokens and a mean of 1,010, like text on the web
_GROUP = 4096


def byte_tokenizer(work: Path) -> Tokenizer:
    """The byte tokenizer, made in the folder `work` if it is missing."""
    path = work / "byte_tokenizer"
    if not path.is_dir():
        train_tokenizer([], path, "byte")
    return load_tokenizer(path)


def document_lengths(random: np.random.Generator, count: int) -> np.ndarray:
    """Log-normal lengths with the end-of-document token, int64."""
    return np.clip(random.lognormal(_MEAN_LOG, _DEVIATION, count).astype(np.int64), 2, 1 << 20)


def write_tokens(path: Path, tokenizer: Tokenizer, tokens: int, shard_tokens: int) -> Path:
    """Write a new prepared directory with about this many random tokens."""
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


def link_shards(original: Path, path: Path, shards: int) -> Path:
    """Make a prepared directory of `shards` shards, which are links to another directory's shards in turn.

    It passes `open` but not `verify`: token hashes are invented, because shards with equal content would be one file in a cache.
    """
    content = unsealed((original / "manifest.json").read_bytes())
    written, content["shards"] = content["shards"], []
    shutil.copytree(original / "tokenizer", path / "tokenizer")
    shutil.copy(original / "inputs.json", path)
    for number in range(shards):
        source = written[number % len(written)]
        entry = {key: _renamed(value, number) if key.endswith("file") else value for key, value in source.items()}
        entry["sha256"] = hashlib.sha256(f"{source['sha256']}{number}".encode()).hexdigest()
        content["shards"].append(entry)
        for key in ("file", "index_file", "origin_file"):
            os.link(original / source[key], path / entry[key])
    for key in ("documents", "tokens"):
        content[key] = sum(entry[key] for entry in content["shards"])
    (path / "manifest.json").write_text(sealed_json(content), encoding="utf-8")
    return path


def _renamed(name: str, number: int) -> str:
    """The name of one shard's file, renamed for another shard."""
    return re.sub(r"\d{5}", f"{number:05d}", name, count=1)
