"""M-D5 and M-D6: `family: hf` trains, imports and exports every architecture of `hf_configs.ARCHITECTURES`, hybrids with state spaces and
models that save more than their weights among them.
"""

from __future__ import annotations

import json

import pytest
import torch
from hf_configs import ARCHITECTURES, write_config
from running import some_slow
from safetensors.torch import load_file
from torch.nn import functional as F

from pretrain.checkpoint.payload import Payload
from pretrain.config.model_schema import Model
from pretrain.config.parallel_schema import Parallel
from pretrain.config.schema import Config
from pretrain.errors import CheckpointError, ConfigError
from pretrain.huggingface.export_model import export
from pretrain.huggingface.import_model import import_model
from pretrain.models import build_network
from pretrain.models.families import complete
from pretrain.models.hf.hf_config import config_of, decoded, read_config
from pretrain.parallel.blocks import check_compiled_blocks, recompute_blocks
from pretrain.parallel.initialise import initialise

QUICK = {"qwen3_next", "nemotron_h", "mamba2", "zamba2", "apertus", "gemma4_text", "glm4_moe", "deepseek_v4"}
# The others with `-m slow`: python -m pytest tests/models/test_hf_architectures.py -m slow
every_architecture = pytest.mark.parametrize("kind", some_slow(ARCHITECTURES, ARCHITECTURES.keys() - QUICK))


def shape(kind: str, **changes: object) -> Model:
    return complete(Model(family="hf", hf_config=json.dumps({"model_type": kind, **ARCHITECTURES[kind], **changes})), 32)


def network(model: Model, seed: int = 3):
    with torch.device("meta"):
        built = build_network(model)
    built.to_empty(device="cpu")
    initialise(built, seed)
    return built


def theirs_of(model: Model):
    """What transformers itself makes of the configuration, with values of its own."""
    import transformers

    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(config_of(model.hf_config)).eval()


@pytest.fixture(scope="module")
def tokens_BT() -> torch.Tensor:
    return torch.randint(3, 257, (2, 33), generator=torch.Generator().manual_seed(1))


@every_architecture
def test_loss_gradients_and_recomputation_are_those_of_transformers(kind, tokens_BT):
    """M-D5: hybrids were refused, because A_log and the like are filled by a rule of their own."""
    model = shape(kind)
    ours, theirs = network(model), theirs_of(model)
    found = theirs.load_state_dict(ours.state_dict(), strict=False)
    theirs.tie_weights()
    tied = {id(theirs.get_parameter(name)) for name in ours.tied_names().values()}
    assert not found.unexpected_keys and all(id(theirs.get_parameter(name)) in tied for name in found.missing_keys)
    inputs, targets = tokens_BT[:, :-1], tokens_BT[:, 1:]
    expected = F.cross_entropy(theirs(inputs, use_cache=False).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = ours(tokens_BT=inputs, targets_BT=targets).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    wanted = dict(theirs.named_parameters())
    gradients = {}
    for name, parameter in ours.named_parameters():
        if name in ours.unmoved():
            assert parameter.grad is None
            continue
        gradients[name] = parameter.grad.clone()
        assert (parameter.grad - wanted[name].grad).norm() <= 1e-5 * wanted[name].grad.norm() + 1e-7, name
    ours.zero_grad()
    recompute_blocks(ours)
    ours(tokens_BT=inputs, targets_BT=targets).sum().backward()
    assert all(torch.equal(ours.get_parameter(name).grad, gradient) for name, gradient in gradients.items())


@every_architecture
def test_initial_values_are_a_function_of_the_seed_distributed_as_those_of_transformers(kind):
    """M-D5: a rule that is no normal distribution is run by itself, from a seed for each name."""
    model = shape(kind)
    one, same, other, theirs = network(model), network(model), network(model, seed=4), theirs_of(model)
    drawn = 0
    wanted = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name)), name
        if name in one.unmoved():
            assert torch.equal(parameter, wanted[name]) and torch.equal(parameter, other.get_parameter(name))
            continue
        if callable(one.initial(name)):
            # Alone, it is what it is among the others: nothing depends on what was drawn before.
            assert torch.equal(parameter, network(model).initial(name)(3))
        drawn += not torch.equal(parameter, other.get_parameter(name))
        ours, reference, count = parameter.detach().double(), wanted[name].detach().double(), parameter.numel()
        spread = max(float(ours.std(correction=0)), float(reference.std(correction=0)))
        assert abs(ours.mean() - reference.mean()) <= 8 * spread / count**0.5 + 1e-6, name
        assert abs(ours.std(correction=0) - reference.std(correction=0)) <= (0.2 + 6 / count**0.5) * spread + 1e-6, name
    assert drawn >= 5


@every_architecture
def test_what_transformers_saves_comes_in_and_leaves_again_bit_by_bit(kind, tmp_path):
    """M-D5, M-D6: with weights no rule is asked; tensors beside the weights are part of checkpoints, imports and exports."""
    theirs = theirs_of(shape(kind))
    with torch.no_grad():
        for buffer in theirs.buffers():  # values that no constructor gives
            if buffer.is_floating_point() and buffer.dim() and buffer.numel() > 1:
                buffer.add_(0.25)
    theirs.save_pretrained(tmp_path / "theirs")
    done = import_model(tmp_path / "theirs", tmp_path / "imported", verify=True, family="hf")
    saved, parameters = Payload(tmp_path / "imported").read_all("model."), dict(theirs.named_parameters())
    persistent = theirs.state_dict().keys() - parameters.keys() - set(theirs.all_tied_weights_keys)
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    assert {name.removeprefix("model.") for name in saved} >= persistent
    assert done.compared.difference <= 1e-5
    again = export(tmp_path / "imported", tmp_path / "exported", "bf16", verify=False)
    halves = load_file(tmp_path / "exported" / "model.safetensors")
    assert again.parameters == done.parameters
    export(tmp_path / "imported", tmp_path / "exact", verify=True)
    before, after = load_file(tmp_path / "theirs" / "model.safetensors"), load_file(tmp_path / "exact" / "model.safetensors")
    assert before.keys() == after.keys() == halves.keys()
    assert all(torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype for name, tensor in before.items())
    kept = [name for name, tensor in halves.items() if tensor.dtype != torch.bfloat16]
    assert all(torch.equal(halves[name], before[name]) for name in kept) and bool(kept) == bool(persistent | frozen)


@every_architecture
def test_in_bf16_all_weights_are_cast_where_they_are_used(kind, tokens_BT):
    """M-D5: a convolution's weights are used by another module than has them; under FSDP2 they come cast, and so they must alone."""
    ours = network(shape(kind))
    exact = ours(tokens_BT)
    ours.compute_dtype = torch.bfloat16
    rounded = ours(tokens_BT)
    assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()
    halves = {name: p.detach().bfloat16() if p.requires_grad else p for name, p in ours.named_parameters()}
    assert torch.equal(torch.func.functional_call(ours, halves, (tokens_BT,)), rounded)
    ours(tokens_BT, tokens_BT).sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters() if p.requires_grad)
    assert not any(name in module.__dict__ for module in ours.modules() for name in module._parameters)


def test_numbers_that_json_lacks_are_read_and_written_as_transformers_does(tmp_path):
    """M-D5: falcon_h1 and mamba2 as transformers saves them have {"__float__": "Infinity"}, which was handed on undecoded."""
    import transformers

    config = config_of(shape("mamba2").hf_config)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    text = read_config(str(tmp_path))
    assert "Infinity" in text and json.loads(text, parse_constant=pytest.fail)["time_step_limit"] == written["time_step_limit"]
    assert config_of(text).time_step_limit == transformers.AutoConfig.from_pretrained(tmp_path).time_step_limit
    assert read_config(text) == text
    assert decoded({"a": [{"__float__": "-Infinity"}], "b": {"__float__": "x"}}) == {
        "a": [-float("inf")],
        "b": {"__float__": "x"},
    }


def test_fields_that_only_the_code_of_a_model_reads_are_fields():
    """M-D7: GLM-4.5's head_dim and Ministral 3's parameter of rotation were refused with the advice to remove them."""
    assert json.loads(shape("glm4_moe").hf_config)["head_dim"] == 8
    assert config_of(shape("minimax_m2").hf_config).rope_parameters["partial_rotary_factor"] == 0.5
    assert json.loads(shape("ministral3").hf_config)["rope_parameters"]["llama_4_scaling_beta"] == 0.1
    for changes, said in (
        ({"head_dimm": 8}, "head_dimm=8 is no field of Glm4MoeConfig; transformers would ignore it"),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta=0.1 is no parameter of rotary",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            shape("glm4_moe", **changes)


def test_heads_of_several_widths_have_a_size():
    """M-D7: Gemma 4's default configuration ended in a traceback of transformers'."""
    assert shape("gemma4_text").head_dim == 8


def test_parameters_that_have_no_value_in_transformers_are_named(monkeypatch):
    """M-D5: a constructor that leaves memory as it was gives no initial value."""
    from transformers.models.apertus import modeling_apertus

    original = modeling_apertus.ApertusMLP.__init__

    def with_more(self, config, *rest):
        original(self, config, *rest)
        self.extra = torch.nn.Parameter(torch.empty(7))

    monkeypatch.setattr(modeling_apertus.ApertusMLP, "__init__", with_more)
    with pytest.raises(
        ConfigError, match="transformers gives model.layers.0.mlp.extra of ApertusForCausalLM no finite initial value"
    ):
        network(shape("apertus"))


def test_weights_that_are_shared_by_blocks_are_gathered_with_the_root():
    model = shape("zamba2")
    with torch.device("meta"):
        built = build_network(model)
    assert [(unit.role, unit.apart) for unit in built.units()] == [("block", False)] * 4


def test_blocks_that_share_weights_are_not_said_to_be_compiled():
    """`parallel.compile=blocks` had no effect there, and nothing said so."""
    with pytest.raises(ConfigError, match="parallel.compile=blocks: the blocks of this model share weights, so none is compiled"):
        check_compiled_blocks(network(shape("zamba2")), Config(parallel=Parallel(compile="blocks")))
    check_compiled_blocks(network(shape("qwen3_next")), Config(parallel=Parallel(compile="blocks")))


@pytest.mark.parametrize("code", ["F32", "I32"])
def test_a_table_of_whole_numbers_in_another_format_is_refused_by_name(code, tmp_path):
    from safetensors.torch import save_file

    theirs_of(shape("deepseek_v4")).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    [name] = [name for name in tensors if name.endswith("tid2eid")]
    save_file(tensors | {name: tensors[name].to({"F32": torch.float32, "I32": torch.int32}[code])}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} is {code}; only I64 is read"):
        import_model(tmp_path / "theirs", tmp_path / "imported", family="hf")


def test_a_directory_of_the_hub_is_read_by_its_old_fields(tmp_path):
    """A published MiniMax-M2 says rotary_dim where transformers 5 says partial_rotary_factor."""
    folder = write_config(tmp_path, "minimax_m2")
    assert json.loads(read_config(str(folder)))["rope_parameters"]["partial_rotary_factor"] == 0.5
