"""A real text: the size that nanoGPT's README trains on a CPU, against the validation loss it publishes."""

import pytest
from running import run_main

from pretrain.data.preparation.prepare import prepare
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.observe.metrics import read_metrics

PUBLISHED = 1.88


@pytest.fixture(scope="module")
def characters(shakespeare, tmp_path_factory):
    """The first 90% of the text for training, the rest for validation, as in nanoGPT."""
    folder = tmp_path_factory.mktemp("shakespeare")
    text = shakespeare.read_bytes()
    cut = len(text) * 9 // 10
    train_tokenizer([str(shakespeare)], folder / "tokenizer", "char")
    for name, part in (("train", text[:cut]), ("validation", text[cut:])):
        (folder / f"{name}.txt").write_bytes(part)
        prepare([str(folder / f"{name}.txt")], folder / "tokenizer", folder / name)
    return folder


def overrides(characters, tmp_path) -> list[str]:
    return [
        f"run.dir={tmp_path}", "log.tensorboard=false", f"data.sources.0.path={characters / 'train'}",
        f"data.validation.0.path={characters / 'validation'}",
    ]  # fmt: skip


@pytest.mark.slow  # the quickstart, which README names, learns as well
def test_the_first_steps_learn_more_than_letter_frequencies(pool, characters, tmp_path):
    short = ("run.steps=120", "validation.sequences=200")
    [(code, printed)] = pool.launch(1, run_main, "configs/shakespeare_char.yaml", *overrides(characters, tmp_path), *short)
    assert code == 0, printed
    assert read_metrics(tmp_path / "shakespeare_char")[-1]["validation"]["shakespeare"] < 2.3  # letter frequencies alone: 3.3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_2000_steps_reach_the_published_validation_loss(pool, characters, tmp_path, monkeypatch):
    monkeypatch.setattr("launch_pool.LIMIT_SECONDS", 1800)  # 4 minutes on a core of its own
    [(code, printed)] = pool.launch(1, run_main, "configs/shakespeare_char.yaml", *overrides(characters, tmp_path))
    assert code == 0, printed
    assert read_metrics(tmp_path / "shakespeare_char")[-1]["validation"]["shakespeare"] <= PUBLISHED
