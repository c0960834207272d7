"""Tokenizers that have more tokens than their model has rows: Gemma 3's text models come with the image token of the larger ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pretrain.data.tokenizers.tokenizer import CONFIG_NAME, JSON_NAME, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from pretrain.errors import DataError


def save_trimmed(tokenizer: Tokenizer, rows: int, directory: Path) -> list[str]:
    """Copy a tokenizer's files into `directory` without the tokens from id `rows` on; their texts.

    Only special tokens that were added to the vocabulary can go: no text is made of them. Raises DataError where others are beyond it.
    """
    tokenizer.save(directory)
    if tokenizer.vocab_size <= rows:
        return []
    problem = DataError(
        f"{tokenizer.file}: the tokenizer has {tokenizer.vocab_size} tokens and the vocabulary {rows} rows; it is not this model's"
    )
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.eod_id >= rows:
        raise problem
    content = json.loads((directory / JSON_NAME).read_text(encoding="utf-8"))
    added = content.get("added_tokens") or []
    dropped = [item["content"] for item in added if item["id"] >= rows]
    if not all(item["special"] for item in added if item["id"] >= rows):
        raise problem
    content["added_tokens"] = [item for item in added if item["id"] < rows]
    (directory / JSON_NAME).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    config = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
    (directory / CONFIG_NAME).write_text(
        json.dumps(_without(config, dropped), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    if load_tokenizer(directory).vocab_size > rows:
        raise problem
    return dropped


def _without(value: Any, texts: list[str]) -> Any:
    """JSON without these texts: as values, in lists, and as the `content` of an object."""

    def is_gone(item: Any) -> bool:
        return (item.get("content") if isinstance(item, dict) else item) in texts

    if isinstance(value, dict):
        return {name: _without(item, texts) for name, item in value.items() if not is_gone(item)}
    if isinstance(value, list):
        return [_without(item, texts) for item in value if not is_gone(item)]
    return value
