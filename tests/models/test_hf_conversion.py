"""Models that transformers builds itself leave for transformers and come back, tensors bit-equal and logits compared."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hf_configs import CONFIGS, write_config
from running import tool
from safetensors.torch import load_file, save_file

from pretrain.checkpoint.save import write_checkpoint
from pretrain.config.model_schema import Model
from pretrain.distributed.ranks import ALONE
from pretrain.errors import CheckpointError, ConfigError
from pretrain.huggingface.export_model import RECORD, export
from pretrain.huggingface.import_model import import_model
from pretrain.huggingface.open_model import read_checkpoint
from pretrain.models import build_network
from pretrain.models.families import complete
from pretrain.parallel.initialise import initialise

every_architecture = pytest.mark.parametrize("kind", CONFIGS)


def saved(tmp_path, kind: str, **changes: object):
    """A checkpoint of a model with random weights, as a run writes it, and the network."""
    model = complete(Model(family="hf", hf_config=str(write_config(tmp_path / kind, kind, **changes))), 32)
    with torch.device("meta"):
        network = build_network(model)
    network.to_empty(device="cpu")
    initialise(network, 3)
    for parameter in network.parameters():  # those that start at one value, too, are to be told apart
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    state = {"step": 1, "samples": 1, "tokens": 1, "world_size": 1, "layout": "single", "model": dataclasses.asdict(model)}
    write_checkpoint(tmp_path / "run", {f"model.{n}": p.detach() for n, p in network.named_parameters()}, state, {}, ALONE)
    return tmp_path / "run", network


def tensors_of(directory) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@every_architecture
def test_an_export_is_loaded_by_transformers_and_comes_back_bit_equal(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    checkpoint, network = saved(tmp_path, kind)
    done = export(checkpoint, tmp_path / "out", verify=True, shard_bytes=20_000)
    assert done.compared.difference <= 1e-5 and done.parameters == sum(p.numel() for p in network.parameters())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert json.loads((tmp_path / "out" / RECORD).read_text())["verified"]["structure"].endswith(type(theirs).__name__)
    ids = torch.randint(network.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (theirs(ids).logits - network(ids)).abs().max() <= 1e-5
    # What transformers itself writes has the same names and numbers.
    theirs.save_pretrained(tmp_path / "again")
    ours, again = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "again")
    assert ours.keys() == again.keys() and all(torch.equal(ours[name], again[name]) for name in ours)
    for directory in ("out", "again"):
        imported = import_model(tmp_path / directory, tmp_path / f"from-{directory}", verify=True, family="hf")
        assert imported.compared.difference <= 1e-5
        model, weights, _ = read_checkpoint(tmp_path / f"from-{directory}")
        assert model.family == "hf"
        for name, parameter in network.named_parameters():
            assert torch.equal(weights[name], parameter), name


def test_an_architecture_that_no_family_knows_is_read_only_when_it_is_asked_for(tmp_path, capsys):
    checkpoint, _ = saved(tmp_path, "mpt")
    convert = tool("convert_checkpoint").main
    assert convert(["to-hf", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")]) == 0
    assert convert(["from-hf", "--model", str(tmp_path / "out"), "--output", str(tmp_path / "in")]) == 2
    assert "MptForCausalLM'] is not supported" in (said := capsys.readouterr().err) and "--family hf" in said
    assert convert(["from-hf", "--model", str(tmp_path / "out"), "--output", str(tmp_path / "in"), "--family", "hf"]) == 0


def test_what_a_file_lacks_or_has_too_much_is_named(tmp_path):
    checkpoint, _ = saved(tmp_path, "falcon")
    export(checkpoint, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    weights = load_file(file)
    lost = next(name for name in weights if "query_key_value" in name)
    save_file({name: tensor for name, tensor in weights.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{lost} is missing"):
        import_model(tmp_path / "out", tmp_path / "in", family="hf")
    save_file(weights | {"transformer.odd": torch.zeros(1)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="transformer.odd has no place in hf"):
        import_model(tmp_path / "out", tmp_path / "in", family="hf")
    save_file(weights | {lost: weights[lost][1:]}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{lost} has shape"):
        import_model(tmp_path / "out", tmp_path / "in", family="hf")


def test_a_configuration_that_transformers_does_not_build_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(
        json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})
    )
    with pytest.raises(ConfigError, match="transformers builds no causal language model of model_type='t5'"):
        import_model(tmp_path / "other", tmp_path / "in", family="hf")
