"""A model and its tokenizer from any place that holds them: a checkpoint, a run directory or a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from pretrain.checkpoint import files
from pretrain.checkpoint.hf_directory import HfDirectory
from pretrain.checkpoint.hf_verify import build
from pretrain.checkpoint.load import load_state, saved_tensors
from pretrain.config.model_schema import Model
from pretrain.config.recorded import build_section
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError


def open_model(path: Path) -> tuple[nn.Module, Tokenizer]:
    """The network, in fp32 on the CPU, and the tokenizer it was trained with. Of a run: its newest checkpoint."""
    if (path / "config.json").is_file():
        model, weights = read_hf(path)
        if model.encoder_layers:
            raise ConfigError(f"{path} is an encoder-decoder; use tools/translate.py")
        return build(model, weights), load_tokenizer(path)
    model, weights, checkpoint = read_checkpoint(path)
    if model.encoder_layers:
        raise ConfigError(f"{checkpoint} is an encoder-decoder; use tools/translate.py")
    return build(model, weights), load_tokenizer(checkpoint / "tokenizer")


def read_hf(directory: Path) -> tuple[Model, dict[str, Tensor]]:
    """Shape and weights (whole, in fp32, by our names) of a Hugging Face model directory."""
    source = HfDirectory(directory)
    return source.model, source.whole()


def read_checkpoint(path: Path) -> tuple[Model, dict[str, Tensor], Path]:
    """Shape, weights (whole, on the CPU, by our names) and directory of a checkpoint, or of a run's newest; hashes verified."""
    checkpoint = files.resolve(path)[-1]
    files.verify(checkpoint)
    model = build_section(Model, load_state(checkpoint)["model"])
    weights = saved_tensors(checkpoint, "model.")
    return model, {name.removeprefix("model."): tensor for name, tensor in weights.items()}, checkpoint


def open_translator(path: Path) -> tuple[nn.Module, Tokenizer, Tokenizer]:
    """The encoder-decoder of a checkpoint, of a run's newest one or of a Hugging Face directory, in fp32 on the CPU, and the tokenizers of
    its two sides.
    """
    if (path / "config.json").is_file():
        model, weights = read_hf(path)
        place = source = target = path
    else:
        model, weights, place = read_checkpoint(path)
        source, target = place / "source_tokenizer", place / "tokenizer"
        if model.tie_source and not source.is_dir():  # trained on spans, or imported
            source = target
    if not model.encoder_layers:
        raise ConfigError(f"{place} is a decoder alone; use tools/generate.py")
    return build(model, weights), load_tokenizer(source), load_tokenizer(target)
