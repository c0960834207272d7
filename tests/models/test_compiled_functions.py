"""Our autograd Functions have the same gradients where a compiler has traced them. torch 2.11's loses that of a result that was changed in place, or is
cast to the format that it has (pytorch issue 180642): compiled as a whole, a model did not learn its embedding, and said nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pretrain.models.experts import _GatherChoices, _Permute
from pretrain.models.layers import _LookUp, _RMSNorm
from pretrain.parallel.collectives import _Gather, _Scatter, _Total
from pretrain.parallel.expert import _Exchange
from pretrain.parallel.fp8 import _Product
from pretrain.parallel.tensor_modules import Shared

WIDE, NARROW = torch.float32, torch.bfloat16
IDS, ORDER = torch.tensor([[0, 3], [2, 2]]), torch.tensor([2, 0, 1, 3])
CASES = {
    "rows in fp32": (lambda table, _: _LookUp.apply(table, IDS, WIDE), [((4, 3), WIDE)]),
    "rows in bf16": (lambda table, _: _LookUp.apply(table, IDS, NARROW), [((4, 3), NARROW)]),
    "rows of fp32 in bf16": (lambda table, _: _LookUp.apply(table, IDS, NARROW), [((4, 3), WIDE)]),
    "norm in fp32": (lambda x, gain, _: _RMSNorm.apply(x, gain, 1e-5), [((2, 4, 8), WIDE), ((8,), WIDE)]),
    "norm in bf16": (lambda x, gain, _: _RMSNorm.apply(x, gain, 1e-5), [((2, 4, 8), NARROW), ((8,), WIDE)]),
    "choices": (lambda x, _: _GatherChoices.apply(x, ORDER, ORDER.argsort(), 1), [((4, 3), WIDE)]),
    "permutation": (lambda x, _: _Permute.apply(x, ORDER, ORDER.argsort()), [((4, 3), WIDE)]),
    "gather": (lambda x, group: _Gather.apply(x, group), [((2, 4, 3), WIDE)]),
    "scatter": (lambda x, group: _Scatter.apply(x, group), [((2, 4, 3), WIDE)]),
    "total": (lambda x, group: _Total.apply(x, group), [((2, 4, 3), WIDE)]),
    "shared": (lambda x, _: Shared.apply(x, 2), [((2, 4, 3), WIDE)]),
    "fp8": (lambda x, weight, _: _Product.apply(x, weight, "tensorwise"), [((16, 32), NARROW), ((16, 32), WIDE)]),
    "exchange": (lambda x, group: _Exchange.apply(x, [4], [4], group), [((4, 3), WIDE)]),
}


IN_LAYOUTS = {"LookUpPart", "_Ring", "_Project", "_MultiplyRows"}
"""They need several ranks: tests of layouts compile them."""
NOT_TRACED = {"_FusedLosses"}


def test_no_function_is_forgotten():
    files = (Path(__file__).resolve().parents[2] / "pretrain").rglob("*.py")
    found = {name for file in files for name in re.findall(r"class (\w+)\(torch\.autograd\.Function\)", file.read_text())}
    compiled = {_LookUp, _RMSNorm, _GatherChoices, _Permute, _Gather, _Scatter, _Total, Shared, _Product, _Exchange}
    assert found == {kind.__name__ for kind in compiled} | IN_LAYOUTS | NOT_TRACED


@pytest.fixture(scope="module")
def group():
    """Of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_function_has_the_gradients_of_the_plain_one(group, case):
    torch._dynamo.reset()
    function, inputs = CASES[case]
    drawn = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=drawn).to(dtype) for shape, dtype in inputs]
    found = []
    for run in (function, torch.compile(lambda *arguments: function(*arguments) * 2, backend="aot_eager")):
        leaves = [value.clone().requires_grad_() for value in values]
        result = run(*leaves, group)
        (result.float() * torch.arange(result.numel()).view(result.shape)).sum().backward()
        found.append([leaf.grad.float() for leaf in leaves])
    for plain, compiled in zip(*found):
        assert plain.norm() > 0
        torch.testing.assert_close(compiled, 2 * plain)
