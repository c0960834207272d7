"""lm-evaluation-harness on an export, against our own network and tokenizer under the same tasks: the same log-likelihoods and scores."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest
from hard_texts import HARD, real_texts
from other_programs import child_environment, exported

from pretrain.config.model_schema import Model
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.models.families import complete

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
READER = Path(__file__).with_name("read_with_lm_eval.py")
ROOT = Path(__file__).resolve().parents[2]
WORDS = "the a king said will not come to me and go with his house in two men red who is on".split()


def lines(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe"])
def test_log_likelihoods_are_ours(evaluation, tokenizers, tmp_path, kind):
    """CL-2: multiple choice and rolling perplexity; before, a text began with a token that training never used: 7.1 nats off."""
    drawn = random.Random(0)
    questions = [
        {"question": " ".join(drawn.choices(WORDS, k=6)), "choices": drawn.sample(WORDS, 3), "answer": drawn.randrange(3)}
        for _ in range(8)
    ]
    texts = [*HARD[:12], *real_texts()[:6], "def f(x):\n    return x\n" * 60]  # the last is longer than the model
    made = exported(tmp_path / kind, complete(Model(dim=32, layers=2, heads=4, ffn_dim=64), 96), tokenizers[kind])
    assert len(load_tokenizer(tokenizers[kind]).encode(texts[-1])) > 2 * 96
    asked = {"directory": str(made.directory), "checkpoint": str(made.directory.with_name("checkpoint"))}
    asked["choices"] = lines(tmp_path / "choices.jsonl", questions)
    asked["texts"] = lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    own = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home"), "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [evaluation, READER],
        input=json.dumps(asked),
        env=child_environment() | own,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout)
    theirs, ours = said["theirs"], said["ours"]
    assert len(ours["samples"]["choices"]) == 8 and len(ours["samples"]["texts"]) == len(texts)
    answers = list(zip(ours["samples"].pop("answers"), theirs["samples"].pop("answers"), strict=True))
    # If several byte tokens are not UTF-8, transformers shows each as U+FFFD, and SentencePiece only the wrong ones.
    whole = [(mine, found) for mine, found in answers if "\ufffd" not in str(found)]
    assert len(whole) >= 2 and all(mine == found for mine, found in whole)  # the same texts, ended at the same place
    for name, samples in ours["samples"].items():
        for mine, found in zip(samples, theirs["samples"][name], strict=True):
            assert numbers(found) == pytest.approx(numbers(mine), rel=2e-6, abs=1e-4), name
    assert set(ours["metrics"]) == set(theirs["metrics"]) and len(ours["metrics"]) == 4
    for name, value in ours["metrics"].items():
        assert theirs["metrics"][name] == pytest.approx(value, rel=1e-6), name


def numbers(answer: object) -> list[float]:
    """The log-likelihoods of an answer, however deep they are nested, and whether each is the likeliest text."""
    if isinstance(answer, list):
        return [number for part in answer for number in numbers(part)]
    return [float({"True": 1, "False": 0}.get(answer, answer))]
