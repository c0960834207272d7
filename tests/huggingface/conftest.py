"""Checkpoints and exports that the tests of conversion share."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from converting import SMALL, write

from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.huggingface.export_model import export


@pytest.fixture(scope="session")
def run(tmp_path_factory, byte_tokenizer) -> Path:
    """A run directory with one checkpoint, untied."""
    folder = tmp_path_factory.mktemp("run")
    write(folder / "checkpoints" / "step-00000010", byte_tokenizer)
    return folder


@pytest.fixture(scope="session")
def tied(tmp_path_factory) -> Path:
    """A checkpoint with tied embeddings and a SentencePiece tokenizer, in a vocabulary with unused rows."""
    folder = tmp_path_factory.mktemp("tied")
    lines = [f"def f{i}(x):\n    return x + {i * i}  # the sum of things\n" for i in range(300)]
    (folder / "text.txt").write_text("".join(lines))
    train_tokenizer([str(folder / "text.txt")], folder / "tokenizer", "bpe", 320)
    return write(folder / "checkpoint", folder / "tokenizer", dataclasses.replace(SMALL, tie_embeddings=True, vocab_size=480))


@pytest.fixture(scope="session")
def exported(tmp_path_factory, run) -> Path:
    output = tmp_path_factory.mktemp("exported") / "model"
    export(run, output)
    return output


@pytest.fixture
def copied(exported, tmp_path) -> Path:
    """An export to spoil."""
    return Path(shutil.copytree(exported, tmp_path / "theirs"))
