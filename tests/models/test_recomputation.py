"""What backward recomputes: never another gradient, and as much work and memory as the key says, by torch's own counters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from family_cases import FAMILIES
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from parity import cases
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.model_schema import EncoderConfig, Model
from pretrain.config.parallel_schema import Parallel
from pretrain.config.schema import Config, Precision
from pretrain.errors import ConfigError, TrainingError
from pretrain.models import build_network, causal_blocks, causal_blocks_fp32
from pretrain.models.families import complete
from pretrain.parallel import blocks
from pretrain.parallel.blocks import compile_blocks, compile_model, prepare_blocks, recompute_blocks, set_compute_format
from pretrain.parallel.initialise import initialise
from pretrain.train.resolve import resolve

LENGTH, VOCABULARY, DIM = 32, 61, 32
OLMO = {"model_type": "olmo", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "vocab_size": 61, "clip_qkv": 0.001}  # fmt: skip
QUICK = ("llama", "gemma2", "gpt2", "gpt_oss", "deepseek_v3", "t5")
LLAMA = Model(family="llama", dim=DIM, layers=4, heads=4, vocab_size=VOCABULARY)
T5 = Model(family="t5", dim=DIM, layers=2, heads=4, vocab_size=VOCABULARY, encoder=EncoderConfig(decoder_start_id=0))
MODES = {
    "full": {},
    "selective": {"selective": True},
    "every second": {"every": 2},
    "selective, every second": {"selective": True, "every": 2},
}


def model_of(family: str) -> Model:
    return T5 if family == "t5" else next(iter(cases(family).values()))


def network_of(model: Model, dtype: torch.dtype, options: dict | None) -> torch.nn.Module:
    with torch.device("meta"):
        network = build_network(complete(model, LENGTH))
    network.to_empty(device="cpu")
    initialise(network, 0)
    set_compute_format(network, dtype)
    if options is not None:
        recompute_blocks(network, **options)
    return network


def loss_of(network: torch.nn.Module, rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    tokens = torch.randint(network.config.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    inputs = {"tokens_BT": tokens[:, :-1], "targets_BT": tokens[:, 1:]}
    if network.config.encoder.layers:
        inputs["source_BS"] = tokens[:, 2:]
    return network(**inputs).sum()


def gradients(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    loss_of(network).backward()
    return {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in sorted({*FAMILIES, "t5"})]
)
def test_gradients_are_the_same_bits_whatever_is_recomputed(family, dtype):
    model = model_of(family)
    expected = gradients(network_of(model, dtype, None))
    assert expected and all(torch.isfinite(gradient).all() for gradient in expected.values())
    for mode, options in MODES.items():
        found = gradients(network_of(model, dtype, options))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), mode


def test_selective_is_refused_where_blocks_change_results_in_place():
    """`selective` stores what a projection gave. OLMo of transformers clips it in place, and its gradients were wrong by a factor of 66."""
    config = Config(
        model=Model(family="hf", hf_config=json.dumps(OLMO)), parallel=Parallel(activation_checkpointing="selective")
    )
    with pytest.raises(ConfigError, match="selective: blocks of model.family=hf may change .* set it to full"):
        resolve(config)
    resolve(dataclasses.replace(config, parallel=Parallel(activation_checkpointing="full")))


@pytest.mark.parametrize("kind", [(causal_blocks_fp32, "_parts", torch.float32), (causal_blocks, "_blocks", torch.bfloat16)], ids=["fp32", "bf16"])
def test_selective_stores_what_attention_over_blocks_gave(kind, monkeypatch, one_thread):
    module, name, dtype = kind
    if dtype == torch.float32 and not causal_blocks_fp32.HAS_MKL:
        pytest.skip("this build of torch has no MKL, for whose products the blocks are")
    model, calls, results = Model(family="llama", dim=128, layers=2, heads=2, vocab_size=VOCABULARY), [], {}
    walk = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: calls.append(mode) or walk(*arguments))
    for mode in ("selective", "full"):
        network = network_of(model, dtype, MODES[mode])
        loss_of(network, length=160).backward()
        results[mode] = {name: parameter.grad for name, parameter in network.named_parameters()}
    # Forward, backward, and forward again.
    assert (calls.count("selective"), calls.count("full")) == (2 * model.layers, 3 * model.layers)
    assert all(torch.equal(gradient, results["full"][name]) for name, gradient in results["selective"].items())


def test_the_work_is_what_the_mode_says():
    """By torch's FLOP counter, over the blocks: forward 1, backward 2, and what is recomputed once more."""

    def flops(options: dict | None) -> int:
        network = network_of(LLAMA, torch.float32, options)
        with FlopCounterMode(display=False) as counter:
            loss_of(network).backward()
        return counter.get_total_flops()

    network = network_of(LLAMA, torch.float32, None)
    with torch.no_grad(), FlopCounterMode(display=False, depth=9) as counter:
        loss_of(network)
    found = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    # Nothing needs the result of a block's last projection, and torch stops before it.
    blocks = [found[f"Decoder.layers.{i}"] - found[f"Decoder.layers.{i}.mlp.down"] for i in range(LLAMA.layers)]
    assert len(set(blocks)) == 1 and blocks[0] > 0
    stored = flops(None)
    assert flops({"selective": True}) == stored
    assert flops({}) == stored + sum(blocks)
    assert flops({"every": 2}) == stored + sum(blocks) // 2


def compiled_products(model: Model, options: dict | None, compile_it: Callable = compile_blocks) -> tuple[list[int], dict[str, torch.Tensor]]:
    """How many matrix products each compiled pass has, forward ones first, and the gradients. With inductor's partitioner, and without its code generation."""
    found: dict[str, list[int]] = {"forward": [], "backward": []}

    def count(which: str, graph: torch.fx.GraphModule, inputs: list) -> object:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        found[which].append(sum(any(word in name for word in (".mm.", ".addmm.", "multiply_rows", "outer_products")) for name in names))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    network = network_of(model, torch.float32, options)
    passes = {f"{short}_compiler": partial(count, which) for short, which in (("fw", "forward"), ("bw", "backward"))}
    partition = partial(min_cut_rematerialization_partition, compiler="inductor")
    compile_it(network, aot_autograd(**passes, partition_fn=partition, decompositions=select_decomp_table()))
    grads = gradients(network)
    return found["forward"] + found["backward"], grads


PRODUCTS = {"llama": (LLAMA, 7, 6), "qwen3_moe": (model_of("qwen3_moe"), 8, 8), "gpt2": (model_of("gpt2"), 6, 5)}
"""Those of a block forward: projections, the router, and the three of all experts with their weights. And those that backward needs again: all but the
last projection, or all, because the results of experts are weighted."""


@pytest.mark.parametrize("family", PRODUCTS)
def test_a_compiled_block_recomputes_what_its_backward_needs_and_no_more(family):
    """Compiled first and recomputed then, blocks computed their last projection too, a quarter of a Llama's products."""
    model, forward, again = PRODUCTS[family]
    plain, expected = compiled_products(model, None)
    assert plain == [forward, 2 * forward]
    for mode, recomputed in {"full": again, "selective": 0}.items():
        counts, found = compiled_products(model, MODES[mode])
        assert counts == [forward, 2 * forward + recomputed], mode
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items()), mode


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the compiler of torch 2.11 cuts blocks of transformers at their casts")
def test_recomputed_blocks_of_transformers_are_compiled_with_their_model():
    """They hold their cast weights in their modules while they compute. The compiler left out recomputed blocks for that, and the run was a slow one."""
    model = Model(family="hf", hf_config=json.dumps(OLMO))
    plain, expected = compiled_products(model, None, compile_model)
    assert plain == [15, 30]  # two blocks of seven, and the head
    counts, found = compiled_products(model, MODES["full"], compile_model)
    assert counts == [15, 30 + 2 * 6]
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("compile_it", [compile_model, compile_blocks])
def test_a_recomputed_block_that_the_compiler_would_leave_out_is_refused(compile_it):
    """torch would run all of it uncompiled, and say nothing."""
    torch._dynamo.reset()
    network = network_of(LLAMA, torch.float32, None)
    norm = network.units()[1].modules[0].attention_norm
    computed = norm.forward
    norm.forward = lambda x: computed(x) * float(x.detach().abs().max() > -1)  # asks the host
    recompute_blocks(network)
    compile_it(network, "eager")
    with pytest.raises(TrainingError, match=r"leaves a block out that is recomputed \(Unsupported Tensor.item.* or another parallel.compile"):
        loss_of(network)
    with FlopCounterMode(display=False):  # where torch compiles nothing
        loss_of(network).backward()


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*FAMILIES, "t5"}))
def test_compiled_models_have_the_same_gradients_whatever_is_recomputed(family):
    model = model_of(family)
    _, expected = compiled_products(model, None, compile_model)
    for mode in ("full", "selective", "every second"):
        _, found = compiled_products(model, MODES[mode], compile_model)
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items()), mode


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*FAMILIES, "t5"}))
def test_compiled_blocks_have_the_same_gradients_whatever_is_recomputed(family):
    model = model_of(family)
    _, expected = compiled_products(model, None)
    for mode in ("full", "selective", "every second"):
        _, found = compiled_products(model, MODES[mode])
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items()), mode


def test_blocks_are_recomputed_inside_of_what_is_compiled_unless_they_are_cut_up():
    def order(model: Model, change=lambda network: None) -> list[bool]:
        config = Config(model=model, parallel=Parallel(compile="blocks", activation_checkpointing="full"))
        network = network_of(model, torch.float32, None)
        change(network)
        compiled = []
        with patch.object(blocks, "compile_strictly", lambda function, **_: compiled.append(hasattr(function, "breaks_before")) or function):
            prepare_blocks(network, config)
        return compiled

    def cut(network: torch.nn.Module) -> None:
        class Apart(torch.nn.Identity):
            forward = torch.compiler.disable(torch.nn.Identity.forward)

        network.units()[1].modules[0].extra = Apart()

    assert order(LLAMA) == [True] * 4
    assert order(LLAMA, cut) == [False, True, True, True]
    assert order(Model(family="hf", hf_config=json.dumps(OLMO))) == [False] * 2


def kept_by_forward(network: torch.nn.Module) -> int:
    """The bytes that forward leaves allocated, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        loss = loss_of(network, rows=4, length=128)
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in events.key_averages())


def test_memory_falls_as_the_mode_says():
    def kept(options: dict | None) -> int:
        return kept_by_forward(network_of(dataclasses.replace(LLAMA, dim=128), torch.float32, options))

    everything, selective, half, full = (kept(o) for o in (None, {"selective": True}, {"every": 2}, {}))
    assert full < 0.35 * everything and full < selective < 0.8 * everything and full < half < 0.75 * everything


@pytest.mark.slow
def test_a_compiler_stores_what_its_budget_allows():
    """With the partitioner that inductor has, and without its code generation."""

    def compiled(budget: float) -> tuple[int, dict[str, torch.Tensor]]:
        torch._dynamo.reset()
        network = network_of(dataclasses.replace(LLAMA, dim=128, layers=2), torch.float32, None)
        options = Parallel(compile="blocks", activation_memory_budget=budget)
        prepare_blocks(network, Config(parallel=options, precision=Precision(compute="fp32")), "aot_eager_decomp_partition")
        loss_of(network, rows=4, length=128).backward()
        found = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
        return kept_by_forward(network), found

    (everything, expected), (half, some), (least, few) = (compiled(budget) for budget in (1.0, 0.5, 0.0))
    assert least < half < everything and least < 0.6 * everything
    for found in (some, few):
        assert all((found[name] - g).norm() <= 1e-6 * g.norm() for name, g in expected.items())
    prepare_blocks(network_of(LLAMA, torch.float32, None), Config(parallel=Parallel(compile="blocks"), precision=Precision(compute="fp32")))
    assert torch._functorch.config.activation_memory_budget == 1.0


def test_selective_stores_what_has_kernels_for_gpus_alone():
    """torch's attention for sequences of any length, and products in MXFP8: they are operators of their own, and were computed twice."""
    import torch.nn.attention.varlen  # noqa: F401 (it registers the operator)

    operators = [torch.ops.torch_attn._varlen_attn.default] + [torch.ops.aten._scaled_mm_v2.default] * hasattr(torch.ops.aten, "_scaled_mm_v2")
    assert {blocks._policy(None, operator) for operator in operators} == {CheckpointPolicy.MUST_SAVE}
