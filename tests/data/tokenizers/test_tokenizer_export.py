"""An exported tokenizer gives transformers the ids that the model was trained on, or the export fails."""

import heapq
import json
import os
import shutil

import pytest
from hard_texts import HARD, SPECIAL

from pretrain.data.tokenizers.export import export_tokenizer, save_trimmed
from pretrain.data.tokenizers.tokenizer import SentencePieceTokenizer, load_tokenizer
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.errors import DataError
from pretrain.models.families import families


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


def config_of(path):
    return json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))


def test_each_type_is_written_in_the_form_that_keeps_its_ids(trained, tmp_path):
    """CL-1a, CL-1d, CL-4d: SentencePiece BPE has its scores beside tokenizer.json, and a class that transformers 4 knows too."""
    for model_type in ("bpe", "unigram", "byte"):
        export_tokenizer(trained[model_type], tmp_path / model_type, [])
    assert sorted(os.listdir(tmp_path / "bpe")) == ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    assert (tmp_path / "bpe" / "tokenizer.model").read_bytes() == (trained["bpe"] / "tokenizer.model").read_bytes()
    # Under another name, or llama.cpp's converter would take it for BPE.
    assert sorted(os.listdir(tmp_path / "unigram")) == ["spiece.model", "tokenizer_config.json"]
    assert (tmp_path / "unigram" / "spiece.model").read_bytes() == (trained["unigram"] / "tokenizer.model").read_bytes()
    assert (tmp_path / "byte" / "tokenizer.json").read_bytes() == (trained["byte"] / "tokenizer.json").read_bytes()
    classes = {name: config_of(tmp_path / name)["tokenizer_class"] for name in ("bpe", "unigram", "byte")}
    fast = "PreTrainedTokenizerFast"
    assert classes == {"bpe": fast, "unigram": "BertGenerationTokenizer", "byte": fast}


def merged_by_score(pieces: dict[str, tuple[int, float]], text: str) -> list[int]:
    """Ids as llama.cpp's SPM tokenizer makes them: of all neighbours the pair with the best score is joined, the leftmost of equals; what
    is no piece in the end is spelled in bytes.
    """
    parts: list[str | None] = list(text.replace(" ", "\u2581"))
    after = list(range(1, len(parts) + 1))
    before = list(range(-1, len(parts) - 1))
    queue: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right < len(parts) and (joined := parts[left] + parts[right]) in pieces:
            heapq.heappush(queue, (-pieces[joined][1], left, right, joined))

    for i in range(1, len(parts)):
        offer(i - 1, i)
    while queue:
        _, left, right, joined = heapq.heappop(queue)
        if parts[left] is None or parts[right] is None or parts[left] + parts[right] != joined:
            continue
        parts[left], parts[right] = joined, None
        after[left] = after[right]
        if after[right] < len(parts):
            before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    ids = []
    for part in filter(None, parts):
        spelled = [part] if part in pieces else [f"<0x{byte:02X}>" for byte in part.encode()]
        ids += [pieces[piece][0] for piece in spelled]
    return ids


def test_the_scores_that_an_export_holds_are_enough_for_our_ids(trained, texts, tmp_path):
    """CL-1a: llama.cpp merges by the score, which it finds in tokenizer.model alone."""
    from sentencepiece import sentencepiece_model_pb2

    export_tokenizer(trained["bpe"], tmp_path)
    proto = sentencepiece_model_pb2.ModelProto.FromString((tmp_path / "tokenizer.model").read_bytes())
    pieces = {piece.piece: (id, piece.score) for id, piece in enumerate(proto.pieces) if piece.type in (1, 6)}
    ours = load_tokenizer(trained["bpe"])
    for text in [*HARD, *texts[:40]]:
        assert merged_by_score(pieces, text) == ours.encode(text), text
    # What its converter writes without the file, the same score for every piece, gives other ids.
    flat = {piece: (id, -1000.0) for piece, (id, _) in pieces.items()}
    assert sum(merged_by_score(flat, text) != ours.encode(text) for text in texts[:40]) >= 20


@pytest.mark.parametrize("model_type", ["bpe", "unigram", "byte_bpe"])
def test_nothing_stands_before_a_text_and_what_may_begin_one_is_the_end_of_document(trained, tmp_path, model_type):
    """CL-1b, CL-1c, CL-2: no token and no space are put first, and no token that training never used is called the beginning."""
    special = export_tokenizer(trained[model_type], tmp_path, longest=64)
    ours, theirs, said = load_tokenizer(trained[model_type]), automatic(tmp_path), config_of(tmp_path)
    assert said["bos_token"] == said["eos_token"] and said["add_bos_token"] is False
    assert said.get("add_prefix_space") is (False if model_type == "bpe" else None)
    assert theirs("hello")["input_ids"] == ours.encode("hello")
    assert (special.bos, special.eos, special.pad, special.note) == (ours.eod_id, ours.eod_id, None, None)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (ours.eod_id, ours.eod_id, None)


def test_a_text_that_is_too_long_for_the_model_is_warned_of(trained, tmp_path, caplog):
    """CL-6c: model_max_length is the model's number of positions."""
    export_tokenizer(trained["bpe"], tmp_path, longest=20)
    assert automatic(tmp_path).model_max_length == config_of(tmp_path)["model_max_length"] == 20
    export_tokenizer(trained["byte_bpe"], tmp_path, longest=2048)
    assert automatic(tmp_path).model_max_length == 2048


def test_special_tokens_are_named_as_both_versions_of_transformers_read_them(trained, corpus, tmp_path):
    """CL-4f: transformers 4 fails on a list of `extra_special_tokens`; the older name is read by both."""
    for model_type in ("bpe", "byte_bpe"):
        train_tokenizer(
            [str(corpus)], tmp_path / model_type, model_type, 500, special_tokens=["<|fim_prefix|>", "<|fim_suffix|>"]
        )
        export_tokenizer(tmp_path / model_type, tmp_path / "out")
        said, theirs = config_of(tmp_path / "out"), automatic(tmp_path / "out")
        assert "extra_special_tokens" not in said
        assert {"<|fim_prefix|>", "<|fim_suffix|>"} <= set(said["additional_special_tokens"])
        ids = [load_tokenizer(tmp_path / model_type).special_id(t) for t in ("<|fim_prefix|>", "<|fim_suffix|>")]
        assert theirs.encode("<|fim_prefix|><|fim_suffix|>", add_special_tokens=False) == ids


def test_tokens_that_are_added_are_in_every_file(trained, tmp_path):
    for model_type in ("bpe", "unigram", "byte_bpe"):
        ours = load_tokenizer(trained[model_type])
        export_tokenizer(trained[model_type], tmp_path, added=["<extra_id_1>", "<extra_id_0>"])
        theirs = automatic(tmp_path)
        assert theirs.convert_tokens_to_ids(["<extra_id_1>", "<extra_id_0>"]) == [ours.vocab_size, ours.vocab_size + 1]
        text = theirs.encode("ab<extra_id_0>cd", add_special_tokens=False)
        assert text == [*ours.encode("ab"), ours.vocab_size + 1, *ours.encode("cd")]
        assert len(theirs) == ours.vocab_size + 2


def test_a_tokenizer_of_elsewhere_keeps_its_beginning_which_is_said(trained, tmp_path):
    """CL-2: what another tokenizer calls the beginning of a text is not ours to change, but worth a word."""
    source = tmp_path / "source"
    load_tokenizer(trained["byte_bpe"]).save(source)
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    first = content["added_tokens"][0]
    content["added_tokens"].append({**first, "id": 500, "content": "<|begin|>"})
    (source / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    said = config_of(source) | {"bos_token": "<|begin|>", "pad_token": "<|endoftext|>", "extra_special_tokens": ["<|x|>"]}
    (source / "tokenizer_config.json").write_text(json.dumps(said))
    special = export_tokenizer(source, tmp_path / "out")
    assert (special.bos, special.pad) == (500, special.eos)
    assert "names <|begin|> as the beginning of a text" in special.note
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [500], "tokens": ["<|begin|>"]}},
    }
    (source / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert "adds <|begin|> to every text" in export_tokenizer(source, tmp_path / "out").note


def test_an_export_that_was_imported_is_exported_with_its_scores_again(trained, texts, tmp_path, caplog):
    """CL-1a: tokenizer.model survives the way there and back, unless its ids are not those of tokenizer.json."""
    export_tokenizer(trained["bpe"], tmp_path / "out")
    save_trimmed(load_tokenizer(tmp_path / "out"), 500, tmp_path / "imported")
    export_tokenizer(tmp_path / "imported", tmp_path / "again", texts[:10])
    assert (tmp_path / "again" / "tokenizer.model").read_bytes() == (trained["bpe"] / "tokenizer.model").read_bytes()
    assert config_of(tmp_path / "again") == config_of(tmp_path / "out")
    (tmp_path / "imported" / "tokenizer.model").write_bytes((trained["unigram"] / "tokenizer.model").read_bytes())
    export_tokenizer(tmp_path / "imported", tmp_path / "third", texts[:10])
    assert not (tmp_path / "third" / "tokenizer.model").exists()
    assert "tokenizer.model is left out: it encodes" in caplog.text


def test_an_exported_tokenizer_can_be_loaded_for_further_training(trained, texts, tmp_path):
    export_tokenizer(trained["bpe"], tmp_path / "out", [])
    ours, again = load_tokenizer(trained["bpe"]), load_tokenizer(tmp_path / "out")
    assert [again.encode(text) for text in texts[:50]] == [ours.encode(text) for text in texts[:50]]
    assert again.eod_id == ours.eod_id
    assert again.encode("</s>") == ours.encode("</s>")


def test_a_text_that_the_tokenizer_refuses_proves_nothing_and_ends_no_export(
    trained, t5_tokenizer, tmp_path, caplog, monkeypatch
):
    """Neither when transformers reads the result, nor when a SentencePiece model beside tokenizer.json is held against it."""
    monkeypatch.setattr("pretrain.data.tokenizers.export.EDGE_CASES", ())  # they differ, and nothing after them would be compared
    shutil.copytree(t5_tokenizer, tmp_path / "t5")
    shutil.copyfile(trained["unigram"] / "tokenizer.model", tmp_path / "t5" / "tokenizer.model")
    export_tokenizer(tmp_path / "t5", tmp_path / "out", ["a <pad> b", "abc"])
    ours, theirs = load_tokenizer(t5_tokenizer), automatic(tmp_path / "out")
    assert theirs.encode("abc", add_special_tokens=False) == ours.encode("abc")
    assert "tokenizer.model is left out: it encodes" in caplog.text


def test_transformers_reads_the_text_of_special_tokens_as_tokens_and_we_do_not(trained, tmp_path):
    export_tokenizer(trained["bpe"], tmp_path / "out", ["a document that mentions </s> and \u2581"])
    ours, theirs = load_tokenizer(trained["bpe"]), automatic(tmp_path / "out")
    assert ours.eod_id not in ours.encode("</s>")
    assert theirs.encode("</s>", add_special_tokens=False) == [theirs.eos_token_id]


@pytest.mark.parametrize("family", [family for family in families() if family.name != "t5"], ids=lambda family: family.name)
def test_a_model_config_beside_it_does_not_change_the_ids(trained, texts, tmp_path, family):
    """CL-4e: the class is kept without an `auto_map` of nulls, on which transformers 4 fails; every type goes with every family."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family.model_type}))
    for model_type in ("bpe", "unigram", "byte_bpe", "byte"):
        export_tokenizer(trained[model_type], tmp_path, texts[:3])
        ours, theirs = load_tokenizer(trained[model_type]), automatic(tmp_path)
        for text in (*HARD, texts[60]):
            if text != SPECIAL:
                assert theirs.encode(text) == ours.encode(text), text
        assert config_of(tmp_path).get("auto_map", {"AutoTokenizer": ["", ""]}) == {"AutoTokenizer": ["", ""]}
        if model_type == "bpe":
            assert SentencePieceTokenizer(tmp_path / "tokenizer.model").encode(texts[60]) == ours.encode(texts[60])


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
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    export_tokenizer(trained["unigram"], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["spiece.model", "tokenizer_config.json"]


def test_exporting_a_tokenizer_onto_itself_is_refused_and_harms_nothing(trained):
    with pytest.raises(DataError, match="another directory than its own"):
        export_tokenizer(trained["bpe"], trained["bpe"])
    assert load_tokenizer(trained["bpe"]).encode("a")
