"""Tokenizer -> files that other programs read as we do: transformers 4 and 5, vLLM and lm-eval through them, llama.cpp's converter.

    SentencePiece BPE       tokenizer.json with the merges rebuilt from the pieces and their scores, and tokenizer.model beside it:
                            llama.cpp merges by score, and finds the scores nowhere else
    SentencePiece unigram   spiece.model, read by the plainest class that both transformers have for SentencePiece. Rebuilding it in
                            `tokenizers` resolves ties between pieces differently (2 % of documents)
    tokenizer.json          as it is

The export is proved before it is accepted: AutoTokenizer loads the result and must give the same ids. Two differences remain by
design, and the proof leaves them out. First, transformers turns the text of a special token ("</s>") into its id. Chat formats
rely on that, but we never do it inside a document. Second, transformers reads a U+2581 in the text as a space, while we keep it.

The proof compares ids, because they decide what a model sees and says. Decoded text may differ: transformers' SentencePiece
backend, which unigram needs, trims white space at both ends and spells byte pieces out ("<0xF0>").

If a tokenizer names no beginning of text, it gets the end of document for it, like GPT-2. In training that token stands before a
document. Programs that put a token first (lm-eval, generation without a prompt) then put one that the model knows.
"""

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.data.tokenizers.tokenizer import (
    CONFIG_NAME,
    JSON_NAME,
    MODEL_NAME,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    read_bytes,
)
from pretrain.errors import DataError
from pretrain.storage import real

log = logging.getLogger(__name__)

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # piece types in sentencepiece_model.proto
_BPE, _UNIGRAM = 2, 1  # model types in it
UNIGRAM_NAME = "spiece.model"
ADDED_NAME = "added_tokens.json"
"""A file beside a tokenizer's own files, as in transformers: special tokens that training added, with their ids."""
_TOKENIZER_FILES = (JSON_NAME, MODEL_NAME, UNIGRAM_NAME, CONFIG_NAME, "special_tokens_map.json")
_SPACE_SYMBOL = "\u2581"
# transformers 5 writes TokenizersBackend for it. Version 4 does not know that name, but 5 knows the older one.
_FAST_CLASS, _BACKEND = "PreTrainedTokenizerFast", "TokenizersBackend"
_UNIGRAM_CLASS = "BertGenerationTokenizer"  # it adds and normalises nothing
# Keys of a tokenizer_config.json that name the places of its files, or code that is not exported.
_LEFT_OUT = ("auto_map", "name_or_path", "tokenizer_file", "special_tokens_map_file", "vocab_file", "is_local", "backend")
EDGE_CASES = (
    "",
    " ",
    "      six spaces,  two,   three   ",
    "\ttab\t\ttabs",
    "line\nline\n\n\n    indented\r\n\ttab",
    "def f(x):\n    return x + 1  # 12345\n",
    "emoji \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 end",
    "\u4e2d\u6587\u6587\u672c \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "caf\u00e9 is not cafe\u0301",  # composed and decomposed: this catches a normaliser that joins them
    "<0x41> byte-like text",
)


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokens that begin, end and pad a text. config.json and generation_config.json must name the same ids.

    `note`: what a user of the export should know about them.
    """

    bos: int | None
    eos: int
    pad: int | None
    note: str | None = None


def export_tokenizer(
    tokenizer_dir: Path,
    output: Path,
    samples: Sequence[str] = (),
    added: Sequence[str] = (),
    *,
    longest: int | None = None,
    begins: bool = True,
    pad_id: int | None = None,
) -> SpecialIds:
    """Write the tokenizer of `tokenizer_dir` into the directory `output`.

    `samples`: texts of the corpus on which the exported tokenizer must agree, besides the edge cases above. `added`: special tokens
    after its own, in the order of their ids. `longest`: the positions of the model. `begins`: whether a text may begin with a token
    (false for encoder-decoders). `pad_id`: the token that pads, if the model decides it. The model's config.json must be in `output`
    before. AutoTokenizer reads the model type from it and chooses its own tokenizer class for some types; only then can this be
    prevented and proved.

    Raises DataError naming the first text whose ids differ, or the reason why transformers cannot load the result.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    output = Path(output)
    if real(output) == real(tokenizer.file.parent):
        raise DataError(f"{output}: export the tokenizer to another directory than its own")
    output.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:  # files of an earlier export would be ambiguous
        (output / name).unlink(missing_ok=True)
    if isinstance(tokenizer, SentencePieceTokenizer):
        content, tokens = _export_sentencepiece(tokenizer, output)
    else:
        content, tokens = _export_json(tokenizer, output, samples)
    if begins and not content.get("bos_token"):
        content |= {"bos_token": content["eos_token"], "add_bos_token": False}
    if pad_id is not None and pad_id < len(tokens):
        content["pad_token"] = tokens[pad_id]
    if longest is not None:
        content["model_max_length"] = longest
    if added:
        _add_tokens(tokens, content, output, added)
    _write(content, output)
    _keep_class(content, output)
    return _prove(tokenizer, output, samples, begins)


# ---- SentencePiece ----------------------------------------------------------------------------------------------------


def _export_sentencepiece(tokenizer: SentencePieceTokenizer, output: Path) -> tuple[dict[str, Any], list[str]]:
    """Write the files that decide ids. Return the contents of tokenizer_config.json, and the tokens."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.file.read_bytes())
    content = {**_special_tokens(proto), "clean_up_tokenization_spaces": False}
    if proto.trainer_spec.model_type == _BPE:
        shutil.copyfile(tokenizer.file, output / MODEL_NAME)
        _save_bpe(proto, content, output)
        content |= {"tokenizer_class": _FAST_CLASS, "add_prefix_space": proto.normalizer_spec.add_dummy_prefix}
    elif proto.trainer_spec.model_type == _UNIGRAM:
        # Not as tokenizer.model: llama.cpp's converter would silently take it for BPE.
        shutil.copyfile(tokenizer.file, output / UNIGRAM_NAME)
        content |= {"tokenizer_class": _UNIGRAM_CLASS, "sep_token": None}
        content.setdefault("pad_token", None)  # the class has its own tokens for these two
    else:
        raise DataError(f"{tokenizer.file}: only SentencePiece models of type bpe and unigram can be exported")
    return content, [piece.piece for piece in proto.pieces]


def _special_tokens(proto: Any) -> dict[str, Any]:
    """The special tokens of a model by transformers' names, without its own beginning of text, which training never uses."""
    spec = proto.trainer_spec
    ids = {"unk_token": spec.unk_id, "eos_token": spec.eos_id, "pad_token": spec.pad_id}
    named = {name: proto.pieces[id].piece for name, id in ids.items() if id >= 0}
    extra = [piece.piece for piece in proto.pieces if piece.type == _CONTROL and piece.piece not in named.values()]
    # transformers 5 has another name for them and reads this one too; 4 fails on the newer name.
    return {**named, "additional_special_tokens": extra} if extra else named


def _save_bpe(proto: Any, content: dict[str, Any], output: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    dummy_prefix = proto.normalizer_spec.add_dummy_prefix
    vocabulary = {piece.piece: id for id, piece in enumerate(proto.pieces)}
    model = models.BPE(vocabulary, bpe_merges(proto), unk_token=content["unk_token"], fuse_unk=True, byte_fallback=True)
    fast = Tokenizer(model)
    spaces = [normalizers.Replace(" ", _SPACE_SYMBOL)]
    fast.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_SYMBOL), *spaces] if dummy_prefix else spaces)
    # Spaces come first: a U+2581 that comes from the bytes was a U+2581 in the text.
    decoding = [decoders.Replace(_SPACE_SYMBOL, " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if dummy_prefix else decoding)
    special = [p.piece for id, p in enumerate(proto.pieces) if p.type == _CONTROL or id == proto.trainer_spec.unk_id]
    fast.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    (output / JSON_NAME).write_text(fast.to_str(pretty=True), encoding="utf-8")


def bpe_merges(proto: Any) -> list[tuple[str, str]]:
    """The merges that make the pieces of a SentencePiece BPE model, best first.

    A model stores pieces with scores, not merges. Every way to cut a piece into two known pieces is a merge with the piece's
    score. The stable sort keeps the order of the pieces among equals.
    """
    ids = {piece.piece: id for id, piece in enumerate(proto.pieces) if piece.type in (_NORMAL, _USER_DEFINED)}
    merges: list[tuple[float, tuple[str, str]]] = []
    for piece in proto.pieces:
        if piece.type == _NORMAL:
            cuts = ((piece.piece[:i], piece.piece[i:]) for i in range(1, len(piece.piece)))
            known = [(left, right) for left, right in cuts if left in ids and right in ids]
            merges += [(piece.score, cut) for cut in sorted(known, key=lambda cut: (ids[cut[0]], ids[cut[1]]))]
    return [cut for _, cut in sorted(merges, key=lambda merge: -merge[0])]


# ---- tokenizer.json ---------------------------------------------------------------------------------------------------


def _export_json(tokenizer: Tokenizer, output: Path, samples: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Write the files that decide ids. Return the contents of tokenizer_config.json, and the tokens."""
    from tokenizers import Tokenizer as FastTokenizer

    tokenizer.save(output)
    content = {n: v for n, v in json.loads((output / CONFIG_NAME).read_text("utf-8")).items() if n not in _LEFT_OUT}
    if content.get("tokenizer_class", _BACKEND) == _BACKEND:
        content["tokenizer_class"] = _FAST_CLASS
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    if (output / MODEL_NAME).is_file() and (text := _first_difference(tokenizer, output / MODEL_NAME, samples)) is not None:
        log.warning("%s is left out: it encodes %r differently from %s", MODEL_NAME, text[:80], JSON_NAME)
        (output / MODEL_NAME).unlink()
    known = FastTokenizer.from_file(str(output / JSON_NAME))
    return content, [known.id_to_token(id) for id in range(tokenizer.vocab_size)]


def _first_difference(tokenizer: Tokenizer, model: Path, samples: Sequence[str]) -> str | None:
    """The first text that a SentencePiece model beside the tokenizer.json encodes differently; "" if the model cannot be read."""
    try:
        other = SentencePieceTokenizer(model)
    except DataError:
        return ""
    texts = [text.replace(_SPACE_SYMBOL, "") for text in (*EDGE_CASES, *samples)]
    return next((text for text in texts if _ids_of(tokenizer, text) not in (None, other.encode(text))), None)


# ---- both -------------------------------------------------------------------------------------------------------------


def _add_tokens(tokens: list[str], content: dict[str, Any], output: Path, added: Sequence[str]) -> None:
    """Add special tokens beyond the tokenizer's own to every file that lists them."""
    if double := next((token for token in added if token in tokens), None):
        raise DataError(
            f"{output}: the tokenizer has {double} as token {tokens.index(double)} already; if it has the sentinels itself, set "
            "data.span_corruption.first_sentinel"
        )
    content["additional_special_tokens"] = [*content.get("additional_special_tokens", ()), *added]
    decoder = content.setdefault("added_tokens_decoder", {})
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    decoder |= {str(id): {"content": token, **flags} for id, token in enumerate(added, len(tokens))}
    if (output / JSON_NAME).is_file():
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as FastTokenizer

        fast = FastTokenizer.from_file(str(output / JSON_NAME))
        fast.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in added])
        (output / JSON_NAME).write_text(fast.to_str(pretty=True), encoding="utf-8")


def _write(content: dict[str, Any], output: Path) -> None:
    (output / CONFIG_NAME).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _keep_class(content: dict[str, Any], output: Path) -> None:
    """Keep AutoTokenizer from replacing the tokenizer's class by the one that it registers for the model type.

    For some types (qwen2) transformers 5 takes the class named in tokenizer_config.json for a mistake. It then rebuilds the tokenizer
    with its own splitting rules and silently gives other ids. For other types it knows no SentencePiece. An `auto_map` that names no
    code makes both versions keep the class, unless they are told to run remote code, which does not exist here.
    """
    if not (output / "config.json").is_file():
        return
    wanted = content["tokenizer_class"].removesuffix("Fast")
    try:
        made = type(_load(output)).__name__.removesuffix("Fast")
    except Exception:  # a class that does not fit these files may raise anything; the proof comes later
        made = ""
    accepted = {wanted, _BACKEND} if wanted == _FAST_CLASS.removesuffix("Fast") else {wanted}
    if made not in accepted:
        _write({**content, "auto_map": {"AutoTokenizer": ["", ""]}}, output)


def _load(output: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(output), local_files_only=True, trust_remote_code=False)


def _prove(tokenizer: Tokenizer, output: Path, samples: Sequence[str], begins: bool) -> SpecialIds:
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
    note = _note(tokenizer, exported) if begins else None
    return SpecialIds(exported.bos_token_id, tokenizer.eod_id, exported.pad_token_id, note)


def _note(tokenizer: Tokenizer, exported: Any) -> str | None:
    """A note on what a foreign tokenizer adds to texts, which prepared documents do not have."""
    if extra := exported.convert_ids_to_tokens(exported.encode("")):
        return (
            f"the tokenizer adds {' and '.join(extra)} to every text that transformers encodes; prepared documents have only "
            f"{exported.eos_token}, after each"
        )
    if exported.bos_token_id not in (None, tokenizer.eod_id):
        return (
            f"the tokenizer names {exported.bos_token} as the beginning of a text; prepared documents do not begin with it, and programs "
            "that put it first (lm-eval) measure something else"
        )
    return None


def _ids_of(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """The ids of a text. None for one that cannot be in any document. A character vocabulary may lack characters of the edge cases, and
    a Unigram model may take a piece of them for a special token.
    """
    try:
        return tokenizer.encode(text)
    except DataError:
        return None


def _compare(tokenizer: Tokenizer, exported: Any, output: Path, text: str) -> None:
    expected = _ids_of(tokenizer, text)
    if expected is None:
        return
    actual = exported.encode(text, add_special_tokens=False, verbose=False)
    if actual != expected:
        where = next((i for i, (a, b) in enumerate(zip(actual, expected)) if a != b), min(len(actual), len(expected)))
        raise DataError(
            f"{output}: transformers encodes {text[:80]!r} differently from token {where} on"
            f" ({actual[where : where + 3]}, not {expected[where : where + 3]}); the exported tokenizer must not be used"
        )


def save_trimmed(tokenizer: Tokenizer, rows: int, directory: Path) -> list[str]:
    """Copy a tokenizer's files into `directory` without the tokens from id `rows` on. Return the texts of these tokens.

    Gemma 3's text models, for instance, come with the image token of the larger ones, and have no row for it.

    Only special tokens that were added to the vocabulary can go, because no text produces them. Raises DataError for any other.
    """
    tokenizer.save(directory)
    if tokenizer.vocab_size <= rows:
        return []
    problem = DataError(
        f"{tokenizer.file}: the tokenizer has {tokenizer.vocab_size} tokens but the vocabulary {rows} rows; give this model's tokenizer"
    )
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.eod_id >= rows:
        raise problem
    content = json.loads((directory / JSON_NAME).read_text(encoding="utf-8"))
    added = content.get("added_tokens") or []
    dropped = [item["content"] for item in added if item["id"] >= rows]
    if not all(item["special"] for item in added if item["id"] >= rows):
        raise problem
    content["added_tokens"] = [item for item in added if item["id"] < rows]
    (directory / JSON_NAME).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    config = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
    (directory / CONFIG_NAME).write_text(
        json.dumps(_without(config, dropped), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    if load_tokenizer(directory).vocab_size > rows:
        raise problem
    return dropped


def _without(value: Any, texts: list[str]) -> Any:
    """JSON without these texts: neither as values, nor in lists, nor as the `content` of an object."""

    def is_gone(item: Any) -> bool:
        return (item.get("content") if isinstance(item, dict) else item) in texts

    if isinstance(value, dict):
        return {name: _without(item, texts) for name, item in value.items() if not is_gone(item)}
    if isinstance(value, list):
        return [_without(item, texts) for item in value if not is_gone(item)]
    return value


def added_tokens_json(added: Sequence[str], vocab_size: int) -> str:
    """Contents of ADDED_NAME for tokens that follow the `vocab_size` tokens of a tokenizer, in the order of their ids."""
    return json.dumps({token: vocab_size + number for number, token in enumerate(added)}, indent=1) + "\n"


def read_added_tokens(tokenizer: Tokenizer) -> list[str]:
    """The special tokens that ADDED_NAME adds to a tokenizer's own, in the order of their ids. Raises DataError if an id is left out."""
    file = tokenizer.file.parent / ADDED_NAME
    if not file.is_file():
        return []
    try:
        ids = {id: token for token, id in json.loads(read_bytes(file)).items() if id >= tokenizer.vocab_size}
        return [ids[id] for id in range(tokenizer.vocab_size, tokenizer.vocab_size + len(ids))]
    except (ValueError, AttributeError, TypeError, LookupError) as error:
        raise DataError(
            f"{file}: expected tokens with ids from {tokenizer.vocab_size} on, each once; restore the file"
        ) from error
