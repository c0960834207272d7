"""Multi30k, German to English: configs/translation_multi30k.yaml reaches the BLEU that docs/translation.md promises.

python -m pytest tests/train/test_translation_campaign.py -m slow      (16 minutes on 2 quiet cores in bf16, at most 40)
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from running import run_main

from pretrain.data.pairs.prepared_pairs import PairOptions, Split, prepare_pairs
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.observe.metrics import read_metrics

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
CONFIG = "configs/translation_multi30k.yaml"


@pytest.fixture(scope="module")
def prepared_captions(tmp_path_factory):
    """The recipe's tokenizer and pairs."""
    files = {
        f"{part}.{language}": SHARED_DATA / f"multi30k.{part}.{language}.gz"
        for part in ("train", "val")
        for language in ("de", "en")
    }
    if not all(file.is_file() for file in files.values()):
        pytest.skip("multi30k.*.gz are not beside this checkout (shared/data)")
    folder = tmp_path_factory.mktemp("captions")
    corpus = [str(files["train.de"]), str(files["train.en"])]
    train_tokenizer(corpus, folder / "tokenizer", "bpe", 6000, text_mode="line", lowercase=True)
    train, validation = (Split([files[f"{part}.de"]], [files[f"{part}.en"]]) for part in ("train", "val"))
    prepare_pairs(folder / "pairs", train, validation, folder / "tokenizer", options=PairOptions(lowercase=True))
    assert (train.counts.pairs, validation.counts.pairs) == (29_000, 1_014)
    assert train.counts.altered == validation.counts.altered == 0
    return folder / "pairs"


def overrides(pairs, tmp_path) -> list[str]:
    return [
        f"run.dir={tmp_path}", "log.tensorboard=false", f"data.pairs={pairs}/train", f"data.validation.0.path={pairs}/validation",
    ]  # fmt: skip


def test_the_recipe_runs_as_it_is_written(pool, prepared_captions, tmp_path):
    short = (
        "run.steps=3",
        "schedule.warmup_steps=2",
        "validation.sequences=20",
        "validation.translation.sequences=6",
        "checkpoint.every_steps=0",
    )
    for code, printed in pool.launch(2, run_main, CONFIG, *overrides(prepared_captions, tmp_path), *short):
        assert code == 0, printed
    last = read_metrics(tmp_path / "translation_multi30k")[-1]
    assert last["validation"]["multi30k"] < 10 and set(last["translation"]["multi30k"]) == {"bleu", "chrf", "cer", "wer"}


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_a_small_transformer_translates_captions(pool, prepared_captions, tmp_path, monkeypatch):
    monkeypatch.setattr("launch_pool.LIMIT_SECONDS", 2600)
    started = time.monotonic()
    for code, printed in pool.launch(2, run_main, CONFIG, *overrides(prepared_captions, tmp_path)):
        assert code == 0, printed
    minutes = (time.monotonic() - started) / 60
    assert read_metrics(tmp_path / "translation_multi30k")[-1]["translation"]["multi30k"]["bleu"] >= 30
    assert minutes <= 40
