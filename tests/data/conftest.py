"""A small corpus and one tokenizer of each type, trained once per session."""

import json
from pathlib import Path
from random import Random

import pytest

from pretrain.data.tokenizers.tokenizer_training import train_tokenizer

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def corpus_texts() -> list[str]:
    """216 documents, no two alike: invented words in prose and in indented code, with tabs, blank lines and other scripts."""
    random = Random(0)
    words = ["".join(random.choices(_SYLLABLES, k=random.randint(1, 4))) for _ in range(400)]
    texts = []
    for number in range(216):
        prose = " ".join(random.choices(words, k=20)) + f", café {number}.  "
        name, argument = random.choices(words, k=2)
        code = f"def {name}({argument}):\n    if {argument} > {number}:\n        return {argument}\n\n\treturn None\n"
        texts.append(prose + code + ("中文文本 日本語 😀\n" if number % 6 == 0 else ""))
    return texts


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return corpus_texts()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """The texts as JSON lines."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(corpus_texts())), encoding="utf-8"
    )
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory, corpus) -> dict[str, Path]:
    """model type -> directory of a tokenizer trained on the corpus."""
    root = tmp_path_factory.mktemp("tokenizers")
    sizes = {"bpe": 500, "unigram": 400, "byte_bpe": 500, "byte": None, "char": None}
    for model_type, size in sizes.items():
        train_tokenizer([str(corpus)], root / model_type, model_type, size)
    return {model_type: root / model_type for model_type in sizes}
