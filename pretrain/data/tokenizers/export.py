"""Tokenizer -> files that `transformers.AutoTokenizer.from_pretrained(DIR)` loads, offline and without remote code.

    SentencePiece BPE       tokenizer.json with the merges rebuilt from the pieces and their scores
    SentencePiece unigram   tokenizer.model for transformers' own SentencePiece backend: rebuilding it in `tokenizers`
                            resolves ties between pieces differently (2 % of documents)
    tokenizer.json          as it is

The export is proved before it counts: AutoTokenizer loads the result and has to give the same ids. Two differences remain
by design, and the proof leaves them out. transformers turns the text of a special token ("</s>") into its id, which chat
formats rely on, and which we never do inside a document. And a U+2581 in the text, which SentencePiece would read as a
space and which we keep, is read as a space.

The proof is about ids, which decide what a model sees and says. As for text, transformers' SentencePiece backend, which unigram
needs, decodes more coarsely than we do: it trims white space at both ends and spells byte pieces out ("<0xF0>").
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.data.tokenizers.tokenizer import (
    CONFIG_NAME,
    JSON_NAME,
    MODEL_NAME,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
)
from pretrain.errors import DataError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # piece types in sentencepiece_model.proto
_BPE, _UNIGRAM = 2, 1  # model types in it
_TOKENIZER_FILES = (JSON_NAME, MODEL_NAME, CONFIG_NAME, "special_tokens_map.json")
_SPACE_SYMBOL = "\u2581"
EDGE_CASES = (
    "",
    " ",
    "      six spaces,  two,   three   ",
    "\ttab\t\ttabs",
    "line\nline\n\n\n    indented\r\n\ttab",
    "def f(x):\n    return x + 1  # 12345\n",
    "emoji \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 end",
    "\u4e2d\u6587\u6587\u672c \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "caf\u00e9 is not cafe\u0301",  # composed and decomposed: a normaliser that joins them is caught
    "<0x41> byte-like text",
)


def export_tokenizer(tokenizer_dir: Path, output: Path, samples: Sequence[str] = (), added: Sequence[str] = ()) -> None:
    """Write the tokenizer of `tokenizer_dir` into the directory `output` for transformers.

    `samples` are texts of the corpus on which the exported tokenizer has to agree, besides the edge cases above; `added`: special tokens
    that follow its own, in the order of their ids.
    The model's config.json has to be in `output` before: AutoTokenizer reads the model type from it and gives some types a
    tokenizer class of its own choice, which only then can be prevented and proved.

    Raises DataError naming the first text whose ids differ, or the reason why transformers cannot load the result.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    output = Path(output)
    if output.resolve() == tokenizer.file.parent.resolve():
        raise DataError(f"{output}: export the tokenizer to another directory than its own")
    output.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:  # of an earlier export: whoever reads the directory would have to choose
        (output / name).unlink(missing_ok=True)
    if isinstance(tokenizer, SentencePieceTokenizer):
        _export_sentencepiece(tokenizer, output)
    else:
        tokenizer.save(output)
    _keep_class(output)
    if added:
        _add_tokens(tokenizer, output, added)
        _keep_class(output)
    _prove(tokenizer, output, samples)


def _export_sentencepiece(tokenizer: SentencePieceTokenizer, output: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2

    tokenizer.save(output)
    proto = sentencepiece_model_pb2.ModelProto.FromString((output / MODEL_NAME).read_bytes())
    if proto.trainer_spec.model_type == _BPE:
        (output / MODEL_NAME).unlink()  # left beside tokenizer.json, other programs would pick the one or the other
        _save_bpe(proto, output)
    elif proto.trainer_spec.model_type == _UNIGRAM:
        _save_unigram(proto, output)
    else:
        raise DataError(f"{tokenizer.file}: only SentencePiece models of type bpe and unigram can be exported")


def _special_tokens(proto: Any) -> dict[str, Any]:
    """The special tokens of a model by transformers' names; `extra_special_tokens` is a list."""
    spec = proto.trainer_spec
    ids = {"unk_token": spec.unk_id, "bos_token": spec.bos_id, "eos_token": spec.eos_id}
    named = {name: proto.pieces[id].piece for name, id in ids.items() if id >= 0}
    extra = [piece.piece for piece in proto.pieces if piece.type == _CONTROL and piece.piece not in named.values()]
    return {**named, "extra_special_tokens": extra} if extra else named


def _save_unigram(proto: Any, output: Path) -> None:
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    SentencePieceBackend(vocab_file=str(output / MODEL_NAME), **_special_tokens(proto)).save_pretrained(output)


def _save_bpe(proto: Any, output: Path) -> None:
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as FastTokenizer
    from transformers import PreTrainedTokenizerFast

    special = _special_tokens(proto)
    dummy_prefix = proto.normalizer_spec.add_dummy_prefix
    vocabulary = {piece.piece: id for id, piece in enumerate(proto.pieces)}
    model = models.BPE(vocabulary, bpe_merges(proto), unk_token=special["unk_token"], fuse_unk=True, byte_fallback=True)
    fast = FastTokenizer(model)
    spaces = [normalizers.Replace(" ", _SPACE_SYMBOL)]
    fast.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_SYMBOL), *spaces] if dummy_prefix else spaces)
    # Spaces first: a U+2581 that comes out of the bytes was one in the text.
    decoding = [decoders.Replace(_SPACE_SYMBOL, " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if dummy_prefix else decoding)
    control = [AddedToken(p.piece, normalized=False, special=True) for p in proto.pieces if p.type == _CONTROL]
    fast.add_special_tokens(control)
    PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **special).save_pretrained(output)


def bpe_merges(proto: Any) -> list[tuple[str, str]]:
    """The merges that make the pieces of a SentencePiece BPE model, best first.

    A model stores pieces with scores, not merges: every way to cut a piece into two known pieces is a merge with the
    piece's score, and the stable sort keeps the order of the pieces among equals.
    """
    ids = {piece.piece: id for id, piece in enumerate(proto.pieces) if piece.type in (_NORMAL, _USER_DEFINED)}
    merges: list[tuple[float, str, str]] = []
    for piece in proto.pieces:
        if piece.type != _NORMAL:
            continue
        cuts = [(piece.piece[:i], piece.piece[i:]) for i in range(1, len(piece.piece))]
        known = [(left, right) for left, right in cuts if left in ids and right in ids]
        known.sort(key=lambda cut: (ids[cut[0]], ids[cut[1]]))
        merges += [(piece.score, left, right) for left, right in known]
    merges.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in merges]


def _keep_class(output: Path) -> None:
    """Keep AutoTokenizer from replacing the tokenizer's class by the one it registers for the model type.

    For some types (qwen2, phi3) transformers 5 takes the class named in tokenizer_config.json for a mistake and rebuilds the
    tokenizer with splitting rules of its own: other ids, without a word. For these types, and only for these, an `auto_map`
    without entries makes it keep the class; no code is run.
    """
    config = output / "config.json"
    if not config.is_file():
        return
    from transformers.models.auto import tokenization_auto

    model_type = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    if model_type not in getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", ()):
        return
    tokenizer_config = output / CONFIG_NAME
    content = json.loads(tokenizer_config.read_text(encoding="utf-8"))
    if "auto_map" not in content:
        content["auto_map"] = [None, None]
        tokenizer_config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _add_tokens(tokenizer: Tokenizer, output: Path, added: Sequence[str]) -> None:
    exported = _load(output)
    known = exported.get_vocab()
    if double := next((token for token in added if token in known), None):
        raise DataError(
            f"{output}: the tokenizer has {double} as token {known[double]} already; where it has the sentinels itself, set "
            "data.span_corruption.first_sentinel"
        )
    exported.add_special_tokens({"extra_special_tokens": [*exported.extra_special_tokens, *added]})
    ids = exported.convert_tokens_to_ids(list(added))
    if ids != list(range(tokenizer.vocab_size, tokenizer.vocab_size + len(added))):
        raise DataError(f"{output}: transformers gives {added[0]} the id {ids[0]}, not {tokenizer.vocab_size}")
    exported.save_pretrained(output)


def _load(output: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(output), local_files_only=True, trust_remote_code=False)


def _prove(tokenizer: Tokenizer, output: Path, samples: Sequence[str]) -> None:
    try:
        exported = _load(output)
    except Exception as error:
        reason = str(error).split("\n")[0]
        remedy = "export it to a directory without the model's config.json, or train a tokenizer of type bpe"
        raise DataError(f"{output}: transformers cannot load the exported tokenizer ({reason}); {remedy}") from error
    if exported.eos_token_id != tokenizer.eod_id:
        raise DataError(f"{output}: transformers reads end of text as {exported.eos_token_id}, not {tokenizer.eod_id}")
    left_out = [*exported.all_special_tokens, *exported.extra_special_tokens, _SPACE_SYMBOL]
    for text in (*EDGE_CASES, *samples):
        for token in left_out:
            text = text.replace(token, "")
        _compare(tokenizer, exported, output, text)


def _compare(tokenizer: Tokenizer, exported: Any, output: Path, text: str) -> None:
    try:
        expected = tokenizer.encode(text)
    except DataError:  # a vocabulary of characters need not know those of the edge cases
        return
    actual = exported.encode(text, add_special_tokens=False)
    if actual != expected:
        where = next((i for i, (a, b) in enumerate(zip(actual, expected)) if a != b), min(len(actual), len(expected)))
        raise DataError(
            f"{output}: transformers encodes {text[:80]!r} differently from token {where} on"
            f" ({actual[where : where + 3]}, not {expected[where : where + 3]}); the exported tokenizer must not be used"
        )
