"""An export is a directory that transformers loads, whose files, fields and record say what is in it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from converting import PROMPT, SMALL, automatic, files_of, write
from safetensors.torch import load_file

from pretrain.config.attention_schema import AttentionConfig
from pretrain.errors import DataError
from pretrain.huggingface.export_model import export
from pretrain.huggingface.import_model import import_model
from pretrain.huggingface.open_model import open_model, read_hf
from pretrain.models.generate import generate


@pytest.mark.parametrize("which", ["run", "tied"])
def test_transformers_loads_an_export_and_computes_our_logits(request, tmp_path, which):
    from transformers import AutoTokenizer

    source = request.getfixturevalue(which)
    done = export(source, tmp_path / "out", verify=True)
    opened = open_model(source)
    decoder, tokenizer = opened.network, opened.tokenizer
    theirs = automatic(tmp_path / "out")
    ids = torch.randint(tokenizer.vocab_size, (3, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = theirs(ids).logits
        assert logits.std() > 0.1
        assert (logits - decoder(ids)).abs().max() <= 1e-4
    assert 0 <= done.compared.difference <= 1e-4
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
    assert done.compared.difference <= 1e-4


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


def test_the_record_says_what_was_verified_and_what_the_files_are(run, tmp_path):
    from importlib.metadata import version

    export(run, tmp_path / "out", "bf16", verify=True, shard_bytes=20_000)
    record = json.loads((tmp_path / "out" / "pretrain_export.json").read_text())
    checkpoint = run / "checkpoints" / "step-00000010"
    assert record["source"] == {
        "checkpoint": "step-00000010",
        "manifest_sha256": hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest(),
        "step": 10,
        "samples": 160,
        "tokens": 5120,
        "layout": "single",
        "weights": "model",
    }
    assert (record["family"], record["dtype"], record["tensors"]) == ("llama", "bfloat16", 21)
    assert 0 <= record["max_logit_difference"] <= 1e-4 and all(record["verified"].values())
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files_of(tmp_path / "out").items()}
    hashes.pop("pretrain_export.json")
    assert {name: item["sha256"] for name, item in record["files"].items()} == hashes
    assert record["versions"]["transformers"] == version("transformers")
    assert str(tmp_path) not in json.dumps(record)


def test_what_was_not_compared_is_recorded_as_such(exported):
    record = json.loads((exported / "pretrain_export.json").read_text())
    assert record["max_logit_difference"] is None and record["verified"]["logits"] is None
    assert record["vocabulary"] == {"rows": 257, "note": None}


def test_rows_that_are_no_token_are_exported_and_said(tied, tmp_path):
    done = export(tied, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 480 == len(load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"])
    [note] = done.notes
    assert (
        note == "the last 160 of 480 rows of the vocabulary are no token of the tokenizer; config.json's vocab_size counts them"
    )
    assert json.loads((tmp_path / "out" / "pretrain_export.json").read_text())["vocabulary"]["note"] == note


def test_the_configuration_has_the_fields_that_vllm_and_llama_cpp_read(exported):
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["dtype"] == config["torch_dtype"] == "float32"
    # Both spellings: `rope_parameters` of transformers 5, and `rope_theta` of what came before.
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "eos_token_id",
    ):  # fmt: skip
        assert config[name] is not None, name
    assert "chat_template" not in json.loads((exported / "tokenizer_config.json").read_text())
    assert json.loads((exported / "generation_config.json").read_text()) == {
        "bos_token_id": 256,
        "eos_token_id": 256,
        "do_sample": False,
    }


@pytest.mark.parametrize("which", ["run", "tied"])
def test_every_file_says_the_same_of_beginning_end_and_padding(request, tmp_path, which):
    """CL-2, CL-3, CL-6b: transformers' own check before training finds nothing to align."""
    from transformers import AutoTokenizer
    from transformers.trainer_utils import align_special_tokens

    export(request.getfixturevalue(which), tmp_path / "out")
    theirs, tokenizer = automatic(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    roles = ("bos_token_id", "eos_token_id", "pad_token_id")
    said = [[getattr(place, role) for role in roles] for place in (tokenizer, theirs.config, theirs.generation_config)]
    assert said == [[tokenizer.eos_token_id, tokenizer.eos_token_id, None]] * 3
    before = theirs.config.to_dict(), theirs.generation_config.to_dict()
    align_special_tokens(theirs, tokenizer)
    assert (theirs.config.to_dict(), theirs.generation_config.to_dict()) == before
    assert tokenizer.model_max_length == theirs.config.max_position_embeddings == 96


def test_a_tokenizer_with_a_padding_token_pads_in_every_file(byte_tokenizer, tmp_path):
    """CL-6b: what the tokenizer names for padding stands in config.json and generation_config.json as well."""
    tokenizer = Path(shutil.copytree(byte_tokenizer, tmp_path / "tokenizer"))
    said = json.loads((tokenizer / "tokenizer_config.json").read_text()) | {"pad_token": "<|endoftext|>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(said))
    export(write(tmp_path / "checkpoint", tokenizer), tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["pad_token_id"] == 256


def test_tokens_that_training_added_are_read_beside_the_tokenizer(byte_tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = Path(shutil.copytree(byte_tokenizer, tmp_path / "tokenizer"))
    ids = {"<|endoftext|>": 256, "<extra_id_0>": 258, "<extra_id_1>": 257}
    (tokenizer / "added_tokens.json").write_text(json.dumps(ids))
    model = dataclasses.replace(SMALL, vocab_size=262)
    done = export(write(tmp_path / "checkpoint", tokenizer, model), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.convert_tokens_to_ids(["<|endoftext|>", "<extra_id_1>", "<extra_id_0>"]) == [256, 257, 258]
    assert len(theirs) == 259 and done.notes[0].startswith("the last 3 of 262 rows")


@pytest.mark.parametrize("content", ['{"<extra_id_0>": 258}', '["<extra_id_0>"]', '{"<extra_id_0>": "257"}', "{"])
def test_added_tokens_whose_ids_do_not_follow_the_tokenizers_are_refused(byte_tokenizer, tmp_path, content):
    tokenizer = Path(shutil.copytree(byte_tokenizer, tmp_path / "tokenizer"))
    (tokenizer / "added_tokens.json").write_text(content)
    checkpoint = write(tmp_path / "checkpoint", tokenizer, dataclasses.replace(SMALL, vocab_size=262))
    with pytest.raises(DataError, match="added_tokens.json: expected tokens with ids from 257 on, each once; restore the file"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_generation_without_a_prompt_starts_where_a_document_does(run, tmp_path, capsys):
    """CL-6a: generate() without input begins with the end of a document, as tools/generate.py does."""
    export(run, tmp_path / "out")
    theirs = automatic(tmp_path / "out").generate(max_new_tokens=8, do_sample=False)[0].tolist()
    opened = open_model(tmp_path / "out")
    eod = opened.tokenizer.eod_id
    ours = generate(opened.network, [eod], 8, {eod}, temperature=0.0)
    assert opened.begin == [] and theirs[0] == eod and theirs[1 : 1 + len(ours)] == ours


def test_what_other_programs_compute_otherwise_is_said_and_recorded(byte_tokenizer, tmp_path):
    """CL-1k: llama.cpp has no sliding window for Mistral, and its converter drops it without a word; to-hf says so."""
    model = dataclasses.replace(SMALL, family="mistral", attention=AttentionConfig(window=8))
    done = export(write(tmp_path / "checkpoint", byte_tokenizer, model), tmp_path / "out")
    assert done.notes == ["model.attention.window=8 is ignored by llama.cpp, which computes model.family=mistral with 0"]
    assert json.loads((tmp_path / "out" / "pretrain_export.json").read_text())["notes"] == done.notes


def test_transformers_warns_of_nothing_in_an_export(exported, caplog, capsys):
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.get_logger("transformers").addHandler(caplog.handler)
    try:
        automatic(exported)
        AutoTokenizer.from_pretrained(exported)
    finally:
        logging.get_logger("transformers").removeHandler(caplog.handler)
    assert [record.message for record in caplog.records if record.name.startswith("transformers")] == []


def test_the_end_tokens_of_an_imported_chat_model_come_back(copied, tmp_path):
    said = json.loads((copied / "generation_config.json").read_text())
    chat = said | {"eos_token_id": [said["eos_token_id"], 5], "do_sample": True, "temperature": 0.7}
    (copied / "generation_config.json").write_text(json.dumps(chat))
    (copied / "chat_template.jinja").write_text("{{ messages }}")
    done = import_model(copied, tmp_path / "imported")
    assert any(note.startswith("chat_template.jinja stays where it is") for note in done.notes)
    export(tmp_path / "imported", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text()) == chat
    assert automatic(tmp_path / "back").generation_config.eos_token_id == chat["eos_token_id"]
