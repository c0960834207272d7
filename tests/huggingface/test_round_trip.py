"""What leaves for transformers comes back bit-equal, and the other way round."""

from __future__ import annotations

import json

import pytest
import torch
from converting import edit_weights, files_of

from pretrain.errors import CheckpointError
from pretrain.huggingface.export_model import RECORD, export
from pretrain.huggingface.import_model import import_model
from pretrain.huggingface.open_model import read_checkpoint, read_hf
from pretrain.huggingface.verification import build


@pytest.mark.parametrize("which, dtype", [("run", "fp32"), ("tied", "fp32"), ("run", "bf16")])
def test_to_hf_from_hf_to_hf_is_bit_equal(request, tmp_path, which, dtype):
    source = request.getfixturevalue(which)
    export(source, tmp_path / "first", dtype)
    done = import_model(tmp_path / "first", tmp_path / "imported", verify=True)
    assert done.tokenizer.startswith("copied")
    assert done.compared.difference <= 1e-4
    export(tmp_path / "imported", tmp_path / "second", dtype)
    first, second = (files_of(tmp_path / name) for name in ("first", "second"))
    records = [json.loads(files.pop(RECORD)) for files in (first, second)]
    assert first == second
    assert records[0]["files"] == records[1]["files"]
    model, weights, _ = read_checkpoint(source)
    again, imported, _ = read_checkpoint(tmp_path / "imported")
    assert again == model
    if dtype == "fp32":
        assert imported.keys() == weights.keys()
        assert all(torch.equal(imported[name], tensor) for name, tensor in weights.items())


def test_a_model_that_transformers_saved_is_imported(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    done = import_model(tmp_path / "theirs", tmp_path / "imported", verify=True)
    assert done.tokenizer.startswith("none (")
    model, weights, _ = read_checkpoint(tmp_path / "imported")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert (build(model, weights)(ids) - theirs(ids).logits).abs().max() <= 1e-5
    state = json.loads((tmp_path / "imported" / "state.json").read_text())
    assert (state["step"], state["layout"]) == (0, "imported")


def test_a_limit_that_transformers_alone_obeys_is_a_note_and_no_difference(tmp_path):
    """A reviewer's Nemotron-H, saved by transformers, was refused by --verify: its shortest steps are below transformers' limit."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    mamba = {"ssm_state_size": 6, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "initializer_range": 0.2}
    config = NemotronHConfig(**sizes, **mamba, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"])
    NemotronHForCausalLM(config).save_pretrained(tmp_path / "theirs")
    done = import_model(tmp_path / "theirs", tmp_path / "imported", verify=True)
    assert done.compared is not None and done.notes == [
        "time_step_min=0.001 is obeyed by transformers alone, whose logits may differ from these; an export says 1e-20"
    ]


@pytest.mark.parametrize("content", [b"{", b"", b"\xff", b'{"version": "1.0"'])
def test_a_damaged_tokenizer_is_no_missing_one(tied, tmp_path, content):
    """The import went on without it, and a run with these weights took data of any tokenizer."""
    export(tied, tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is damaged, no JSON .* or remove it to import the weights alone"):
        import_model(tmp_path / "out", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_a_tied_head_that_is_written_twice_is_read_once(tied, tmp_path):
    export(tied, tmp_path / "out")
    edit_weights(tmp_path / "out", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    _, weights = read_hf(tmp_path / "out")
    assert "output.weight" not in weights
    edit_weights(tmp_path / "out", lambda w: w["lm_head.weight"].add_(1))
    with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight, and config.json says"):
        read_hf(tmp_path / "out")
