"""An export is a directory that transformers loads, whose files, fields and record say what is in it."""

from __future__ import annotations

import json

import pytest
import torch
from converting import PROMPT, automatic, files_of
from safetensors.torch import load_file

from pretrain.checkpoint.hf_export import export
from pretrain.checkpoint.open_model import open_model, read_hf


@pytest.mark.parametrize("which", ["run", "tied"])
def test_transformers_loads_an_export_and_computes_our_logits(request, tmp_path, which):
    from transformers import AutoTokenizer

    source = request.getfixturevalue(which)
    done = export(source, tmp_path / "out", verify=True)
    decoder, tokenizer = open_model(source)
    theirs = automatic(tmp_path / "out")
    ids = torch.randint(tokenizer.vocab_size, (3, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = theirs(ids).logits
        assert logits.std() > 0.1
        assert (logits - decoder(ids)).abs().max() <= 1e-4
    assert 0 <= done.difference <= 1e-4
    assert done.parameters == theirs.num_parameters()
    assert theirs.config.tie_word_embeddings == (which == "tied")
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == tokenizer.eod_id
    assert theirs.config.max_position_embeddings == 96
    their_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert their_tokenizer.encode(PROMPT, add_special_tokens=False) == tokenizer.encode(PROMPT)
    assert their_tokenizer.eos_token_id == tokenizer.eod_id


def test_an_export_holds_weights_and_json_and_nothing_that_runs_code(exported):
    assert sorted(files_of(exported)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "pretrain_export.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((exported / "config.json").read_text())
    assert not {"auto_map", "trust_remote_code", "custom_pipelines"} & config.keys()


def test_a_tied_head_is_written_once(tied, tmp_path):
    export(tied, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("dtype, torch_dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_half_precision_export_holds_the_rounded_weights_and_says_so(run, exported, tmp_path, dtype, torch_dtype):
    done = export(run, tmp_path / "out", dtype, verify=True)
    whole, half = load_file(exported / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert whole.keys() == half.keys()
    assert all(torch.equal(half[name], tensor.to(torch_dtype)) for name, tensor in whole.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == str(torch_dtype).removeprefix("torch.")
    assert automatic(tmp_path / "out").dtype == torch_dtype
    assert done.difference <= 1e-4


def test_a_large_export_is_cut_into_shards_with_an_index(run, exported, tmp_path):
    done = export(run, tmp_path / "out", shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    whole = load_file(exported / "model.safetensors")
    assert [p.name for p in shards] == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert done.files == len(shards) > 3
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    assert index["weight_map"] == {name: p.name for p in shards for name in load_file(p)}
    for shard in shards:
        tensors = load_file(shard)
        assert sum(t.nbytes for t in tensors.values()) <= 20_000 or len(tensors) == 1
    theirs = automatic(tmp_path / "out").state_dict()
    assert theirs.keys() == whole.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in whole.items())
    _, weights = read_hf(tmp_path / "out")
    assert all(torch.equal(weights[name], tensor) for name, tensor in read_hf(exported)[1].items())
