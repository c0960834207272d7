"""Pairs of random letters of many lengths."""

from pathlib import Path

import pytest
from pair_files import prepare


@pytest.fixture(scope="session")
def prepared_pairs(tmp_path_factory, byte_tokenizer) -> Path:
    """500 pairs."""
    return prepare(tmp_path_factory.mktemp("pairs"), byte_tokenizer, 500, seed=0)
