"""The fused loss is the plain loss: same values, same gradients, for any option, upstream gradient and pattern of ignored targets."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pretrain.conventions import IGNORED
from pretrain.models import loss_chunks, output_head
from pretrain.models.loss import CROSS_ENTROPY, LossOptions, finish_logits, sequence_losses
from pretrain.models.output_head import OutputHead, fused_losses_and_entropy

EVERYTHING = LossOptions(z_loss=1e-2, label_smoothing=0.1, soft_cap=5.0, logit_scale=0.7, chunk_bytes=1 << 12)


class MatrixProducts(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return function(*args, **(kwargs or {}))


def problem(
    batch: int = 3, length: int = 7, vocabulary: int = 37, dim: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, weight and targets, one in five of which is ignored."""
    generator = torch.Generator().manual_seed(seed)
    x_BTD = torch.randn(batch, length, dim, generator=generator, dtype=torch.float64)
    weight_VD = torch.randn(vocabulary, dim, generator=generator, dtype=torch.float64)
    targets_BT = torch.randint(vocabulary, (batch, length), generator=generator)
    targets_BT[torch.rand(batch, length, generator=generator) < 0.2] = IGNORED
    return x_BTD.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_(), targets_BT


def fused_losses(*arguments) -> Tensor:
    return fused_losses_and_entropy(*arguments).objective_B


def reference(x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, options: LossOptions) -> Tensor:
    """The definitions, by torch's cross_entropy on all the logits."""
    logits = options.logit_scale * (x_BTD @ weight_VD.T)
    if options.soft_cap is not None:
        logits = options.soft_cap * torch.tanh(logits / options.soft_cap)
    losses = F.cross_entropy(
        logits.transpose(1, 2), targets_BT, ignore_index=IGNORED, label_smoothing=options.label_smoothing, reduction="none"
    )
    counted = targets_BT != IGNORED
    return (losses + options.z_loss * torch.logsumexp(logits, dim=-1) ** 2 * counted).sum(dim=1)


def relative_difference(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm().clamp_min(1e-300))


shapes = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(2, 70), st.integers(1, 9))
options = st.builds(
    LossOptions,
    z_loss=st.sampled_from([0.0, 1e-4, 0.1]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    soft_cap=st.sampled_from([None, 1.0, 30.0]),
    logit_scale=st.sampled_from([1.0, 0.3, 8.0]),
    chunk_bytes=st.sampled_from([None, 1, 1000, 5000]),
    compiled=st.booleans(),
)


@pytest.fixture(autouse=True)
def uncompiled(request, monkeypatch):
    """What would be compiled runs as it is written: compiling takes seconds for each set of options."""
    if not request.node.get_closest_marker("slow"):
        for module in (loss_chunks, output_head):
            monkeypatch.setattr(module, "compiled_once", lambda function: function)


IGNORED_PATTERNS = ["none", "some", "a sequence", "all"]


def ignore(targets: Tensor, pattern: str) -> None:
    if pattern == "none":
        targets[targets == IGNORED] = 0
    elif pattern == "a sequence":
        targets[0] = IGNORED
    elif pattern == "all":
        targets[:] = IGNORED


@settings(max_examples=150, deadline=None)
@given(
    shapes, options, st.integers(0, 10**6), st.sampled_from(IGNORED_PATTERNS), st.booleans(), st.booleans(), st.sampled_from([1, 700, 1 << 20])
)
def test_fused_losses_and_gradients_are_those_of_cross_entropy(shape, options, seed, ignored, one_upstream, weighted, cache):
    x, weight, targets = problem(*shape, seed=seed)
    ignore(targets, ignored)
    batch = shape[0]
    weights = torch.linspace(0.5, 2, batch, dtype=torch.float64) if weighted else None
    upstream = torch.tensor(0.37).double().expand(batch) if one_upstream else torch.linspace(-1, 1.5, batch).double()
    expected = reference(x, weight, targets, options) * (1 if weights is None else weights)
    with patch.object(loss_chunks, "CPU_CACHE_BYTES", cache):
        losses = fused_losses(x, weight, targets, options, weights)
        gradients = torch.autograd.grad(losses, (x, weight), upstream)
    pairs = [(losses, expected), *zip(gradients, torch.autograd.grad(expected, (x, weight), upstream))]
    for found, right in pairs:  # activations and weights are of size 1, so a gradient below that is a difference of such
        assert float((found - right).detach().norm()) <= 1e-12 * max(1.0, float(right.detach().norm()))
        assert ignored != "all" or not found.any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [LossOptions(chunk_bytes=6000), dataclasses.replace(EVERYTHING, chunk_bytes=6000)])
def test_the_compiled_loss_is_the_loss_in_chunks_of_unequal_size(options, dtype):
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    x, weight, targets = problem(3, 7, 37, 8, dtype)
    found = []
    for compiled in (False, True):
        losses = fused_losses(x, weight, targets, dataclasses.replace(options, compiled=compiled))
        found.append((losses, *torch.autograd.grad(losses.sum(), (x, weight))))
    assert all(relative_difference(one, other) < tolerance for one, other in zip(*found))


@pytest.mark.parametrize("ignored", IGNORED_PATTERNS[:3])
@pytest.mark.parametrize("one_upstream", [True, False])
@pytest.mark.parametrize(
    "changed", [{}, {"z_loss": 1e-4}, {"label_smoothing": 0.1}, {"soft_cap": 30.0}, {"logit_scale": 0.25}, {"compiled": True}]
)
def test_in_fp32_losses_and_gradients_are_those_of_cross_entropy(changed, one_upstream, ignored):
    """At the size that logits have in training, in 13 chunks; a random pattern of targets."""
    x, weight, targets = problem(4, 100, 1009, 64, torch.float32)
    weight = (weight.detach() / 8).requires_grad_()
    ignore(targets, ignored)
    options = LossOptions(**changed, chunk_bytes=32 * 1009 * 8)
    upstream = torch.tensor(0.37).expand(4) if one_upstream else torch.tensor([0.3, 1.0, 0.1, 2.0])
    losses = fused_losses(x, weight, targets, options)
    found = losses, *torch.autograd.grad(losses, (x, weight), upstream)
    assert losses.dtype == torch.float32
    for dtype in (torch.float64, torch.float32):
        if dtype == torch.float32 and options.label_smoothing:
            continue  # torch's own gradient is 3e-6 from the exact one here
        plain_x, plain_weight = (value.detach().to(dtype).requires_grad_() for value in (x, weight))
        plain = reference(plain_x, plain_weight, targets, options)
        right = plain, *torch.autograd.grad(plain, (plain_x, plain_weight), upstream.to(dtype))
        assert max(map(relative_difference, found, right)) <= 1e-6


@settings(max_examples=50, deadline=None)
@given(shapes, options, st.integers(0, 10**6))
def test_plain_and_fused_losses_agree_on_the_logits_of_the_head(shape, options, seed):
    x, weight, targets = problem(*shape, seed=seed)
    plain = sequence_losses(finish_logits(x @ weight.T, options), targets, options)
    for other in (fused_losses(x, weight, targets, options), reference(x, weight, targets, options)):
        assert float((plain - other).detach().norm()) <= 1e-12 * max(1.0, float(plain.detach().norm()))


@pytest.mark.parametrize("options", [LossOptions(chunk_bytes=2000), EVERYTHING], ids=["plain", "everything"])
def test_gradients_are_those_of_finite_differences(options):
    x, weight, targets = problem(2, 3, 11, 4)
    assert torch.autograd.gradcheck(lambda x, w: fused_losses(x, w, targets, options), (x, weight))
    summed = lambda x, w: fused_losses(x, w, targets, options).sum() * 0.3  # noqa: E731
    # The check goes backward twice, and the second time the factor is applied before the products, not after.
    assert torch.autograd.gradcheck(summed, (x, weight), nondet_tol=1e-13)


@pytest.mark.parametrize("weighted", [False, True])
def test_one_upstream_gradient_takes_three_products_a_chunk_and_several_take_six(weighted):
    x, weight, targets = problem(4, 8)
    weights = torch.tensor([1.0, 1.0, 0.1, 0.1]) if weighted else None
    rows = 8
    options = LossOptions(chunk_bytes=rows * len(weight) * 16)
    for upstream, expected in ((lambda losses: losses.sum() * 0.01, 12), (lambda losses: (losses * torch.arange(4)).sum(), 24)):
        with MatrixProducts() as products:
            upstream(fused_losses(x, weight, targets, options, weights)).backward()
        assert products.count == expected


def test_without_gradients_only_the_logits_are_computed():
    x, weight, targets = problem(4, 8)
    with MatrixProducts() as products, torch.no_grad():
        losses = fused_losses(x, weight, targets)
    assert products.count == 1 and not losses.requires_grad
    frozen = weight.detach()
    with MatrixProducts() as products:
        fused_losses(x, frozen, targets).sum().backward()
    assert products.count == 2


def test_a_loss_without_values_has_the_shapes_of_its_gradients():
    x, weight = torch.empty(2, 8, 16, dtype=torch.bfloat16, device="meta"), torch.empty(300, 16, device="meta")
    targets = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    fused_losses(x.requires_grad_(), weight.requires_grad_(), targets).sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape


def test_losses_and_gradients_count_three_times_the_operations_of_the_projection():
    x, weight, targets = problem(4, 8)
    with FlopCounterMode(display=False) as counter:
        fused_losses(x, weight, targets, LossOptions(chunk_bytes=9000)).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * x.numel() * len(weight)


def test_a_second_backward_gives_the_same_gradients_again():
    x, weight, targets = problem()
    losses = fused_losses(x, weight, targets, EVERYTHING)
    first = torch.autograd.grad(losses.sum(), (x, weight), retain_graph=True)
    second = torch.autograd.grad(losses.sum(), (x, weight), retain_graph=True)
    assert all(relative_difference(*pair) <= 1e-14 for pair in zip(second, first))


def test_bf16_is_as_exact_in_many_chunks_as_the_plain_loss_is_in_one_product():
    x, weight, targets = problem(4, 128, 300, 64, torch.bfloat16)
    wide_x, wide_weight = (value.detach().double().requires_grad_() for value in (x, weight))
    exact = torch.autograd.grad(reference(wide_x, wide_weight, targets, LossOptions()).sum() * 0.37, (wide_x, wide_weight))
    plain = torch.autograd.grad(sequence_losses(x @ weight.T, targets).sum() * 0.37, (x, weight))
    for chunk_bytes in (None, 1, 16_000):
        losses = fused_losses(x, weight, targets, LossOptions(chunk_bytes=chunk_bytes))
        fused = torch.autograd.grad(losses.sum() * 0.37, (x, weight))
        assert losses.dtype == torch.float32
        assert relative_difference(losses, sequence_losses(x @ weight.T, targets)) <= 1e-5
        for found, usual, right in zip(fused, plain, exact):
            assert found.dtype == torch.bfloat16
            assert relative_difference(found, right) <= 1.02 * relative_difference(usual, right)


def test_bf16_scales_gradients_by_the_whole_factor():
    """1/3 is 0.2% off in bf16, in every value alike."""
    x, weight, targets = problem(4, 64, 300, 64, torch.bfloat16)
    unscaled = torch.autograd.grad(fused_losses(x, weight, targets).sum(), (x, weight))
    scaled = torch.autograd.grad(fused_losses(x, weight, targets).sum() / 3, (x, weight))
    for whole, third in zip(unscaled, scaled):
        ratio = (third.double() * whole.double()).sum() / whole.double().square().sum()
        assert abs(float(ratio) * 3 - 1) < 2e-4


def test_logits_far_apart_neither_overflow_nor_lose_the_loss():
    x, weight = torch.tensor([[[1.0]]], requires_grad=True), torch.tensor([[2000.0], [-2000.0], [0.0]])
    losses = fused_losses(x, weight, torch.tensor([[1]]))
    losses.sum().backward()
    assert losses.item() == 4000.0 and x.grad.item() == 4000.0


def test_no_tokens_have_no_loss():
    for shape in ((0, 4), (3, 0)):
        x, weight = torch.zeros(*shape, 8, requires_grad=True), torch.zeros(5, 8, requires_grad=True)
        losses = fused_losses(x, weight, torch.zeros(shape, dtype=torch.int64))
        losses.sum().backward()
        assert losses.shape == shape[:1] and not losses.any() and not weight.grad.any()


@pytest.mark.parametrize("target", [37, -1, -101])
def test_a_target_outside_of_the_vocabulary_is_refused(target):
    x, weight, targets = problem()
    targets[1, 2] = target
    with pytest.raises((IndexError, RuntimeError), match="out of (bounds|range)"):
        fused_losses(x, weight, targets)


def test_shapes_that_do_not_fit_are_refused():
    x, weight, targets = problem()
    with pytest.raises(ValueError, match="activations are"):
        fused_losses(x, weight, targets[:, :-1])


def test_a_weight_is_cast_to_the_format_of_the_activations_and_its_gradient_is_not_rounded():
    x, weight, targets = problem()
    x, weight = x.detach().bfloat16(), weight.detach().float().requires_grad_()
    rounded = weight.detach().bfloat16().requires_grad_()
    rounded.grad_dtype = torch.float32  # as under FSDP2, which gathers the weight in bf16
    options = LossOptions(chunk_bytes=1 << 10)  # several products are added up
    losses, others = (fused_losses(x, w, targets, options) for w in (weight, rounded))
    losses.sum().backward()
    others.sum().backward()
    assert torch.equal(losses, others) and torch.equal(weight.grad, rounded.grad)
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


# ---- the head -----------------------------------------------------------------------------------------------------------


def head(options: LossOptions = CROSS_ENTROPY, tied: bool = False) -> OutputHead:
    built = OutputHead(8, 37, options, tied)
    for parameter in built.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return built


def test_the_loss_of_a_head_is_the_plain_loss_of_its_logits():
    x, _, targets = problem(dtype=torch.float32)
    built = head(EVERYTHING)
    assert dict(built.named_parameters()).keys() == {"weight"}
    assert relative_difference(built(x, targets), sequence_losses(built(x), targets, EVERYTHING)) <= 1e-6
    assert built(x.bfloat16()).dtype == torch.bfloat16 and built(x.bfloat16(), targets).dtype == torch.float32


def test_evaluation_reports_the_cross_entropy_alone():
    x, _, targets = problem(dtype=torch.float32)
    built = head(EVERYTHING)
    trained = built(x, targets)
    with torch.no_grad():
        evaluated = built(x, targets)
    model_only = dataclasses.replace(EVERYTHING, z_loss=0.0, label_smoothing=0.0)
    assert relative_difference(evaluated, reference(x, built.weight, targets, model_only)) <= 1e-6
    assert relative_difference(trained, evaluated) > 1e-2


def test_a_tied_head_adds_its_gradient_to_that_of_the_embedding():
    embedding = nn.Embedding(37, 8)
    tokens, targets = torch.randint(37, (3, 7)), problem()[2]
    built = head(tied=True)
    assert not list(built.parameters())

    def gradient(losses: Tensor) -> Tensor:
        return torch.autograd.grad(losses.sum(), embedding.weight)[0]

    fused = gradient(built(embedding(tokens), targets, embedding.weight))
    plain = gradient(sequence_losses(embedding(tokens) @ embedding.weight.T, targets))
    assert relative_difference(fused, plain) <= 1e-6


def test_a_tied_head_needs_a_weight_and_another_takes_none():
    x, weight, _ = problem(dtype=torch.float32)
    for built, surplus in ((head(tied=True), None), (head(), weight)):
        with pytest.raises(ValueError, match="tied"):
            built(x, None, surplus)


def test_recomputation_around_the_head_changes_nothing():
    x, _, targets = problem(dtype=torch.float32)
    built = head(EVERYTHING)
    plain = torch.autograd.grad(built(x, targets).sum(), (x, built.weight))
    recomputed = torch.autograd.grad(checkpoint(built, x, targets, use_reentrant=False).sum(), (x, built.weight))
    assert all(torch.equal(*pair) for pair in zip(recomputed, plain))


@pytest.mark.parametrize("whole", [False, True])
def test_compilation_around_the_head_changes_nothing(whole):
    x, _, targets = problem(dtype=torch.float32)
    torch._dynamo.reset()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.output = nn.Linear(8, 8), head()

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return self.output(self.block(x), targets)

    model = Model()
    plain = torch.autograd.grad(model(x, targets).sum(), list(model.parameters()))
    (model if whole else model.block).compile(backend="aot_eager")
    compiled = torch.autograd.grad(model(x, targets).sum(), list(model.parameters()))
    assert all(relative_difference(*pair) <= 1e-6 for pair in zip(compiled, plain))


# ---- two ranks ----------------------------------------------------------------------------------------------------------


def gradients_of_a_rank(strategy: str, dtype: str, sequences: int = 4) -> tuple[dict[str, Tensor], int]:
    """Gradients of the summed loss of some sequences, and how many products of matrices the head has made here."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    compute = getattr(torch, dtype)
    x, _, targets = problem(4, 8, dtype=compute)
    built = head(LossOptions(chunk_bytes=4000))
    called, rank, size = built, 0, 1
    if strategy != "single":
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
    if strategy == "ddp":
        called = DistributedDataParallel(built)
    elif strategy == "ddp, unused":
        called = DistributedDataParallel(built, find_unused_parameters=True)
    elif strategy == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(built, mp_policy=policy)
        built.set_gradient_divide_factor(1.0)
        built.set_force_sum_reduction_for_comms(True)
    here = slice(rank * sequences // size, (rank + 1) * sequences // size)
    with MatrixProducts() as products:
        losses = called(x[here].detach().requires_grad_(), targets[here])
        (losses.sum() * (size if "ddp" in strategy else 1.0)).backward()
    gradient = built.weight.grad
    return {"weight": gradient.full_tensor() if strategy == "fsdp" else gradient}, products.count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["ddp", "ddp, unused", "fsdp"])
def test_two_ranks_take_the_fast_path_and_have_the_gradients_of_one(pool, strategy, dtype):
    [(single, _)] = pool.launch(1, gradients_of_a_rank, "single", dtype)
    [(_, products)] = pool.launch(1, gradients_of_a_rank, "single", dtype, 2)  # which takes the fast path: see above
    for gradients, count in pool.launch(2, gradients_of_a_rank, strategy, dtype):
        assert relative_difference(gradients["weight"], single["weight"]) <= (1e-6 if dtype == "float32" else 4e-3)
        assert count == products


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("formats", ["fp32 fp32 bf16", "fp32 bf16 bf16", "fp32 bf16 fp32", "fp64 fp32 fp32"])
def test_each_gradient_is_rounded_to_its_own_format_alone(formats, frozen, compiled):
    """`formats`: of the activations, the weight and the weight's gradient."""
    of_x, of_weight, of_gradient = ({"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[name] for name in formats.split())
    drawn = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, 8, generator=drawn), torch.randn(33, 8, generator=drawn)
    x, weight, targets = x.to(of_x).requires_grad_(), weight.to(of_weight), torch.randint(33, (2, 5), generator=drawn)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    (F.cross_entropy((exact[0] @ exact[1].T).flatten(0, 1), targets.flatten(), reduction="sum") * 0.3).backward()
    weight = torch.nn.Parameter(weight, requires_grad=not frozen)
    weight.grad_dtype = of_gradient
    (fused_losses(x, weight, targets, LossOptions(compiled=compiled)).sum() * 0.3).backward()
    nearest = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8}
    assert float((x.grad - exact[0].grad).norm() / exact[0].grad.norm()) < nearest[of_x]
    if frozen:
        assert weight.grad is None
    else:
        assert weight.grad.dtype == of_gradient
        assert float((weight.grad - exact[1].grad).norm() / exact[1].grad.norm()) < nearest[of_gradient]
