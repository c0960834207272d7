"""Checkpoints to convert, and exports to spoil, for the tests of conversion."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pretrain.checkpoint.save import write_checkpoint
from pretrain.config.schema import Model
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.distributed.ranks import ALONE
from pretrain.errors import UserError
from pretrain.huggingface.import_model import import_model
from pretrain.models.decoder import Decoder
from pretrain.models.families import complete
from pretrain.parallel.initialise import initialise

SMALL = Model(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, init_std=0.2)
PROMPT = "def main():\n    return"


def write(target: Path, tokenizer: Path | None, model: Model = SMALL, **changes) -> Path:
    """A checkpoint with random weights, as a run writes it; `changes` replace tensors by name, None removes one."""
    if model.vocab_size is None:
        model = dataclasses.replace(model, vocab_size=load_tokenizer(tokenizer).vocab_size)
    model = complete(model, model.max_sequence_length or 96)
    decoder = Decoder(model)
    initialise(decoder, 5)
    weights = {f"model.{name}": p.detach() for name, p in decoder.named_parameters()} | changes
    state = {
        "step": 10,
        "samples": 160,
        "tokens": 5120,
        "world_size": 1,
        "layout": "single",
        "model": dataclasses.asdict(model),
        "identity": {},
    }
    attachments = {"tokenizer": tokenizer} if tokenizer else {}
    write_checkpoint(target, {n: t for n, t in weights.items() if t is not None}, state, attachments, ALONE)
    return target


def automatic(path: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, trust_remote_code=False).eval()


def files_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def edit_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "remove"}))


def edit_weights(path: Path, change) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def refused(kind: type[UserError], directory: Path, tmp_path: Path) -> str:
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(kind) as caught:
        import_model(directory, tmp_path / "imported")
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before
    return str(caught.value)
