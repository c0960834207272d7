"""Weights that are cast to bf16 once per step: the same bits, no matrix cast in a micro-step, and never a copy of other weights than those of now."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from family_cases import FAMILIES
from running import run_main, state_of, train
from test_recomputation import LLAMA, QUICK, loss_of, model_of, network_of
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.config.keys import check_effects
from pretrain.config.load import load_config
from pretrain.config.model_schema import ExpertsConfig, Model
from pretrain.config.parallel_schema import Precision
from pretrain.errors import ConfigError
from pretrain.parallel.activation_offload import StoredTensors, offload_activations
from pretrain.parallel.blocks import compile_blocks, recompute_blocks
from pretrain.parallel.fp8 import set_fp8
from pretrain.parallel.weight_copies import WeightCopies, keeps_casts
from pretrain.train.number_format import FormatChoice
from pretrain.train.plan import make_plan
from pretrain.train.resolve import resolve

BF16 = torch.bfloat16
STABLELM = {"model_type": "stablelm", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
            "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64}  # fmt: skip
OTHERS = {
    "hf": Model(family="hf", hf_config=json.dumps(STABLELM), vocab_size=61),
    "tied": dataclasses.replace(LLAMA, tie_embeddings=True),
    "further tokens": dataclasses.replace(LLAMA, predict_ahead=2),
    "experts": Model(family="qwen3_moe", dim=32, layers=2, heads=4, vocab_size=61, experts=ExpertsConfig(count=4, active=2, ffn_dim=32)),
}  # fmt: skip


class Casts(TorchDispatchMode):
    """The matrices of a network that are cast to bf16, by name, each as often as it is; without biases of experts, which are small."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in network.named_parameters() if p.dim() > 1 and not name.endswith("bias")}
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "_foreach_copy_":
            pairs = zip(*args[:2])
        elif name == "_to_copy":
            pairs = [(result, args[0])]
        else:
            pairs = [args[:2]] if name == "copy_" else []
        sources = [source for target, source in pairs if target.dtype == BF16 and source.dtype == torch.float32]
        self.found += [self.names[source.data_ptr()] for source in sources if source.data_ptr() in self.names]
        return result


def two_micro_steps(network: torch.nn.Module, copies: WeightCopies | None) -> dict[str, torch.Tensor]:
    for parameter in network.parameters():
        parameter.grad = None
    if copies is None:
        loss_of(network).backward()
        loss_of(network).backward()
    else:
        with copies.in_use():
            loss_of(network).backward()
            loss_of(network).backward()
    return {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected and found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert all(found[name].dtype == torch.float32 for name in found)


@pytest.mark.parametrize(
    "family", [*OTHERS, *(pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in sorted({*FAMILIES, "t5"}))]
)
def test_gradients_are_the_same_bits_and_every_matrix_is_cast_once(family):
    network = network_of(OTHERS[family] if family in OTHERS else model_of(family), BF16, None)
    with Casts(network) as ever:
        expected = two_micro_steps(network, None)
    cast = set(ever.found)
    assert len(cast) >= 6 and all(ever.found.count(name) % 2 == 0 for name in cast)
    with Casts(network) as once:
        found = two_micro_steps(network, WeightCopies(network, BF16))
    assert_same(found, expected)
    assert sorted(once.found) == sorted(cast)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks_take_copies_and_give_the_same_bits(backend):
    """And they are compiled once for all steps."""
    network = network_of(LLAMA, BF16, None)
    compile_blocks(network, backend=backend)
    expected, copies = two_micro_steps(network, None), WeightCopies(network, BF16)
    assert_same(two_micro_steps(network, copies), expected)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for weight in network.parameters():
            weight.mul_(2)
        with torch.enable_grad():
            found = two_micro_steps(network, copies)
    assert_same(found, two_micro_steps(network, None))


@pytest.mark.parametrize("saving", ["recomputed", "offloaded"])
def test_copies_go_with_what_saves_memory_and_stay_on_the_device(saving, monkeypatch):
    expected = two_micro_steps(network_of(LLAMA, BF16, None), None)
    network, moved, copy = network_of(LLAMA, BF16, None), [], StoredTensors._copy
    monkeypatch.setattr(StoredTensors, "_copy", lambda self, tensor: moved.append(tensor.data_ptr()) or copy(self, tensor))
    recompute_blocks(network) if saving == "recomputed" else offload_activations(network)
    copies = WeightCopies(network, BF16)
    assert_same(two_micro_steps(network, copies), expected)
    assert bool(moved) == (saving == "offloaded")
    assert not {tensor.data_ptr() for tensor in copies.copies.values()} & set(moved)


def test_a_copy_is_never_of_earlier_weights_and_outside_a_step_there_is_none():
    network = network_of(LLAMA, BF16, None)
    copies = WeightCopies(network, BF16)
    before = two_micro_steps(network, copies)
    with torch.no_grad():
        earlier = loss_of(network)
        for weight in network.parameters():
            weight.mul_(1.5)
        changed = loss_of(network)
    assert not torch.equal(changed, earlier)
    plain = network_of(LLAMA, BF16, None)
    plain.load_state_dict(network.state_dict())
    assert plain.state_dict().keys() == network.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(changed, loss_of(plain))
    after = two_micro_steps(network, copies)
    assert_same(after, two_micro_steps(plain, None))
    assert any(not torch.equal(after[name], before[name]) for name in after)
    with pytest.raises(RuntimeError, match="a failure"), copies.in_use():
        raise RuntimeError("a failure")
    assert not any("copies" in vars(module) for module in network.modules())


def test_a_frozen_matrix_has_a_copy_and_no_gradient():
    network = network_of(LLAMA, BF16, None)
    frozen = network.layers["0"].mlp.up.weight.requires_grad_(False)
    expected = two_micro_steps(network, None)
    assert_same(two_micro_steps(network, WeightCopies(network, BF16)), expected)
    assert frozen.grad is None


def test_products_in_fp8_begin_with_the_copies():
    network = network_of(LLAMA, BF16, None)
    set_fp8(network, Precision(compute="bf16", fp8="tensorwise"))
    expected = two_micro_steps(network, None)
    with Casts(network) as once:
        found = two_micro_steps(network, WeightCopies(network, BF16))
    assert_same(found, expected)
    assert len(once.found) == len(set(once.found))


BYTES = "53.3 kB"
"""2 bytes for each of 35,040 parameters without the 8,224 of the embedding and the 160 of five norms."""
STEP = ("precision.compute=bf16", "batch.sequences=16", "batch.micro_sequences=4")


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_run_has_the_same_weights_and_says_how_it_casts(strategy, pool, config_file):
    """A run has several steps, so that weights change and are cast anew."""
    ranks = 1 if strategy == "single" else 2
    runs = [
        train(pool, ranks, config_file, f"run.name=keep-{kept}", "run.steps=6", f"precision.keep_casts={kept}", *STEP)
        for kept in ("null", "false")
    ]
    kept, cast = (state_of(run, 6) for run in runs)
    assert kept.keys() == cast.keys() and all(torch.equal(kept[name], cast[name]) for name in kept)
    for value, says in {"true": True, "false": False, "null": True}.items():
        _, printed = pool.launch(ranks, run_main, str(config_file), "--check", f"precision.keep_casts={value}", *STEP)[0]
        assert (f"and {BYTES} of weights cast once per step in bf16" in printed) == says, printed


DECISIONS = {
    "several micro-steps": (("batch.sequences=16",), "single", 1, True),
    "one micro-step": (("batch.sequences=4",), "single", 1, False),
    "one micro-step on each rank": (("batch.sequences=16",), "ddp", 4, False),
    "asked for": (("batch.sequences=4", "precision.keep_casts=true"), "ddp", 1, True),
    "not wanted": (("batch.sequences=16", "precision.keep_casts=false"), "single", 1, False),
    "recomputed": (("batch.sequences=16", "parallel.activation_checkpointing=full"), "single", 1, False),
    "offloaded": (("batch.sequences=16", "parallel.activation_offload=true"), "single", 1, False),
    "a ramp with larger steps": (("batch.sequences=4", "batch.ramp=[{until_tokens: 4000, sequences: 16}]"), "single", 1, True),
    "fsdp": (("batch.sequences=16",), "fsdp", 2, False),
    "fp32": (("batch.sequences=16", "precision.compute=fp32"), "single", 1, False),
    "stored in bf16": (("batch.sequences=16", "precision.master=bf16"), "single", 1, False),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_by_default_there_are_copies_where_they_save_time_and_memory_is_not_short(case, config_file):
    options, strategy, ranks, expected = DECISIONS[case]
    config = resolve(load_config(config_file, ["precision.compute=bf16", "batch.micro_sequences=4", *options])[0])
    assert keeps_casts(config, strategy, ranks) is expected


PAIRS = {"several micro-steps": (1000, True), "one micro-step": (2000, False), "a share at once": (None, False)}


@pytest.mark.parametrize("case", PAIRS)
def test_steps_of_pairs_have_several_micro_steps_where_a_limit_says_so(case, config_file):
    config = load_config(config_file, ["precision.compute=bf16"])[0]
    micro, expected = PAIRS[case]
    pairs = dataclasses.replace(config, batch=dataclasses.replace(config.batch, tokens=4000, micro_tokens=micro))
    assert keeps_casts(pairs, "ddp", 2) is expected


@pytest.mark.parametrize("reason", ["parallel.strategy=fsdp", "precision.master=bf16", "precision.compute=fp32"])
def test_where_nothing_is_cast_the_key_is_refused(reason, config_file):
    with pytest.raises(ConfigError, match=f"precision.keep_casts=true has no effect with {reason}"):
        check_effects(load_config(config_file, ["precision.compute=bf16", "precision.keep_casts=true", reason])[0])


def test_where_auto_comes_to_fp32_a_note_says_that_the_key_has_no_effect(config_file):
    config, _ = load_config(config_file, ["precision.compute=auto", "precision.keep_casts=true"])
    plan = make_plan(config, 1, torch.device("cpu"), FormatChoice("fp32", "this is a test"))
    assert any("precision.keep_casts=true has no effect with precision.compute=fp32 (the choice of auto)" in note for note in plan.notes)
    assert plan.config.precision.keep_casts is None
