"""Ranks that stay alive between the cases of a campaign, and a small prepared corpus."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
from launch_pool import LaunchPool


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="campaign-data-")


@functools.cache
def pool() -> LaunchPool:
    return LaunchPool(8)


@functools.cache
def byte_tokenizer() -> Path:
    from pretrain.data.tokenizers.tokenizer_training import train_tokenizer

    folder = Path(_folder().name) / "byte"
    folder.mkdir()
    (folder / "text.txt").write_text("bytes need no corpus")
    train_tokenizer([str(folder / "text.txt")], folder / "tokenizer", "byte")
    return folder / "tokenizer"


@functools.cache
def corpus(number: int) -> Path:
    """A prepared directory of 600 documents of 2 to 60 tokens; another one for each number."""
    from pretrain.data.shards.writer import ShardWriter
    from pretrain.data.tokenizers.tokenizer import load_tokenizer

    path, random, tokenizer = (
        Path(_folder().name) / f"corpus-{number}",
        np.random.default_rng(number),
        load_tokenizer(byte_tokenizer()),
    )
    with ShardWriter.create(path, tokenizer, 4_000) as writer:
        for length in random.integers(2, 61, 600):
            letters = np.minimum(random.geometric(0.15, length - 1), 26) + 96
            writer.add(np.append(letters, tokenizer.eod_id), np.array([length]))
    return path


def close() -> None:
    """End the ranks and remove the data. Another campaign may begin anew."""
    if pool.cache_info().currsize:
        pool().close()
    if _folder.cache_info().currsize:
        _folder().cleanup()
    for kept in (pool, byte_tokenizer, corpus, _folder):
        kept.cache_clear()
