"""Tokenizers in the older files of transformers (vocab.json and merges.txt, vocab.txt, ...), as the `tokenizer.json` they stand for."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pretrain.data.remote.cache import default_directory
from pretrain.data.shards.staging import staged_directory
from pretrain.errors import DataError

_LARGEST = 1 << 26  # bytes; what is larger in such a directory is no tokenizer


def converted(directory: Path) -> Path:
    """The tokenizer.json, in the user's cache, of a directory that `transformers.AutoTokenizer` reads; made when it is not there yet.

    Nothing is fetched and no code that comes with the tokenizer is run. Raises DataError for what transformers cannot read, or has
    no fast tokenizer for.
    """
    import transformers

    files = [file for file in sorted(directory.iterdir()) if file.is_file() and file.stat().st_size <= _LARGEST]
    identity = hashlib.sha256(transformers.__version__.encode())
    for file in files:
        identity.update(f"\0{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    kept = default_directory() / "tokenizers" / identity.hexdigest()
    if not kept.is_dir():
        try:
            loaded = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a reader of one of its many classes raises
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"{directory}: no tokenizer.json, no *.model, and AutoTokenizer cannot read it ({reason}); "
                "train one with tools/train_tokenizer.py"
            ) from error
        if not loaded.is_fast:
            raise DataError(f"{directory}: {type(loaded).__name__} has no fast tokenizer; convert it to a tokenizer.json")
        try:
            with staged_directory(kept) as stage:
                loaded.save_pretrained(stage)
        except DataError:
            if not kept.is_dir():  # else another process was first, with the same content
                raise
    return kept / "tokenizer.json"
