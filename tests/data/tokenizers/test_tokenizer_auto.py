"""Directories with the older files of transformers are tokenizers too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.errors import DataError


@pytest.fixture
def gpt2_files(tmp_path, monkeypatch) -> Path:
    """vocab.json and merges.txt, as GPT-2 came."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    train_tokenizer([__file__], tmp_path / "trained", "byte_bpe", 400)
    specification = json.loads((tmp_path / "trained" / "tokenizer.json").read_text())
    vocabulary = specification["model"]["vocab"] | {token["content"]: token["id"] for token in specification["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in specification["model"]["merges"]]
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    names = {name: "<|endoftext|>" for name in ("eos_token", "bos_token", "unk_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | names))
    return folder


def test_the_ids_are_those_of_autotokenizer(gpt2_files):
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(str(gpt2_files), local_files_only=True)
    ours = load_tokenizer(gpt2_files)
    for text in (
        "def f(x):\n    return x + 1\n",
        "  tabs\tand é, 中文, 😀",
        Path(__file__).read_text().replace("<|endoftext|>", ""),
    ):
        assert ours.encode(text) == reference(text, add_special_tokens=False).input_ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.eod_id == reference.eos_token_id
    assert load_tokenizer(gpt2_files).fingerprint == ours.fingerprint


def test_what_autotokenizer_cannot_read_is_one_line_and_runs_no_code(gpt2_files, tmp_path):
    (gpt2_files / "merges.txt").unlink()
    (gpt2_files / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass T: pass\n")
    config = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["evil.T", None]}}
    (gpt2_files / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(
        DataError, match=r"gpt2: no tokenizer.json, no \*.model, and AutoTokenizer cannot read it \(.*\); train one"
    ) as e:
        load_tokenizer(gpt2_files)
    assert "\n" not in str(e.value) and not (tmp_path / "ran").exists()
