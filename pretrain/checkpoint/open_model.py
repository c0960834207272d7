"""A model and its tokenizer from any place that holds them: a checkpoint, a run directory or a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from pretrain.checkpoint.huggingface import build, read_checkpoint, read_hf
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.models.decoder import Decoder


def open_model(path: Path) -> tuple[Decoder, Tokenizer]:
    """The decoder, in fp32 on the CPU, and the tokenizer it was trained with. Of a run: its newest checkpoint."""
    if (path / "config.json").is_file():
        model, weights = read_hf(path)
        return build(model, weights), load_tokenizer(path)
    model, weights, checkpoint = read_checkpoint(path)
    return build(model, weights), load_tokenizer(checkpoint / "tokenizer")
