"""A model and its tokenizer from any place that holds them: a checkpoint, a run directory or a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from pretrain.checkpoint.huggingface import build, read_checkpoint, read_hf
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError


def open_model(path: Path) -> tuple[nn.Module, Tokenizer]:
    """The decoder, in fp32 on the CPU, and the tokenizer it was trained with. Of a run: its newest checkpoint."""
    if (path / "config.json").is_file():
        model, weights = read_hf(path)
        return build(model, weights), load_tokenizer(path)
    model, weights, checkpoint = read_checkpoint(path)
    if model.encoder_layers:
        raise ConfigError(f"{checkpoint} is an encoder-decoder; use tools/translate.py")
    return build(model, weights), load_tokenizer(checkpoint / "tokenizer")


def open_translator(path: Path) -> tuple[nn.Module, Tokenizer, Tokenizer]:
    """The encoder-decoder of a checkpoint or of a run's newest one, in fp32 on the CPU, and the tokenizers of its two sides."""
    model, weights, checkpoint = read_checkpoint(path)
    if not model.encoder_layers:
        raise ConfigError(f"{checkpoint} is a decoder alone; use tools/generate.py")
    return build(model, weights), load_tokenizer(checkpoint / "source_tokenizer"), load_tokenizer(checkpoint / "tokenizer")
