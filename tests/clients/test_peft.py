"""Every family in peft and trl: a step of LoRA on an export, whose merged result we read again."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from other_programs import child_environment, environment, exported
from parity import FAMILIES, cases

from pretrain.huggingface.open_model import open_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
READER = Path(__file__).with_name("read_with_peft.py")
TEXTS = ["a quick brown fox jumps over the lazy dog, and then it sleeps", "def f(x):\n    return x + 1\n\nprint(f(2))", "numbers: 1, 2, 3, 4, 5, 6", "and so on"]  # fmt: skip


@pytest.fixture(scope="module")
def tuning() -> Path:
    """A Python with peft and trl."""
    return environment("peft", "peft==0.21.2", "trl==1.16.0")


def test_every_family_is_tuned_saved_merged_and_read_again(tuning, tokenizers, tmp_path):
    made = {family: exported(tmp_path / family, next(iter(cases(family).values())), tokenizers["bpe"]) for family in FAMILIES}
    tasks = [
        {
            "directory": str(m.directory),
            "ids": m.ids,
            "logits": f"{m.directory}.pt",
            "texts": TEXTS,
            "output": str(tmp_path / f"{family}-tuned"),
        }
        for family, m in made.items()
    ]
    done = subprocess.run(
        [tuning, READER], input=json.dumps(tasks), env=child_environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    said = [json.loads(line.removeprefix("answer:")) for line in done.stdout.splitlines() if line.startswith("answer:")]
    wrong = {}
    for (family, mine), task, answer in zip(made.items(), tasks, said, strict=True):
        if "error" in answer:
            wrong[family] = answer["error"]
            continue
        off = float((torch.load(task["logits"]) - mine.logits).abs().max())
        output = Path(task["output"])
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"):
            if (mine.directory / name).is_file():
                shutil.copy(mine.directory / name, output / "merged" / name)
        network = open_model(output / "merged", torch.device("cpu")).network.eval()
        with torch.no_grad():
            back = float((network(torch.tensor([mine.ids]))[0].float() - torch.load(output / "merged.pt")).abs().max())
        good = (
            off < 1e-4
            and math.isfinite(answer["loss"])
            and answer["changed"] > 1e-3
            and answer["loaded"] < 1e-5
            and answer["merged"] < 1e-3
        )
        if not good or back > 1e-4:
            wrong[family] = {**answer, "ours": off, "back": back}
    assert wrong == {}
    assert len(said) == len(FAMILIES) > 15
