"""Files of the hub that were written before names settled: buffers in them, and GPT-2 without the word before its names."""

from __future__ import annotations

import pytest
import torch
from parity import pair
from safetensors.torch import load_file, save_file

from pretrain.errors import CheckpointError
from pretrain.huggingface.import_model import import_model
from pretrain.huggingface.open_model import read_checkpoint, read_hf

BUFFERS = {
    "gpt2": ("h.0.attn.bias", "h.1.attn.masked_bias"),
    "gpt_neox": ("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.rotary_emb.inv_freq"),
    "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq",),
}


@pytest.mark.parametrize("family", BUFFERS)
def test_buffers_are_left_out_and_that_is_said(tmp_path, caplog, family):
    ours, theirs = pair(family, "plain")
    theirs.save_pretrained(tmp_path)
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors | {name: torch.zeros(3) for name in BUFFERS[family]}, tmp_path / "model.safetensors")
    model, weights = read_hf(tmp_path)
    assert model == ours.config
    assert weights.keys() == dict(ours.named_parameters()).keys()
    assert all(torch.equal(weights[name], parameter) for name, parameter in ours.named_parameters())
    assert f"left out, as transformers does: {'transformer.' * (family == 'gpt2')}{BUFFERS[family][0]}" in caplog.text
    save_file(tensors | {"extra.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"extra.weight has no place in {family}"):
        read_hf(tmp_path)


@pytest.mark.parametrize("head", [False, True])
def test_gpt2_as_the_hub_has_it_is_converted_with_and_without_the_tied_head(tmp_path, head):
    ours, theirs = pair("gpt2", "plain")
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    save_file(tensors | ({"lm_head.weight": tensors["wte.weight"].clone()} if head else {}), file, {"format": "pt"})
    assert import_model(tmp_path / "theirs", tmp_path / "imported", verify=True).compared.difference <= 1e-5
    _, weights, _ = read_checkpoint(tmp_path / "imported")
    assert all(torch.equal(weights[name], parameter) for name, parameter in ours.named_parameters())
