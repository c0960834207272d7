"""An exported tokenizer gives transformers the ids that the model was trained on, or the export fails."""

import json
import os

import pytest

from pretrain.data.tokenizers.export import export_tokenizer
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import DataError


def automatic(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


@pytest.mark.parametrize("model_type", ["bpe", "unigram", "byte_bpe", "byte", "char"])
def test_auto_tokenizer_gives_the_same_ids_and_text(trained, texts, tmp_path, model_type):
    export_tokenizer(trained[model_type], tmp_path / "out", texts[:50])
    ours, theirs = load_tokenizer(trained[model_type]), automatic(tmp_path / "out")
    for text in texts[50:120]:
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert theirs.decode(ids) == (text.strip() if model_type == "unigram" else text)
    assert theirs.eos_token_id == ours.eod_id
    assert len(theirs) == ours.vocab_size


def test_each_type_is_written_in_the_form_that_keeps_its_ids(trained, tmp_path):
    for model_type in ("bpe", "unigram", "byte"):
        export_tokenizer(trained[model_type], tmp_path / model_type, [])
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(os.listdir(tmp_path / "bpe"))
    assert "tokenizer.model" not in os.listdir(tmp_path / "bpe")
    assert {"tokenizer.model", "tokenizer_config.json"} <= set(os.listdir(tmp_path / "unigram"))
    assert automatic(tmp_path / "bpe").eos_token == "</s>"
    assert (tmp_path / "byte" / "tokenizer.json").read_bytes() == (trained["byte"] / "tokenizer.json").read_bytes()


def test_an_exported_tokenizer_can_be_loaded_for_further_training(trained, texts, tmp_path):
    export_tokenizer(trained["bpe"], tmp_path / "out", [])
    ours, again = load_tokenizer(trained["bpe"]), load_tokenizer(tmp_path / "out")
    assert again.encode_batch(texts[:50]) == ours.encode_batch(texts[:50])
    assert again.eod_id == ours.eod_id
    assert again.encode("</s>") == ours.encode("</s>")


def test_transformers_reads_the_text_of_special_tokens_as_tokens_and_we_do_not(trained, tmp_path):
    export_tokenizer(trained["bpe"], tmp_path / "out", ["a document that mentions </s> and \u2581"])
    ours, theirs = load_tokenizer(trained["bpe"]), automatic(tmp_path / "out")
    assert ours.eod_id not in ours.encode("</s>")
    assert theirs.encode("</s>", add_special_tokens=False) == [theirs.eos_token_id]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mixtral", "gpt2"])
def test_a_model_config_beside_it_does_not_change_the_ids(trained, texts, tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for tokenizer in ("bpe", "byte_bpe", "byte"):
        export_tokenizer(trained[tokenizer], tmp_path, texts[:10])
        assert automatic(tmp_path).encode(texts[60], add_special_tokens=False) == load_tokenizer(trained[tokenizer]).encode(
            texts[60]
        )


def test_a_text_with_other_ids_is_named(trained, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.data.tokenizers.export.bpe_merges", lambda proto: [])
    with pytest.raises(DataError, match="transformers encodes '.*' differently from token 0 on") as caught:
        export_tokenizer(trained["bpe"], tmp_path / "out", texts[:3])
    assert "\n" not in str(caught.value)


def test_other_sentencepiece_types_are_refused_by_name(corpus, tmp_path, texts):
    import sentencepiece

    (tmp_path / "in.txt").write_text("\n".join(texts))
    options = {"input": str(tmp_path / "in.txt"), "model_prefix": str(tmp_path / "words"), "model_type": "word"}
    sentencepiece.SentencePieceTrainer.train(**options, vocab_size=100, minloglevel=2)
    with pytest.raises(DataError, match="words.model: only SentencePiece models of type bpe and unigram"):
        export_tokenizer(tmp_path / "words.model", tmp_path / "out", [])


def test_exporting_over_another_tokenizer_replaces_it_whole(trained, tmp_path):
    export_tokenizer(trained["unigram"], tmp_path)
    export_tokenizer(trained["bpe"], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    export_tokenizer(trained["unigram"], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.model", "tokenizer_config.json"]


def test_exporting_a_tokenizer_onto_itself_is_refused_and_harms_nothing(trained):
    with pytest.raises(DataError, match="another directory than its own"):
        export_tokenizer(trained["bpe"], trained["bpe"])
    assert load_tokenizer(trained["bpe"]).encode("a")
