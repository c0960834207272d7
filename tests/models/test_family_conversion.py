"""What transformers saved, in every configuration of every family, comes back from us bit-equal, every key accounted for."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from parity import ALL, as_published, cases, pair, tokens
from safetensors.torch import load_file

from pretrain.checkpoint.payload import Payload
from pretrain.huggingface.export_model import RECORD, export
from pretrain.huggingface.import_model import import_model
from pretrain.huggingface.open_model import read_checkpoint


def tensors_of(directory) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def test_there_are_families():
    assert len(ALL) >= 15


FIRST = {family: name for family, name in reversed(ALL)}
LAST = dict(ALL)


def each_case() -> list:
    """The first and the last case of each family in fp32, and the first in bf16; the others with `-m slow`."""
    quick = {"fp32": (FIRST, LAST), "bf16": (FIRST,)}
    return [
        pytest.param(family, name, dtype, marks=() if name in [names[family] for names in quick[dtype]] else pytest.mark.slow)
        for family, name in ALL
        for dtype in ("fp32", "bf16")
    ]


@pytest.mark.parametrize("family, name, dtype", each_case())
def test_hugging_face_to_ours_and_back_is_bit_equal(family, name, dtype, tmp_path):
    from transformers import AutoModelForCausalLM

    _, theirs = pair(family, name)
    theirs = copy.deepcopy(theirs).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    verify = dtype == "fp32" and FIRST[family] == name  # where both sides compute with the same numbers
    imported = import_model(tmp_path / "theirs", tmp_path / "ours", verify=verify)
    model, _, _ = read_checkpoint(tmp_path / "ours")
    assert model == cases(family)[name]
    done = export(tmp_path / "ours", tmp_path / "back", dtype, shard_bytes=30_000, verify=verify)
    corrections = sum(t.numel() for name, t in theirs.state_dict().items() if name.endswith("e_score_correction_bias"))
    assert done.parameters == imported.parameters == theirs.num_parameters(only_trainable=True) + corrections
    before, after = as_published(family, model, tensors_of(tmp_path / "theirs")), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    # The corrections that balance experts are fp32 in every export.
    formats = {n: torch.float32 if n.endswith("e_score_correction_bias") else t.dtype for n, t in before.items()}
    assert all(after[n].dtype == formats[n] and torch.equal(after[n], t.to(formats[n])) for n, t in before.items())
    assert {t.dtype for t in Payload(tmp_path / "ours").read_all("model.").values()} == {torch.float32}
    how = {"attn_implementation": "eager"}
    if dtype == "bf16":  # the grouped kernel of experts refuses these widths
        how |= {"experts_implementation": "eager"}
    # Anew: the copy above has buffers of bf16 too, and with dynamic scaling those of the longest text that a test gave it.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", **how).eval()
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", **how).eval()
    ids = tokens(model, 2, 17)
    with torch.no_grad():
        assert torch.equal(back(ids).logits, theirs(ids).logits)
    record = json.loads((tmp_path / "back" / RECORD).read_text())
    assert record["tensors"] == len(after) and (record["max_logit_difference"] is not None) is verify
    assert not verify or max(imported.compared.difference, done.compared.difference) <= 1e-5
    assert record["verified"]["tokenizer"] is None and "has no tokenizer" in record["vocabulary"]["note"]
