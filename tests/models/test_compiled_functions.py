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
from pretrain.models.layers import _Copy, _LookUp
from pretrain.models.recurrences import _InverseOfLower
from pretrain.parallel.collectives import _AllToAll, _Gather, _Scatter, _Total
from pretrain.parallel.fp8 import _Product
from pretrain.parallel.tensor_modules import Shared

WIDE, NARROW = torch.float32, torch.bfloat16
IDS, ORDER = torch.tensor([[0, 3], [2, 2]]), torch.tensor([2, 0, 1, 3])
COPY = torch.ones(4, 3, dtype=NARROW)
CASES = {
    "rows in fp32": (lambda table, _: _LookUp.apply(table, IDS, WIDE), [((4, 3), WIDE)]),
    "rows in bf16": (lambda table, _: _LookUp.apply(table, IDS, NARROW), [((4, 3), NARROW)]),
    "rows of fp32 in bf16": (lambda table, _: _LookUp.apply(table, IDS, NARROW), [((4, 3), WIDE)]),
    "a copy in bf16": (lambda stored, _: _Copy.apply(stored, COPY), [((4, 3), WIDE)]),
    "choices": (lambda x, _: _GatherChoices.apply(x, ORDER, ORDER.argsort(), 1), [((4, 3), WIDE)]),
    "permutation": (lambda x, _: _Permute.apply(x, ORDER, ORDER.argsort()), [((4, 3), WIDE)]),
    "gather": (lambda x, group: _Gather.apply(x, group), [((2, 4, 3), WIDE)]),
    "scatter": (lambda x, group: _Scatter.apply(x, group), [((2, 4, 3), WIDE)]),
    "all to all": (lambda x, group: _AllToAll.apply(x, group), [((1, 4, 3), WIDE)]),
    "inverse": (lambda x, _: _InverseOfLower.apply(x), [((2, 4, 4), WIDE)]),
    "total": (lambda x, group: _Total.apply(x, group), [((2, 4, 3), WIDE)]),
    "shared": (lambda x, _: Shared.apply(x, 2), [((2, 4, 3), WIDE)]),
    "fp8": (lambda x, weight, _: _Product.apply(x, weight, "tensorwise"), [((16, 32), NARROW), ((16, 32), WIDE)]),
}


NOT_TRACED = {
    "_RMSNorm": "takes another way where it is compiled",
    "_RMSNormByKernel": "takes another way where it is compiled",
    "_LayerNorm": "takes another way where it is compiled",
    "_GeluFromTables": "takes another way where it is compiled",
    "_Turn": "takes another way where it is compiled",
    "_ComputedAgain": "takes another way where it is compiled",
    "_FusedLosses": "left out by torch.compiler.disable",
    "_Exchange": "left out by torch.compiler.disable",
    "LookUpPart": "the embedding is no block, and tensor-parallel models are not compiled as a whole",
    "_Ring": "refused with parallel.compile",
    "_Project": "of pipelines that are refused with parallel.compile",
    "_MultiplyRows": "of pipelines that are refused with parallel.compile",
}


def test_no_function_is_forgotten():
    files = (Path(__file__).resolve().parents[2] / "pretrain").rglob("*.py")
    found = {name for file in files for name in re.findall(r"class (\w+)\(torch\.autograd\.Function\)", file.read_text())}
    compiled = {kind.__name__ for kind in (_Copy, _LookUp, _GatherChoices, _Permute, _Gather, _Scatter, _Total, _AllToAll, _InverseOfLower, Shared, _Product)}
    assert found == compiled | NOT_TRACED.keys()


@pytest.fixture(scope="module")
def group():
    """A process group of one rank."""
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
