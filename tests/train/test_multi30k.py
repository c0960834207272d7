"""Many short real documents: sentences packed whole, each alone under its mask."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from running import train

from pretrain.data.preparation.prepare import prepare
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.observe.metrics import read_metrics


@pytest.fixture(scope="module")
def sentences(multi30k, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("multi30k")
    train_tokenizer([str(multi30k["train"])], folder / "tokenizer", "bpe", vocab_size=1000)
    for name, file in multi30k.items():
        prepare([str(file)], folder / "tokenizer", folder / name, text_mode="line")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["best_fit", "padded"])
def test_sentences_are_learnt_packed_and_padded_alike(pool, sentences, tmp_path, packing):
    config = {
        "run": {"name": packing, "dir": str(tmp_path), "steps": 70},
        "model": {"dim": 64, "layers": 2, "heads": 4},
        "data": {
            "sequence_length": 128 if packing == "best_fit" else 24,
            "sources": [{"path": str(sentences / "train")}],
            "validation": [{"path": str(sentences / "validation"), "name": "val"}],
            "packing": packing,
            "document_mask": packing == "best_fit",  # of padded samples each is one document
            "boundary_loss": packing != "best_fit",
            "cache": {"dir": str(tmp_path / "cache")},
        },
        "batch": {"sequences": 16 if packing == "best_fit" else 96, "micro_sequences": 16},
        "optim": {"lr": 3e-3},
        "schedule": {"warmup_steps": 20},
        "log": {"tensorboard": False},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    train(pool, 1, file)
    records = read_metrics(tmp_path / packing)
    assert records[0]["loss"] > 6.5  # ln 1000 = 6.9
    assert records[-1]["validation"]["val"] < 4.8  # the frequencies of pieces alone: 5.5
