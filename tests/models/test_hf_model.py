"""`family: hf`: models that transformers builds are networks like our own, and compute what transformers computes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hf_configs import CONFIGS, write_config
from running import on_meta
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.model_schema import Model, Norm
from pretrain.config.optim_schema import Optim
from pretrain.conventions import IGNORED
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.families import complete, family_of
from pretrain.optim.optimizer import OptimizerSet
from pretrain.optim.rules import decayed
from pretrain.parallel.blocks import recompute_blocks
from pretrain.parallel.initialise import initialise

every_architecture = pytest.mark.parametrize("kind", CONFIGS)


def shape(tmp_path, kind: str, **changes: object) -> Model:
    return complete(Model(family="hf", hf_config=str(write_config(tmp_path / kind, kind, **changes))), 32)


def network(model: Model, seed: int = 3):
    with torch.device("meta"):
        built = build_network(model)
    built.to_empty(device="cpu")
    initialise(built, seed)
    return built


def reference(model: Model, weights: dict[str, torch.Tensor]):
    import transformers

    fields = {name: value for name, value in family_of("hf").to_hf(model).items() if name != "architectures"}
    config = transformers.AutoConfig.for_model(**fields, attn_implementation="eager")
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = theirs.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys
    theirs.tie_weights()
    missing = {id(theirs.get_parameter(name)) for name in found.missing_keys}
    assert missing <= {id(theirs.get_parameter(name)) for name in weights}  # tied ones have one name
    return theirs


@every_architecture
def test_loss_and_gradients_are_those_of_transformers(tmp_path, kind):
    model = shape(tmp_path, kind)
    ours = network(model)
    theirs = reference(model, ours.state_dict())
    ids = torch.randint(257, (3, 33), generator=torch.Generator().manual_seed(1))
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[1, 4:9] = IGNORED
    expected = F.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    losses_B = ours(tokens_BT=inputs, targets_BT=targets)
    assert losses_B.shape == (3,)
    assert losses_B.sum().item() == pytest.approx(expected.item(), rel=1e-6)
    losses_B.sum().backward()
    expected.backward()
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        difference = (parameter.grad - wanted[name].grad).norm()
        assert difference <= 1e-4 * wanted[name].grad.norm() + 1e-6, name


@every_architecture
def test_the_parts_are_found_and_the_names_are_those_of_transformers(tmp_path, kind):
    model = shape(tmp_path, kind)
    with torch.device("meta"):
        built = build_network(model)
    units, names = built.units(), [name for name, _ in built.named_parameters()]
    blocks = [unit.modules[0] for unit in units if unit.role == "block"]
    assert len(blocks) == model.layers == 2 and all(unit.apart for unit in units)
    inside = {id(p) for block in blocks for p in block.parameters()}
    assert len(inside) == sum(1 for p in built.parameters() if id(p) in inside) >= 10
    assert all(p.is_meta for p in built.parameters()) and len(set(names)) == len(names)
    ends = [unit.role for unit in units if unit.role != "block"]
    assert ends == ([] if built.tied else ["first", "last"])
    lines = family_of("hf").entries(model, names)
    assert [line.ours for line in lines] == [(name,) for name in names]
    # On disk, transformers takes the experts of a layer apart; all else has one name.
    apart = {line.ours[0].split(".")[-1] for line in lines if line.theirs != line.ours}
    assert apart == ({"gate_up_proj", "down_proj"} if kind == "qwen2_moe" else set())


@every_architecture
def test_initial_values_follow_the_rules_of_the_architecture_and_the_seed(tmp_path, kind):
    model = shape(tmp_path, kind)
    one, same, other = network(model), network(model), network(model, seed=4)
    theirs = dict(reference_with_own_values(model).named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        mean, std = one.initial(name)
        if std:
            assert not torch.equal(parameter, other.get_parameter(name))
            count = parameter.numel()
            assert abs(parameter.std() / std - 1) < 5 / math.sqrt(count) and abs(
                theirs[name].std() / std - 1
            ) < 0.2 + 5 / math.sqrt(count)
        else:
            assert torch.equal(parameter, torch.full_like(parameter, mean)) and torch.equal(parameter, theirs[name])


def reference_with_own_values(model: Model):
    import transformers

    torch.manual_seed(0)
    fields = {name: value for name, value in family_of("hf").to_hf(model).items() if name != "architectures"}
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields))


def test_weights_are_cast_where_they_are_used_and_stay_fp32(tmp_path):
    for kind in ("falcon", "granite"):
        ours = network(shape(tmp_path, kind))
        ids = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(2))
        exact = ours(ids)
        ours.compute_dtype = torch.bfloat16
        rounded = ours(ids)
        assert rounded.dtype == torch.bfloat16
        assert 0 < (rounded - exact).abs().max() < 0.05 * exact.abs().max()
        # The same as a model of which every parameter is bf16, as FSDP2 hands them over.
        halves = torch.func.functional_call(ours, {name: p.detach().bfloat16() for name, p in ours.named_parameters()}, (ids,))
        assert torch.equal(halves, rounded)
        ours(ids, ids).sum().backward()
        assert {p.dtype for p in ours.parameters()} == {p.grad.dtype for p in ours.parameters()} == {torch.float32}


@every_architecture
def test_recomputed_blocks_give_the_same_gradients(tmp_path, kind):
    ours = network(shape(tmp_path, kind))
    ids = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(5))
    gradients = []
    for recompute in (False, True):
        if recompute:
            recompute_blocks(ours)
        ours.zero_grad()
        ours(ids[:, :-1], ids[:, 1:]).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in ours.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("kind", ["granite", "falcon", "gptj", "opt", "bloom", "qwen2_moe"])
def test_flops_are_those_that_torch_counts(tmp_path, kind):
    model = shape(tmp_path, kind)
    ours = network(model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        ours(torch.zeros(3, 32, dtype=torch.long)).float().sum().backward()
    counted = counter.get_total_flops()
    # Rotations of some are written as products of matrices, which is no part of the model's arithmetic; routed experts are not counted.
    tolerance = 0.05 if kind != "qwen2_moe" else 0.5
    assert on_meta(model).flops_per_token(32) * 3 * 32 == pytest.approx(counted, rel=tolerance)


def test_tables_are_not_decayed(tmp_path):
    ours = network(shape(tmp_path, "gptj"))
    decays = decayed(ours)
    assert not decays["transformer.wte.weight"] and not decays["transformer.h.0.ln_1.weight"] and not decays["lm_head.bias"]
    assert decays["transformer.h.0.attn.q_proj.weight"] and decays["lm_head.weight"]
    assert OptimizerSet(ours, Optim()).parameters.keys() == decays.keys()


def test_the_contents_take_the_place_of_the_file(tmp_path):
    first = shape(tmp_path, "stablelm")
    assert (
        json.loads(first.hf_config)["num_key_value_heads"] == 2 and json.loads(first.hf_config)["rope_parameters"]["rope_theta"]
    )
    assert (first.dim, first.layers, first.heads, first.kv_heads, first.head_dim, first.vocab_size) == (32, 2, 4, 2, 8, 257)
    (tmp_path / "stablelm" / "config.json").unlink()
    assert complete(first, 32) == first
    # Any layer of defaults gives the same text: the file of transformers' own making, too.
    import transformers

    transformers.AutoConfig.for_model(**{k: v for k, v in json.loads(first.hf_config).items()}).save_pretrained(
        tmp_path / "again"
    )
    assert complete(Model(family="hf", hf_config=str(tmp_path / "again")), 32) == first


def test_contents_are_taken_as_the_file_is(tmp_path):
    file = shape(tmp_path, "bloom")
    text = json.dumps({"model_type": "bloom", **CONFIGS["bloom"]})
    assert complete(Model(family="hf", hf_config=text), 32) == file
    for text, said in (
        ('{"model_type": "bloom", "n_layerz": 1}', "n_layerz=1 is no field"),
        ('{"model_type": "mine"}', "model_type='mine'"),
        ('{"model_type": "bloom"', "cannot be read as JSON"),
    ):
        with pytest.raises(ConfigError, match=f"model.hf_config.*: .*{said}"):
            complete(Model(family="hf", hf_config=text), 32)


REFUSED = {
    "an unknown architecture": ({"model_type": "my_model", "auto_map": {"AutoModel": "x.y"}}, "model_type='my_model'; its auto_map names code"),
    "no architecture": ({"model_type": None}, "model_type=None"),
    "an encoder": ({"model_type": "bert", "hidden_size": 32}, "model_type=bert sees later tokens too; set is_decoder: true"),
    "encoder and decoder": ({"model_type": "t5"}, "no causal language model of model_type='t5'"),
    "tokens in any order": ({"model_type": "xlnet"}, "model_type=xlnet is no causal language model"),
    "an unknown field": ({"model_type": "bloom", "n_layerz": 3}, "n_layerz=3 is no field of BloomConfig; transformers would ignore it"),
    "quantised weights": ({"model_type": "bloom", "quantization_config": {"bits": 4}}, "quantization_config=.* is no field"),
    "a wrong type": ({"model_type": "llama", "hidden_size": "wide"}, "config.json: .*hidden_size"),
    "sizes that do not fit": ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "config.json: "),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_causal_model_of_transformers_own_is_refused_by_name(tmp_path, case):
    fields, said = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=said) as caught:
        complete(Model(family="hf", hf_config=str(tmp_path)), 32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [None, "[1]", "{", ""])
def test_a_file_that_is_no_configuration_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="model.hf_config=.*: (cannot be read as JSON|not a JSON object)"):
        complete(Model(family="hf", hf_config=str(tmp_path / "config.json")), 32)


def test_other_switches_beside_it_are_refused(tmp_path):
    folder = str(write_config(tmp_path / "a", "granite"))
    for switches, said in (
        ({"dim": 64}, "model.dim=64"),
        ({"tie_embeddings": True}, "model.tie_embeddings=True"),
        ({"norm": Norm(kind="layer")}, "model.norm.kind=layer"),
        ({"attention_backend": "flex"}, "model.attention_backend=flex"),
        ({"attention_dropout": 0.1}, "model.attention_dropout=0.1"),
        ({"vocab_size": 300}, "model.vocab_size=300"),
    ):
        with pytest.raises(ConfigError, match=f"{said} has no meaning beside model.family=hf"):
            complete(Model(family="hf", hf_config=folder, **switches), 32)
    with pytest.raises(ConfigError, match="data.sequence_length=65: the model of model.hf_config has 64 positions"):
        complete(Model(family="hf", hf_config=folder), 65)
    with pytest.raises(ConfigError, match="model.max_sequence_length=65: the model of model.hf_config has 64 positions"):
        complete(Model(family="hf", hf_config=folder, max_sequence_length=65), 32)
    with pytest.raises(ConfigError, match="model.family=hf needs model.hf_config"):
        complete(Model(family="hf"), 32)
    with pytest.raises(ConfigError, match="model.hf_config describes the model of model.family=hf, and this is llama"):
        complete(Model(hf_config=folder), 32)


def test_fields_inside_a_part_and_parameters_of_rotation_are_checked_as_well(tmp_path):
    gemma = {"text_config": {"hidden_size": 32, "num_hidden_layers": 2}, "vision_config": {"hidden_size": 32}}
    for changes, said in (
        (
            {"text_config": gemma["text_config"] | {"hidden_sizee": 5}},
            "text_config: hidden_sizee=5 is no field of Gemma3TextConfig",
        ),
        (
            {"text_config": gemma["text_config"] | {"quantization_config": {}}},
            "text_config: quantization_config={} is no field of",
        ),
        ({"vision_config": {"patch_sizee": 5}}, "vision_config: patch_sizee=5 is no field of"),
    ):
        with pytest.raises(ConfigError) as error:
            shape(tmp_path, "gemma3", **gemma | changes)
        assert said in str(error.value)
    with pytest.raises(ConfigError, match="rope_parameters: junk=1 is no parameter of rotary positions"):
        shape(tmp_path, "stablelm", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "junk": 1})
    with pytest.raises(ConfigError, match=r"transformers builds no causal language model of model_type=\['x'\]"):
        shape(tmp_path, "stablelm", model_type=["x"])


def test_what_transformers_cannot_build_is_said_in_a_short_line(tmp_path):
    """M-D7: --family hf with head_dim=0 ended in a traceback."""
    for kind, changes, said in (
        ("stablelm", {"vocab_size": 2**31}, "RuntimeError"),
        ("glm4", {"head_dim": 0}, "ZeroDivisionError"),
    ):
        with pytest.raises(ConfigError, match=f"transformers cannot build {kind}: {said}") as error:
            build_network(shape(tmp_path, kind, **changes))
        assert len(str(error.value)) < 500 and "\n" not in str(error.value)
