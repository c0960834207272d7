"""Prepared sentence pairs on disk: two prepared directories, in which documents of one number belong together, and what ties them.

DIR/pairs.json           counts, how they were made, and the sha256 of both manifests
DIR/source/              a prepared directory (data/shards): a document per sentence, closed by the end-of-document token
DIR/target/              likewise
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.shards.manifest import read_described
from pretrain.data.shards.reader import PreparedData
from pretrain.errors import DataError
from pretrain.storage import sealed_json, sha256_of

FORMAT, VERSION, NAME = "pretrain-pairs", 2, "pairs.json"
READABLE = (1, 2)
"""Version 1 had no seal."""
SIDES = ("source", "target")
_KEYS = {"format", "version", "pairs", "source_sha256", "target_sha256", "preparation"}


def write_pairs(directory: Path, pairs: int, preparation: dict[str, Any]) -> None:
    """Write `directory`/pairs.json over the two prepared directories that are there."""
    content = {"format": FORMAT, "version": VERSION, "pairs": pairs}
    content |= {f"{side}_sha256": sha256_of(directory / side / "manifest.json") for side in SIDES}
    (directory / NAME).write_text(sealed_json(content | {"preparation": preparation}), encoding="utf-8")


def _read_pairs(directory: Path) -> dict[str, Any]:
    file = directory / NAME
    if not file.is_file():
        splits = [name for name in ("train", "validation") if (directory / name / NAME).is_file()]
        hint = f"did you mean {directory / splits[0]}?" if splits else "prepare pairs with tools/prepare_pairs.py"
        raise DataError(f"{file}: missing; {hint}")
    content = read_described(file, FORMAT, READABLE, "prepare the pairs again")
    for key in sorted(_KEYS ^ content.keys()):
        raise DataError(f"{file}: {key} is {'missing' if key in _KEYS else 'not a known key'}")
    if not isinstance(content["preparation"], dict):
        raise DataError(f"{file}: preparation must be an object, got {content['preparation']!r}")
    for side in SIDES:
        if not (directory / side / "manifest.json").is_file():
            raise DataError(f"{directory / side / 'manifest.json'}: missing; restore it or prepare the pairs again")
        if content[f"{side}_sha256"] != sha256_of(directory / side / "manifest.json"):
            raise DataError(
                f"{directory / side / 'manifest.json'}: not the manifest that {NAME} ties to the other side; prepare the pairs again"
            )
    return content


@dataclass(frozen=True)
class PreparedPairs:
    """Pairs of documents, read at random. `PreparedPairs.open` makes one."""

    name: str
    path: Path
    source: PreparedData
    target: PreparedData
    preparation: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path, name: str | None = None) -> PreparedPairs:
        """Read the manifests and check that the two sides belong together. Raises DataError naming what does not."""
        path = Path(path)
        content = _read_pairs(path)
        sides = [PreparedData.open(path / side) for side in SIDES]
        for side, data in zip(SIDES, sides):
            if data.documents != content["pairs"]:
                raise DataError(f"{path / NAME}: pairs is {content['pairs']!r}, and {side} has {data.documents} documents")
            data.check_tokenizer()
        split = path.name in ("train", "validation") and path.parent.name
        return cls(name or split or path.name, path, *sides, content["preparation"])

    def __len__(self) -> int:
        return self.source.documents

    @cached_property
    def fingerprint(self) -> str:
        """The content's identity, wherever it lies."""
        return hashlib.sha256(f"{self.source.fingerprint}\n{self.target.fingerprint}".encode()).hexdigest()

    def identity(self, number: int) -> dict[str, str]:
        """As of samples (data/samples.py)."""
        key = f"sources.{number}"
        ends = f"{self.source.documents_fingerprint}\n{self.target.documents_fingerprint}"
        documents = hashlib.sha256(ends.encode()).hexdigest()
        return {key: self.fingerprint, f"{key}.documents": documents, f"{key}.path": str(self.path)}

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest source and of the longest target, end tokens included; known without reading the shards."""
        return tuple(max(shard.longest for shard in data.manifest.shards) for data in (self.source, self.target))

    def lengths(self, pairs: np.ndarray) -> np.ndarray:
        """Tokens of source and target of these pairs, end tokens included, int64 [2, pairs]."""
        spans = [data.spans(pairs) for data in (self.source, self.target)]
        return np.stack([ends - starts for starts, ends in spans])

    def read(self, pairs: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The tokens of the sources and of the targets of these pairs, each closed by its end token, int64."""
        return tuple(_documents(data, pairs) for data in (self.source, self.target))

    @property
    def holdings(self) -> list[PreparedData]:
        """What a run reads, with manifests of its own."""
        return [self.source, self.target]


def _documents(data: PreparedData, numbers: np.ndarray) -> list[np.ndarray]:
    starts, ends = data.spans(numbers)
    tokens = data.read_joined(starts, ends - starts).astype(np.int64)
    return np.split(tokens, np.cumsum(ends - starts)[:-1])
