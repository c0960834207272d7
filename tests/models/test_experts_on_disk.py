"""Families with experts on disk: what transformers saves we read, and what we write transformers loads."""

from __future__ import annotations

import pytest
import torch
from parity import cases, pair, tokens
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pretrain.errors import CheckpointError
from pretrain.huggingface.open_model import read_hf
from pretrain.models.families import family_of
from pretrain.models.families.declare.weights import resolve

# Names on the hub, of the first layer that has experts.
ON_THE_HUB = {
    "mixtral": ["layers.0.block_sparse_moe.gate.weight", "layers.0.block_sparse_moe.experts.3.w2.weight"],
    "qwen3_moe": ["layers.0.mlp.gate.weight", "layers.0.mlp.experts.5.down_proj.weight", "layers.0.self_attn.q_norm.weight"],
    "deepseek_v3": [
        "layers.1.mlp.gate.e_score_correction_bias", "layers.1.mlp.experts.7.up_proj.weight",
        "layers.1.mlp.shared_experts.gate_proj.weight", "layers.0.mlp.gate_proj.weight",
        "layers.0.self_attn.kv_a_proj_with_mqa.weight",
    ],
    "gpt_oss": [
        "layers.0.mlp.router.bias", "layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.gate_up_proj_bias",
        "layers.0.mlp.experts.down_proj", "layers.0.mlp.experts.down_proj_bias", "layers.0.self_attn.sinks",
    ],
    "glm4_moe": [
        "layers.1.mlp.gate.e_score_correction_bias", "layers.1.mlp.experts.7.up_proj.weight", "layers.0.mlp.gate_proj.weight",
        "layers.1.mlp.shared_experts.gate_proj.weight", "layers.0.self_attn.q_proj.bias",
    ],
    "minimax_m2": [
        "layers.0.block_sparse_moe.e_score_correction_bias", "layers.0.block_sparse_moe.experts.7.w2.weight",
        "layers.0.block_sparse_moe.gate.weight", "layers.0.self_attn.q_norm.weight",
    ],
    "olmoe": ["layers.0.mlp.gate.weight", "layers.0.mlp.experts.5.down_proj.weight", "layers.0.self_attn.k_norm.weight"],
    "ernie4_5_moe": [
        "layers.1.mlp.moe_statics.e_score_correction_bias", "layers.1.mlp.experts.7.up_proj.weight", "layers.0.mlp.gate_proj.weight",
        "layers.1.mlp.shared_experts.gate_proj.weight",
    ],
}  # fmt: skip
EVERY = pytest.mark.parametrize("family, name", [(family, next(iter(cases(family)))) for family in ON_THE_HUB])


@EVERY
def test_what_transformers_saves_has_the_names_of_the_hub_and_is_read_bit_for_bit(family, name, tmp_path):
    ours, theirs = pair(family, name)
    theirs.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {f"model.{n}" for n in ON_THE_HUB[family]} <= set(file.keys())
    model, weights = read_hf(tmp_path)
    assert model == ours.config
    expected = dict(ours.named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[n], expected[n]) for n in expected)


@EVERY
def test_what_we_write_transformers_loads_and_computes(family, name, tmp_path):
    import json

    from transformers import AutoModelForCausalLM

    ours, _ = pair(family, name)
    parameters, entry, tensors = dict(ours.named_parameters()), family_of(family), {}
    for line in resolve(entry.weights, ours.config, list(parameters)):
        written = line.layout.to_theirs([parameters[n].detach() for n in line.ours], ours.config)
        tensors |= dict(zip(line.theirs, (t.contiguous() for t in written)))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(entry.to_hf(ours.config)))
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    ids = tokens(ours.config, 2, 30)
    with torch.no_grad():
        assert (loaded.eval()(ids).logits - ours(ids)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("family", "ahead"),
    [
        ("deepseek_v3", ["model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight"]),
        ("glm4_moe", ["model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight"]),
        ("ernie4_5_moe", ["model.mtp_block.0.input_layernorm.weight", "model.mtp_linear_proj.0.weight"]),
    ],
)
def test_layers_that_predict_further_ahead_are_left_out_and_that_is_said(family, ahead, tmp_path, caplog):
    ours, theirs = pair(family, "plain")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {name: torch.zeros(4) for name in ahead}
    save_file(tensors, tmp_path / "model.safetensors")
    model, weights = read_hf(tmp_path)
    assert model == ours.config and weights.keys() == dict(ours.named_parameters()).keys()
    assert f"left out, as transformers does: {ahead[0]} (2 tensors)" in caplog.text
    save_file(tensors | {"model.layers.1.extra.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.layers.1.extra.weight has no place in " + family):
        read_hf(tmp_path)


def test_corrections_of_an_export_in_bf16_stay_in_fp32(tmp_path, pool):
    from pretrain.huggingface.export_model import export
    from pretrain.huggingface.import_model import import_model

    ours, theirs = pair("deepseek_v3", "plain")
    theirs.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "exported", "bf16")
    written = load_file(tmp_path / "exported" / "model.safetensors")
    kinds = {name: tensor.dtype for name, tensor in written.items()}
    corrections = [name for name in kinds if name.endswith("e_score_correction_bias")]
    assert corrections and all(kinds.pop(name) == torch.float32 for name in corrections)
    assert set(kinds.values()) == {torch.bfloat16}


def test_an_expert_of_another_shape_is_named(tmp_path):
    _, theirs = pair("mixtral", "plain")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    save_file(tensors | {name: torch.zeros(3, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="block_sparse_moe.experts.0.w1.weight has shape|experts.2.w1.weight has shape"):
        read_hf(tmp_path)
