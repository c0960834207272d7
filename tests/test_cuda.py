"""What needs a GPU: `bash tests/run.sh --cuda` on a host that has one. Not run in continuous integration."""

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from running import gradients, largest_gradient_difference, largest_relative_difference, losses, run_main, state_of, train
from torch._dynamo.utils import counters

from pretrain.config.load import load_config
from pretrain.config.model_schema import Model
from pretrain.config.optim_schema import Optim
from pretrain.errors import TrainingError
from pretrain.models import build_network
from pretrain.models.dropout import make_dropout
from pretrain.models.families import complete
from pretrain.models.layers import LayerNorm, RMSNorm
from pretrain.models.loss import Losses
from pretrain.observe.flops import PEAKS_BF16
from pretrain.observe.metrics import read_metrics
from pretrain.optim.adamw import AdamW
from pretrain.optim.guarded import Formats
from pretrain.optim.lion import Lion
from pretrain.optim.optimizer import OptimizerSet, _scale
from pretrain.optim.rounding import round_at_random
from pretrain.parallel.activation_offload import offload_activations
from pretrain.parallel.blocks import recompute_blocks
from pretrain.parallel.cuda_graph import RecordedMicroStep
from pretrain.parallel.fp8 import Fp8Product, takes_scales_of_rows
from pretrain.parallel.initialise import initialise
from pretrain.parallel.ring_parts import Kernel
from pretrain.train.memory_estimate import estimate_memory

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).resolve().parents[1]
CUDA = "run.device=cuda"
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.parametrize(
    "asked",
    [(), ("model.dropout=0.2", "model.attention_dropout=0.2"), ("model.dropout=0.2", "model.attention_dropout=0.2", "parallel.compile=blocks")],
    ids=["", "dropout", "compiled"],
)
def test_a_gpu_computes_what_the_cpu_computes_from_the_same_initial_weights(pool, config_file, asked):
    options = ("log.gradients_at=[1]", "run.steps=10", "optim.lr=3e-4", *asked)
    cpu = train(pool, 1, config_file, "run.name=cpu", "run.device=cpu", *options)
    gpu = train(pool, 1, config_file, "run.name=gpu", CUDA, *options)
    assert largest_gradient_difference(gradients(gpu), gradients(cpu)) <= 1e-5
    assert largest_relative_difference(losses(gpu), losses(cpu)) <= 1e-5


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_a_gpu_drops_what_a_cpu_drops(compiled):
    model = Model(dim=70, heads=5, dropout=0.2, attention_dropout=0.2)
    keys, inputs = torch.tensor([3, -7, 2**62]), {"attention": torch.ones(3, 300, 70), "attention.weights": torch.ones(3, 5, 300, 300)}
    for place, x in inputs.items():
        kept = {}
        for device in ("cpu", "cuda"):
            mask = make_dropout(model, keys.to(device), 300).of_block("block")[place]
            function = torch.compile(mask) if compiled and device == "cuda" else mask
            kept[device] = function(x.to(device)).cpu()
        assert torch.equal(kept["cuda"], kept["cpu"])
        assert (kept["cuda"] == 0).float().mean().item() == pytest.approx(0.2, abs=0.01)


def test_a_gpu_resumes_what_the_cpu_saved(pool, config_file):
    cpu = train(pool, 1, config_file, "run.name=cpu", "run.device=cpu", "checkpoint={every_steps: 10, keep_last: 0}")
    gpu = train(pool, 1, config_file, "run.name=gpu", CUDA, f"run.resume={cpu}/checkpoints/step-00000010")
    whole = train(pool, 1, config_file, "run.name=whole", CUDA)
    assert largest_relative_difference(losses(gpu), losses(whole)[10:]) < 1e-3


@pytest.mark.parametrize("options", [("parallel.compile=blocks",), ("parallel.activation_checkpointing=full",), ()])
def test_bf16_trains_and_reports_mfu_where_the_peak_is_known(pool, config_file, options):
    run = train(pool, 1, config_file, CUDA, "precision.compute=bf16", *options)
    records = read_metrics(run)
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
    if torch.cuda.get_device_name() in PEAKS_BF16:
        assert 0 < records[-1]["mfu"] < 1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_nccl_computes_what_one_gpu_computes(pool, config_file, strategy):
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    options = ("log.gradients_at=[1]", "run.steps=10", CUDA)
    one = train(pool, 1, config_file, "run.name=one", *options)
    two = train(pool, 2, config_file, "run.name=two", f"parallel.strategy={strategy}", *options)
    assert largest_gradient_difference(gradients(two), gradients(one)) <= 5e-6


def test_fsdp_on_one_gpu_with_nccl_equals_the_single_process(pool, config_file):
    options = ("log.gradients_at=[1]", "run.steps=10", CUDA)
    one = train(pool, 1, config_file, "run.name=one", *options)
    sharded = train(pool, 1, config_file, "run.name=sharded", "parallel.strategy=fsdp", "parallel.shard=1", *options)
    assert largest_gradient_difference(gradients(sharded), gradients(one)) <= 5e-6


@pytest.mark.skipif("REHEARSAL_LIBRARY" in os.environ, reason="in a rehearsal attention is that of a CPU, which keeps all scores")
@pytest.mark.parametrize(
    "options", [(), ("precision.compute=bf16", "parallel.activation_checkpointing=full"), ("precision.compute=bf16", "parallel.compile=blocks")]
)
def test_a_gpu_holds_what_is_found_without_one(config_file, options):
    options = (
        "model={family: llama, dim: 1024, layers: 8, heads: 8, kv_heads: 4, ffn_dim: 2816}", "data.sequence_length=1024", *options,
        "batch={micro_sequences: 8, sequences: 16}", "run.steps=3", "schedule.warmup_steps=1", CUDA,
    )  # fmt: skip
    command = [sys.executable, str(ROOT / "pretrain" / "run.py"), "--config", str(config_file), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)  # of its own, for its own peak
    assert done.returncode == 0, done.stderr
    run = config_file.parent / "runs" / "run"
    config, _ = load_config(run / "config.yaml", [])
    assert estimate_memory(config, 1).most == pytest.approx(read_metrics(run)[-1]["memory"]["largest"], rel=0.05)


@pytest.mark.skipif("REHEARSAL_LIBRARY" in os.environ, reason="in a rehearsal attention is that of a CPU, which keeps all scores")
@pytest.mark.parametrize("layout", ["parallel.shard=8", "parallel.tensor=2", "parallel.context=2"])
def test_a_rank_of_many_holds_what_is_found_without_a_gpu(tmp_path, layout):
    keys = ["model={family: llama, dim: 2048, layers: 8, heads: 16, kv_heads: 8, ffn_dim: 5632}", "precision.compute=bf16", "parallel.strategy=fsdp", layout]
    options = ["--length", "4096", "--micro", "4", "--accumulation", "2", "--steps", "1", "--json", str(tmp_path / "rows.jsonl")]
    typed = [sys.executable, str(ROOT / "tools" / "bench.py"), "speed", *options, "--one-rank-of", "8", *keys, CUDA]
    done = subprocess.run(typed, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    note = json.loads((tmp_path / "rows.jsonl").read_text())["note"]
    sizes = ["data.sequence_length=4096", "batch.micro_sequences=4", "batch.sequences=64", "model.vocab_size=257", "run.steps=1", "schedule.warmup_steps=1"]
    found = estimate_memory(load_config(None, [*keys, *sizes])[0], 8).most
    assert found == pytest.approx(1e9 * float(re.search(r"peak ([\d.]+) GB", note)[1]), rel=0.05)


@pytest.mark.parametrize("options", [(), ("parallel.activation_checkpointing=full",)], ids=["", "recomputed"])
def test_activations_on_the_host_change_no_bit_and_leave_room(options):
    peaks, found = [], []
    for offloaded in (False, True):
        network = build_network(complete(Model(family="llama", dim=128, layers=48, heads=4, vocab_size=512), 128)).cuda()
        initialise(network, 0)
        if options:
            recompute_blocks(network)
        if offloaded:
            offload_activations(network)
        tokens = torch.randint(512, (32, 129), generator=torch.Generator().manual_seed(0)).cuda()
        for _ in range(2):
            network.zero_grad()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            network(tokens[:, :-1], tokens[:, 1:]).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before - sum(p.numel() * 4 for p in network.parameters()))
        found.append([p.grad.cpu() for p in network.parameters()])
        del network
        gc.collect()  # a module whose forward is replaced refers to itself
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found))
    assert peaks[1] < 0.7 * peaks[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_keep_their_inputs_and_compute_what_torch_does_with_copies_in_fp32(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(4, 33, 256, generator=generator).to(dtype).cuda() for _ in range(2))
    norm = (RMSNorm if kind == "rms" else LayerNorm)(256, 1e-5).cuda()
    vectors = list(norm.parameters())

    def with_copies(x: torch.Tensor) -> torch.Tensor:
        plain = torch.nn.functional.rms_norm if kind == "rms" else torch.nn.functional.layer_norm
        return plain(x.float(), (256,), *vectors, eps=1e-5).to(dtype)

    def computed(function: Callable) -> tuple[int, list[torch.Tensor]]:
        """The bytes of the largest tensor that waits for backward; what is computed, and its gradients."""
        given, stored = x.detach().requires_grad_(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: stored.append(tensor) or tensor, lambda tensor: tensor):
            y = function(given)
        return max(tensor.nbytes for tensor in stored), [y, *torch.autograd.grad(y, [given, *vectors], g)]

    (kept, ours), (kept_by_torch, theirs) = computed(norm), computed(with_copies)
    assert kept == x.nbytes <= kept_by_torch
    exact = "REHEARSAL_LIBRARY" not in os.environ or kind == "layer"  # a rehearsal has a formula in the place of the kernel
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.mark.parametrize("masked", [False, True])
def test_parts_of_a_ring_are_those_of_matrix_products(masked):
    """torch's operator for CUDA returns the denominator, and its backward takes that of all keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, heads, 36, 16, generator=generator).cuda() for heads in (4, 2, 2, 4))
    seen = (torch.rand(2, 1, 36, 36, generator=generator) < 0.5).cuda() if masked else None
    if masked:
        seen[:, :, 5] = False
    (y, lse), (want_y, want_lse) = (Kernel(fused, 0.3, 0.0).forward(q, k, v, seen, True) for fused in ("cuda", None))
    torch.testing.assert_close((y, lse), (want_y, want_lse), atol=1e-5, rtol=1e-5)
    over_all = torch.logaddexp(lse, torch.ones_like(lse))
    found, wanted = (Kernel(fused, 0.3, 0.0).backward(g, q, k, v, y, over_all, seen, True) for fused in ("cuda", None))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def strict(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run that fails where a step, but the first two, makes the host wait for the GPU. Waits for events are not noticed: DDP has them while it
    times itself, in its first ten steps and in every hundredth.
    """
    from pretrain.train.trainer import Trainer

    taken = Trainer.step

    def step(self, batch, *of_all):
        torch.cuda.set_sync_debug_mode("error" if self.progress.step >= 2 else "default")
        try:
            return taken(self, batch, *of_all)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with patch.object(Trainer, "step", step):
        return run_main(config_file, *overrides)


EXPERTS = ("model.family=qwen3_moe", "model.experts={count: 4, active: 2, ffn_dim: 32}")
FSDP = "parallel.strategy=fsdp"
STEPS = {
    "one": (1,),
    "one, sharded": (1, FSDP, "parallel.shard=1"),
    "one, compiled": (1, "parallel.compile=blocks"),
    "one, documents": (1, "parallel.compile=blocks", "model.dim=64", "data.document_mask=true"),  # FlexAttention
    "one, recorded": (1, "parallel.cuda_graph=true"),
    "one, moments in 8 bit": (1, "precision.moments=8bit"),
    "one, fp8, activations on the host": (1, "precision.fp8=tensorwise", "parallel.activation_offload=true"),
    "one, experts": (1, *EXPERTS),
    "ddp, weights in bf16": (2, "parallel.strategy=ddp", "precision.master=bf16", "precision.gradients=fp32"),
    "one, schedule-free": (1, "optim.name=schedule_free_adamw", "schedule.name=constant"),
    "one, lion": (1, "optim.name=lion"),
    "fsdp, muon": (2, FSDP, "optim.name=muon"),
    "hsdp": (4, FSDP, "parallel.replicate=2", "parallel.shard=2"),
    "tensor": (2, FSDP, "parallel.tensor=2"),
    "ring": (2, FSDP, "parallel.context=2", "parallel.context_method=ring"),
    "pipeline": (2, FSDP, "parallel.pipeline=2", "parallel.pipeline_schedule=zero_bubble"),
    "experts, tensor": (2, FSDP, "parallel.tensor=2", *EXPERTS),
}


@pytest.mark.parametrize("case", STEPS)
def test_no_step_makes_the_host_wait(pool, config_file, case):
    count, *options = STEPS[case]
    if count > GPUS:
        pytest.skip(f"needs {count} GPUs")
    if case == "one, documents" and "REHEARSAL_LIBRARY" in os.environ:
        pytest.skip("in a rehearsal FlexAttention is torch's definition, which waits")
    options = ("precision.compute=bf16", "run.steps=8", "optim.clip=0.5", "batch.micro_sequences=2", CUDA, *options)
    for code, printed in pool.launch(count, strict, str(config_file), *options):
        assert code == 0, printed


RECORDED = {
    "fp32": (),
    "bf16, compiled, documents": (
        "precision.compute=bf16",
        "parallel.compile=blocks",
        "data.document_mask=true",
        "data.boundary_loss=false",
    ),
    "whole model, FlexAttention": (
        "precision.compute=bf16",
        "parallel.compile=model",
        "model.dim=64",
        "data.document_mask=true",
    ),
    "whole model, dropout, two tokens ahead": ("parallel.compile=model", "model.dropout=0.1", "model.attention_dropout=0.1", "model.predict_ahead=2"),
    "ramp, means": ("batch.ramp=[{until_tokens: 3000, sequences: 8}]", "optim.ema_decay=0.9"),
    "weights in bf16": ("precision.compute=bf16", "precision.master=bf16", "precision.gradients=fp32"),
    "dropout, fp8": ("model.dropout=0.1", "precision.compute=bf16", "precision.fp8=tensorwise"),
    "longer sequences": ("batch.lengths=[{until_tokens: 4000, length: 16}]", "batch.micro_sequences=16"),
    "layers watched": ("log.layers_every_steps=4",),
}


@pytest.mark.parametrize("case", RECORDED)
def test_a_recorded_micro_step_computes_the_same(pool, config_file, case):
    if "FlexAttention" in case and "REHEARSAL_LIBRARY" in os.environ:
        pytest.skip("in a rehearsal FlexAttention is torch's definition, which waits")
    options = ("run.steps=12", "log.gradients_at=[12]", "batch.micro_sequences=4", CUDA, *RECORDED[case])
    plain = train(pool, 1, config_file, "run.name=plain", *options)
    recorded = train(pool, 1, config_file, "run.name=recorded", "parallel.cuda_graph=true", *options)
    tolerance = 0 if "REHEARSAL_LIBRARY" in os.environ else 1e-2  # kernels of a GPU may add in any order
    assert largest_relative_difference(losses(recorded), losses(plain)) <= tolerance
    assert largest_gradient_difference(gradients(recorded, 12), gradients(plain, 12)) <= 10 * tolerance
    seen, wanted = ([a for r in read_metrics(run) for a in r.get("activations", {}).values()] for run in (recorded, plain))
    assert seen == pytest.approx(wanted, rel=tolerance) and bool(seen) == (case == "layers watched")


def count_replays(config_file: str, *overrides: str) -> int:
    """How often a run launches a recorded micro-step."""
    count, replay = 0, torch.cuda.CUDAGraph.replay

    def counted(graph):
        nonlocal count
        count += 1
        return replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", counted):
        code, printed = run_main(config_file, *overrides)
    assert code == 0, printed
    return count


@pytest.mark.parametrize("asked, count", [("true", 6 * 4 - 3), ("false", 0)])
def test_all_micro_steps_but_the_first_three_are_launched_at_once(pool, config_file, asked, count):
    options = ("run.steps=6", "batch.micro_sequences=4", f"parallel.cuda_graph={asked}", CUDA)
    assert pool.launch(1, count_replays, str(config_file), *options) == [count]


@pytest.mark.skipif(
    "REHEARSAL_LIBRARY" not in os.environ, reason="a recording that fails leaves a GPU's process unusable for other tests"
)
def test_a_micro_step_that_waits_cannot_be_recorded():
    network = torch.nn.Linear(4, 1, bias=False).cuda()
    network.watch_layer = None

    def compute(inputs, target_tokens):
        loss = network(inputs["x"]).sum() / target_tokens
        loss.backward()
        return Losses(loss[None], loss[None] * loss.item())

    micro_step = RecordedMicroStep(compute, network, torch.device("cuda"))
    for _ in range(3):
        micro_step({"x": torch.ones(2, 4, device="cuda")}, 2)
    with pytest.raises(TrainingError, match=r"this micro-step cannot be recorded \(.+\); set parallel.cuda_graph=false"):
        micro_step({"x": torch.ones(2, 4, device="cuda")}, 2)


@pytest.mark.skipif("REHEARSAL_LIBRARY" in os.environ, reason="in a rehearsal the kernels are a CPU's, which has no TF32")
def test_tf32_makes_products_less_exact(pool, config_file):
    options = ("log.gradients_at=[1]", "run.steps=2", "schedule.warmup_steps=1", CUDA)
    exact = train(pool, 1, config_file, "run.name=exact", *options)
    fast = train(pool, 1, config_file, "run.name=fast", "precision.tf32=true", *options)
    assert 1e-5 < largest_gradient_difference(gradients(fast), gradients(exact)) < 0.05


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "mxfp8"])
def test_products_in_fp8_are_those_of_a_cpu(scaling):
    """A CPU makes them from the same rounded factors (tests/parallel/test_fp8.py)."""
    least = (10, 0) if scaling == "mxfp8" else (8, 9)
    if torch.cuda.get_device_capability() < least:
        pytest.skip(f"{scaling} needs compute capability {least[0]}.{least[1]}")
    if scaling == "rowwise" and not takes_scales_of_rows():
        pytest.skip("torch before 2.13 has no such products on a CPU to compare with")
    draw = torch.Generator().manual_seed(1)
    x, weight, g = (torch.randn(*shape, generator=draw).bfloat16() for shape in ((160, 128), (96, 128), (160, 96)))
    found = {}
    for device in ("cpu", "cuda"):
        x_there, w_there = (t.to(device, copy=True).requires_grad_() for t in (x, weight))
        y = Fp8Product(scaling)(x_there, w_there, None)
        y.backward(g.to(device))
        found[device] = [t.detach().float().cpu() for t in (y, x_there.grad, w_there.grad)]
    for ours, theirs in zip(found["cuda"], found["cpu"]):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3 * float(theirs.abs().max()))


def test_a_nan_of_a_gpu_stays_one_when_weights_are_rounded():
    bad = torch.zeros(4, 4, device="cuda") / 0
    assert round_at_random(bad, torch.full((4, 4), 0xFFFF, dtype=torch.int32, device="cuda")).isnan().all()


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
def test_stages_whose_matrices_are_on_the_host_are_clipped_together(pool, config_file):
    options = (CUDA, "run.steps=4", "optim.clip=0.05", "batch.micro_sequences=2")
    layout = ("parallel.strategy=fsdp", "parallel.pipeline=2", "parallel.offload=true")
    one = train(pool, 1, config_file, "run.name=one", *options)
    four = train(pool, 4, config_file, "run.name=four", *options, *layout)
    assert largest_relative_difference(losses(four), losses(one)) <= 1e-4


def test_a_step_that_is_left_out_leaves_matrices_on_the_host_as_they_are():
    on_host, on_gpu = torch.nn.Parameter(torch.ones(8, 8)), torch.nn.Parameter(torch.ones(8, device="cuda"))
    part = torch.nn.Module()
    part.matrix, part.vector = on_host, on_gpu
    optimizer = OptimizerSet(part, Optim())
    for number in range(1, 4):
        on_host.grad, on_gpu.grad = torch.ones(8, 8), torch.ones(8, device="cuda")
        torch.cuda._sleep(10**8) if not hasattr(torch.cuda, "rehearsed_kernels") else None
        optimizer.clip(0.1)
        optimizer.step(1e-2, torch.zeros((), dtype=torch.bool, device="cuda"), number)
    assert bool((on_host == 1).all()) and bool((on_gpu == 1).all())
    assert all(float(state["step"]) == 0 for state in optimizer.optimizers[0].state.values())


def test_gradients_in_bf16_are_scaled_as_a_cpu_scales_them():
    """Operator by operator, a GPU rounds the factor to bf16 first."""
    values, factor = torch.randn(300, 70).to(torch.bfloat16), torch.tensor(0.3)
    scaled = [values.to(device, copy=True) for device in ("cpu", "cuda")]
    for tensor in scaled:
        _scale([tensor], factor.to(tensor.device))
    assert torch.equal(scaled[1].cpu(), scaled[0]) and not torch.equal(scaled[0], values)


@pytest.mark.parametrize("make, moments", [(AdamW, torch.bfloat16), (AdamW, torch.uint8), (Lion, torch.bfloat16)])
def test_updates_of_weights_in_bf16_are_those_of_a_cpu(make, moments):
    """They are compiled there; a number whose last bit in fp32 differs may be rounded to its neighbour."""
    drawn = torch.Generator().manual_seed(1)
    start, *gradients = (torch.randn(96, 64, generator=drawn).to(torch.bfloat16) for _ in range(4))
    ends = []
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(start.to(device, copy=True))
        eps = [1e-8] if make is AdamW else []
        optimizer = make([{"params": [weight], "weight_decay": 0.1}], 1e-2, (0.9, 0.95), *eps, Formats(moments, {weight: "w"}))
        for optimizer.step_number, gradient in enumerate(gradients, 1):
            weight.grad = gradient.to(device)
            optimizer.step()
        state = optimizer.state[weight]
        ends.append([tensor.detach().cpu().double() for tensor in (weight, *(state[name] for name in make.moments))])
    for on_cpu, on_gpu in zip(*ends):
        assert float((on_cpu != on_gpu).double().mean()) < 0.01
        torch.testing.assert_close(on_gpu, on_cpu, rtol=0.02 if moments == torch.bfloat16 else 0, atol=1e-6 if moments == torch.bfloat16 else 1.0)


def test_all_tensors_of_a_shape_are_updated_by_one_compiled_function():
    """Or two: of four tensors and of one. Their gradients are where they are in a bucket of DDP."""
    torch._dynamo.reset()
    shapes = [(64, 64)] * 9 + [(16, 64)] * 17 + [(224, 64)] * 16 + [(64,)] * 17
    weights = [torch.nn.Parameter(torch.ones(shape, device="cuda", dtype=torch.bfloat16)) for shape in shapes]
    bucket = torch.ones(sum(weight.numel() for weight in weights), device="cuda", dtype=torch.bfloat16)
    for weight, gradient in zip(weights, bucket.split([weight.numel() for weight in weights])):
        weight.grad = gradient.view(weight.shape)
    formats = Formats(torch.bfloat16, {weight: str(number) for number, weight in enumerate(weights)})
    optimizer = AdamW([{"params": weights, "weight_decay": 0.1}], 1e-2, (0.9, 0.95), 1e-8, formats)
    counters["stats"].clear()
    for optimizer.step_number in (1, 2):
        optimizer.step()
    assert counters["stats"]["unique_graphs"] == 2 + 2 + 1 + 2 + 2  # the last two: hashes of matrices and of vectors
    assert all(0.96 < float(weight.detach().float().mean()) < 0.99 for weight in weights)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "options",
    [
        ("optim.name=muon", "parallel.strategy=fsdp"),
        ("precision.compute=bf16", "precision.master=bf16", "precision.gradients=fp32", "parallel.strategy=ddp"),
        ("precision.compute=bf16", "precision.master=bf16", "precision.gradients=fp32", "parallel.strategy=fsdp"),
    ],
)
def test_exchanges_beside_other_work_give_what_one_gpu_has(pool, config_file, options):
    *formats, strategy = options
    one = train(pool, 1, config_file, CUDA, "run.name=one", "run.steps=6", *formats)
    two = train(pool, 2, config_file, CUDA, "run.name=two", "run.steps=6", *formats, strategy)
    assert largest_relative_difference(losses(two), losses(one)) <= (1e-3 if formats[0].startswith("precision") else 1e-4)


@pytest.mark.parametrize("optim", ["optim.ema_decay=0.5", "optim={name: schedule_free_adamw}"])
def test_a_save_in_the_background_has_the_weights_and_not_their_means(pool, config_file, prepared, optim):
    options = (
        CUDA,
        "run.steps=4",
        "schedule.name=constant",
        optim,
        "validation.every_steps=2",
        f"data.validation=[{{path: {prepared}}}]",
    )
    saves = [
        train(
            pool,
            1,
            config_file,
            f"run.name=background-{name}",
            *options,
            f"checkpoint={{every_steps: 2, keep_last: 0, asynchronous: {name}}}",
        )
        for name in ("true", "false")
    ]
    for step in (2, 4):
        one, other = (state_of(run, step) for run in saves)
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items()), step


def test_a_process_is_kept_near_its_gpu(pool, config_file):
    """Refused in one line where the kernel does not say which cores are near, as in some virtual machines."""
    [(code, printed)] = pool.launch(
        1, run_main, str(config_file), CUDA, "run.steps=1", "schedule.warmup_steps=0", "run.affinity=cores"
    )
    assert code == 0 or (code == 2 and "which cores are near GPU" in printed)
