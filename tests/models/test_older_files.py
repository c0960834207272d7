"""Files of the hub that were written before names settled: buffers in them, and names without the word before them,
as files of the model without its head still are."""

from __future__ import annotations

import json

import pytest
import torch
from parity import ALL, as_published, cases, pair
from safetensors.torch import load_file, save_file

from pretrain.errors import CheckpointError, ConfigError
from pretrain.huggingface.directory import HfDirectory
from pretrain.huggingface.import_model import import_model
from pretrain.huggingface.open_model import read_checkpoint, read_hf

BUFFERS = {
    "gpt2": ("h.0.attn.bias", "h.1.attn.masked_bias"),
    "gpt_neox": ("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.rotary_emb.inv_freq"),
    "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq",),
}
# One case of every family with a tied head, and one with a head of its own.
TIED, UNTIED = ([*{f: (f, n) for f, n in ALL if cases(f)[n].tie_embeddings is tied}.values()] for tied in (True, False))


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


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_text_model_is_read_under_the_names_it_has_within_a_model_of_images(tmp_path, family):
    """As transformers writes what its AutoModelForCausalLM has taken out of such a model."""
    ours, theirs = pair(family, "plain")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(nested | {"mtp.norm.weight": torch.zeros(3), "model.visual.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    model, weights = read_hf(tmp_path)
    assert model == ours.config
    assert all(torch.equal(weights[name], parameter) for name, parameter in ours.named_parameters())


def test_two_tensors_for_one_place_are_refused(tmp_path):
    _, theirs = pair("qwen3_5", "plain")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.language_model.norm.weight": tensors["model.norm.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="are two tensors for one place, model.norm.weight"):
        read_hf(tmp_path)


def test_a_norm_and_filters_are_read_as_transformers_and_as_published_files_have_them(tmp_path):
    """transformers saves one norm of OLMo Hybrid's attention under another name, and cuts the filters into equal parts."""
    ours, theirs = pair("olmo_hybrid", "attention first")
    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    published = as_published("olmo_hybrid", ours.config, saved)
    norm, filters = "model.layers.0.post_attention_layernorm.weight", [f"model.layers.1.linear_attn.{n}_conv1d.weight" for n in "qkv"]
    assert norm in published and norm not in saved
    assert [len(saved[name]) for name in filters] != [len(published[name]) for name in filters]
    for tensors in (saved, published):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        _, weights = read_hf(tmp_path)
        assert all(torch.equal(weights[name], parameter) for name, parameter in ours.named_parameters())
    save_file(published | {filters[0]: published[filters[0]][:-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{' with '.join(filters)} has shape \[95, 1, 4\], config.json says \[96, 1, 4\]"):
        read_hf(tmp_path)


def test_a_model_of_images_is_refused_with_what_to_do(tmp_path):
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="save its text model alone, by save_pretrained of transformers' AutoModelForCausalLM"):
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


def saved_without_head(family: str, name: str, directory) -> tuple:
    """A model, and the directory that transformers writes of its trunk: LlamaModel's, say."""
    ours, theirs = pair(family, name)
    theirs.base_model.save_pretrained(directory)
    assert not any(tensor.startswith("model.") for tensor in load_file(directory / "model.safetensors"))
    return ours, theirs


@pytest.mark.parametrize("family, name", TIED)
def test_files_of_the_base_model_are_read_where_the_head_is_tied(tmp_path, family, name):
    """They were refused for the name of the class, and else for a list of missing and surplus tensors."""
    ours, theirs = saved_without_head(family, name, tmp_path / "theirs")
    architecture = json.loads((tmp_path / "theirs" / "config.json").read_text())["architectures"]
    assert architecture == [type(theirs.base_model).__name__] != [type(theirs).__name__]
    verify = family in ("llama", "gpt2")
    imported = import_model(tmp_path / "theirs", tmp_path / "imported", verify=verify)
    model, weights, _ = read_checkpoint(tmp_path / "imported")
    assert model == ours.config and (not verify or imported.compared.difference <= 1e-5)
    assert all(torch.equal(weights[name], parameter) for name, parameter in ours.named_parameters())


@pytest.mark.parametrize("family, name", UNTIED)
def test_files_of_the_base_model_are_refused_where_the_head_is_not_tied(tmp_path, family, name):
    _, theirs = saved_without_head(family, name, tmp_path)
    head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    with pytest.raises(CheckpointError) as caught:
        read_hf(tmp_path)
    said = f"{tmp_path}: holds the base model without a head: {head} is missing, and config.json does not tie it to the embedding; "
    assert str(caught.value).startswith(said + f"save the model with its head, from {type(theirs).__name__}")
    # Nemotron-H has no other head than its own.
    assert ("or set tie_word_embeddings to true" in str(caught.value)) == (family != "nemotron_h")
    save_file(load_file(tmp_path / "model.safetensors") | {"extra.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{head} is missing \(1 missing, 1 surplus tensors\)"):
        read_hf(tmp_path)


def test_files_of_the_base_model_are_refused_in_one_line_as_model_family_hf(tmp_path):
    saved_without_head("qwen2", "plain", tmp_path)
    with pytest.raises(CheckpointError) as caught:
        HfDirectory(tmp_path, "hf")
    assert str(caught.value) == (
        f"{tmp_path}: holds the base model: embed_tokens.weight and all other names lack a word; save the whole model, from AutoModelForCausalLM"
    )
