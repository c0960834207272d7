"""Small files of sentence pairs for tests, and prepared pairs of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pretrain.data.pairs.prepared_pairs import Split, prepare_pairs


def sentences(count: int, seed: int, longest: int = 20) -> list[str]:
    """Words of random letters."""
    random = np.random.default_rng(seed)
    return ["".join(random.choice(list("abcdefgh "), random.integers(1, longest))).strip() or "a" for _ in range(count)]


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def split_of(folder: Path, name: str, sources: list[str], targets: list[str]) -> Split:
    return Split([write_lines(folder / f"{name}.source", sources)], [write_lines(folder / f"{name}.target", targets)])


def prepare(folder: Path, tokenizer: Path, count: int, seed: int) -> Path:
    """Prepared pairs of which the target is the source spelled backwards."""
    sources = sentences(count, seed)
    prepare_pairs(folder / "pairs", split_of(folder, "train", sources, [s[::-1] for s in sources]), None, tokenizer)
    return folder / "pairs"
