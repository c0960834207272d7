"""What torch's compiler makes is refused where it uses a result of a collective before that has arrived."""

from __future__ import annotations

import pytest

from pretrain.models.compiling import check_waits

LAUNCH = "buf60 = torch.ops._c10d_functional.reduce_scatter_tensor.default(buf59, 'sum', 2, '0')"
WAIT = "torch.ops._c10d_functional.wait_tensor.default(buf60)"


def code(*lines: str) -> str:
    return "\n".join(["class Runner:", "    def call(self, args):", *(f"        {line}" for line in lines), "        return (buf1, )"])


@pytest.mark.parametrize(
    "lines",
    [
        (LAUNCH, "assert_size_stride(buf60, (4, 24), (24, 1), 'x')", "del buf58", WAIT, "cpp_fused_add_6(buf66, buf60)"),
        (LAUNCH, "cpp_fused_mul_1(buf5, buf600)", WAIT, "del buf60"),
        (LAUNCH, "buf61 = reinterpret_tensor(buf60, (96, 4), (4, 1), 0); del buf60  # reuse", "torch.ops._c10d_functional.wait_tensor.default(buf61)",
         "extern_kernels.mm(buf61, primals_1, out=buf62)"),
        ("torch.ops._c10d_functional.all_reduce_.default(buf3, 'sum', '0')", "cpp_fused_1(buf4)", "torch.ops._c10d_functional.wait_tensor.default(buf3)",
         "cpp_fused_2(buf3)"),
    ],
)  # fmt: skip
def test_code_that_waits_is_taken(lines):
    check_waits(code(*lines))


@pytest.mark.parametrize(
    "lines, kind",
    [
        ((LAUNCH, "cpp_fused__softmax_6(buf66, buf60, buf63)", WAIT), "reduce_scatter_tensor"),
        ((LAUNCH, "buf61 = buf60; del buf60  # reuse", "extern_kernels.mm(reinterpret_tensor(buf61, (96, 4), (4, 1), 0), primals_13, out=buf68)"), "reduce_scatter_tensor"),
        ((LAUNCH, "buf62 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf60, 2, '0')"), "reduce_scatter_tensor"),
        (("torch.ops._c10d_functional.all_reduce_.default(buf3, 'sum', '0')", "triton_poi_fused_0.run(buf3, 96, stream=stream0)"), "all_reduce_"),
        (("buf1 = torch.ops._c10d_functional.all_reduce.default(buf3, 'sum', '0')",), "all_reduce"),
    ],
)  # fmt: skip
def test_code_that_does_not_wait_is_refused(lines, kind):
    with pytest.raises(RuntimeError, match=f"would use the result of {kind} before that has arrived"):
        check_waits(code(*lines))
