"""Texts on which tokenizers of different programs part: 27 hard ones, and some of real corpora."""

from __future__ import annotations

import gzip
from pathlib import Path

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

HARD = (
    "hello",
    "Hello world",
    " leading space",
    "  two leading spaces",
    "trailing space ",
    "trailing spaces   ",
    "   ",
    "\n",
    "\n\n\n",
    "\t",
    "\ttab\t\ttabs",
    "line\nline\n\n\n    indented\r\n\ttab",
    "def f(x):\n    return x + 1  # 12345\n",
    "1234567890",
    "3.14159 and 1,000,000",
    "don't I'LL we've SHE'D",
    "a . b , c ! d ? e ' f",
    "emoji \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 end",
    "\u4e2d\u6587\u6587\u672c \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "caf\u00e9 is not cafe\u0301",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "control \x00\x01\x1b\x7f end",
    "nbsp\u00a0thin\u2009zero\u200bideographic\u3000mark\ufeff",
    "<0x41> byte-like [PAD5] text",
    "\ufb01 ligature \u00bd \u2160 \u1e9b\u0323 \ufb03",
    "a" * 100,
    "text </s> <s> <unk> <|endoftext|> <|fim_prefix|>x",
)
SPECIAL = HARD[-1]
"""Has the texts of special tokens, which transformers reads as tokens, and we and llama.cpp (parse_special false) as text."""


def real_texts() -> list[str]:
    """Some hundred pieces of plays and captions, in two languages; empty where they are not beside this checkout."""
    texts: list[str] = []
    if (plays := SHARED_DATA / "tinyshakespeare.txt").is_file():
        text = plays.read_text(encoding="utf-8")
        texts += [text[i : i + 1000] for i in range(0, 100_000, 1000)]
    for language in ("en", "de"):
        if (captions := SHARED_DATA / f"multi30k.val.{language}.gz").is_file():
            lines = gzip.open(captions, "rt", encoding="utf-8").read().splitlines()
            texts += ["\n".join(lines[i : i + 10]) for i in range(0, 500, 10)]
    return texts
