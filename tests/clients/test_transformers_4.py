"""Every configuration of every family, and every tokenizer with every family, in transformers 4: the same logits, ids and texts."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path

import pytest
import torch
from hard_texts import HARD, SPECIAL, real_texts
from other_programs import TOKENIZERS, child_environment, exported
from parity import ALL, FAMILIES, cases

from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import DataError
from pretrain.models.families import family_of
from pretrain.models.families.declare.other_readers import reader_notes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
READER = Path(__file__).with_name("read_with_transformers.py")


def answers(python: Path, tasks: list[dict]) -> tuple[list[str], list[dict]]:
    """The model types that a Python's transformers knows, and what it says of each task."""
    done = subprocess.run(
        [python, READER], input=json.dumps(tasks), env=child_environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    about, *said = map(json.loads, done.stdout.splitlines())
    assert about["version"].startswith("4.57.") and len(said) == len(tasks)
    return about["knows"], said


def test_every_configuration_has_our_logits_or_a_note_that_says_otherwise(transformers_4, tokenizers, tmp_path):
    """CL-4c, CL-4g, CL-4h: gpt-oss without scaling, OLMo 2 with linear scaling, and what transformers 4 has no field for."""
    made = {
        (family, name): exported(tmp_path / f"{n}", cases(family)[name], tokenizers["byte"])
        for n, (family, name) in enumerate(ALL)
    }
    tasks = [{"directory": str(m.directory), "ids": m.ids, "logits": f"{m.directory}.pt"} for m in made.values()]
    knows, said = answers(transformers_4, tasks)
    wrong, compared = [], 0
    for ((family, name), mine), task, answer in zip(made.items(), tasks, said):
        if family_of(family).model_type not in knows:
            continue
        warned = any("transformers 4" in note for note in reader_notes(family_of(family), mine.model))
        off = float("inf") if "error" in answer else float((torch.load(task["logits"]) - mine.logits).abs().max())
        compared += off <= 1e-4
        if (off > 1e-4) != warned:
            wrong.append((family, name, answer.get("error", off), "note" if warned else "no note"))
    assert wrong == []
    assert compared > 100


def test_every_tokenizer_gives_our_ids_with_every_family(transformers_4, tokenizers, tmp_path):
    """CL-4d, CL-4e, CL-4f: classes, `auto_map` and special tokens are those that transformers 4 reads as well."""
    ours = {kind: expected(tokenizers[kind], [*HARD, *real_texts()]) for kind in TOKENIZERS}
    pairs = [(family, kind) for family in FAMILIES for kind in TOKENIZERS]
    plain = {family: next(iter(cases(family).values())) for family in FAMILIES}
    made = [exported(tmp_path / f"{n}", plain[family], tokenizers[kind]) for n, (family, kind) in enumerate(pairs)]
    tasks = [{"directory": str(mine.directory), "texts": list(ours[kind])} for (_, kind), mine in zip(pairs, made)]
    knows, said = answers(transformers_4, tasks)
    for (family, kind), mine, answer in zip(pairs, made, said):
        if family_of(family).model_type not in knows:
            continue
        assert "error" not in answer, (family, kind, answer)
        eod = load_tokenizer(tokenizers[kind]).eod_id
        assert answer["roles"] == [eod, eod, None, mine.model.max_sequence_length], (family, kind)
        assert len(ours[kind]) > 15
        for (text, ids), got, decoded in zip(ours[kind].items(), answer["ids"], answer["decoded"]):
            if text != SPECIAL:
                assert got == ids, (family, kind, text)
                assert kind == "unigram" or decoded == text, (family, kind, text)


def expected(tokenizer: Path, texts: list[str]) -> dict[str, list[int]]:
    """Our ids by text, but for texts with characters that a vocabulary of characters does not know."""
    loaded, ids = load_tokenizer(tokenizer), {}
    for text in texts:
        with contextlib.suppress(DataError):
            ids[text] = loaded.encode(text)
    return ids
