"""What torch.compile makes of our functions for an H100, compiled to machine code on a host without a GPU. It needs Triton, and Inductor's internals.

    python gpu_kernels.py        a line per kernel; exit code 1 if one does not compile
"""

# ruff: noqa: E402
from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132, uuid="0", warp_size=32,
    L2_cache_size=50 << 20, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, gcnArchName="",
    clock_rate=1980000, memory_clock_rate=2619000, memory_bus_width=5120,
)  # fmt: skip
# What is imported next takes these functions as they are.
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda device=None: H100
torch.cuda.get_device_capability = lambda device=None: (9, 0)

import torch._inductor.codegen.triton as triton_codegen
import torch._inductor.compile_fx
import torch._inductor.scheduler as scheduler
import torch.utils._triton as support
import triton
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

TARGET = GPUTarget("cuda", 90, 32)
SIGNATURE = re.compile(r"'signature': (\{.*?\})", re.DOTALL)
HEAD = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


class Lowered(Exception):
    """The kernels are compiled; nothing can run."""


def pretend() -> None:
    torch._inductor.config.joint_graph_constant_folding = False
    torch._inductor.compile_fx._check_triton_bf16_support = lambda graph: None
    scheduler.has_triton = lambda: True
    for module in (support, triton_codegen):
        for name in ("has_triton_stable_tma_api", "has_triton_tma_device", "has_triton_tensor_descriptor_host_tma"):
            setattr(module, name, lambda: False)
    functions = {"get_current_target": lambda: TARGET, "get_current_device": lambda: 0, "get_active_torch_device": lambda: torch.device("cuda", 0)}
    driver.set_active(SimpleNamespace(**functions))


def kernels_of(graph: GraphLowering) -> dict[str, str]:
    """Triton's code by name."""
    code = graph.codegen()[0]
    return dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", getattr(code, "value", code), re.DOTALL))


def compiled(name: str, source: str, folder: str) -> str:
    """What is wrong with a kernel, or an empty text."""
    signature = eval(SIGNATURE.search(source).group(1))
    path = Path(folder) / f"{len(os.listdir(folder))}_{name[:80]}.py"  # Python may take code of another kernel that had this name a moment ago
    path.write_text(HEAD + source[source.index("@triton.jit") :])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reduces = "R0_BLOCK" in signature
    sizes = {n: (1 if reduces else 1024) if n == "XBLOCK" else 2048 for n, kind in signature.items() if kind == "constexpr"}
    try:
        source = ASTSource(fn=getattr(module, name), signature=signature, constexprs=sizes)
        triton.compile(source, target=TARGET, options={"num_warps": 8})
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[-1]}"
    return ""


def check(what: str, function: Any, *arguments: Any, dynamic: bool = False, most: int = 100) -> int:
    """Compile a function as it is compiled for a GPU; the number of kernels that fail. `most`: arguments that a kernel may have."""
    failed = []

    def lower(graph: GraphLowering) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, source in kernels_of(graph).items():
                problem = compiled(name, source, folder)
                if (count := len(eval(SIGNATURE.search(source).group(1)))) > most:
                    problem = f"it has {count} arguments, so that several tensors were put together"
                failed.extend([name] if problem else [])
                print(f"{what}: {name}: {problem or 'compiles'}", flush=True)
        raise Lowered

    torch._dynamo.reset()
    GraphLowering.compile_to_module = lower
    try:
        torch.compile(function, dynamic=dynamic, fullgraph=True)(*arguments)
    except Exception as error:
        if "Lowered" not in str(type(error)) + str(error) + str(type(error.__cause__)):
            raise
    return len(failed)


def main() -> int:
    from pretrain.models.loss_chunks import chunk_losses, overwrite_with_gradient, scale_in_place, times_in
    from pretrain.optim.adamw import AT_ONCE, _update_alike
    from pretrain.optim.optimizer import _scale_widened
    from pretrain.optim.rounding import hash_places

    pretend()
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with mode:
            return torch.empty(shape, device="cuda", dtype=dtype)

    def update(shape: tuple[int, int], moments: torch.dtype) -> tuple:
        weight, means = ([tensor(*shape, dtype=dtype) for _ in "ab"] for dtype in (torch.bfloat16, moments))
        return (*weight, *means, tensor(), tensor())

    failed = 0
    for moments in (torch.bfloat16, torch.uint8):
        for shape in ((1024, 512), (1, 512), (512, 1)):  # where a side is 1, places are numbers of 32 bits
            updates, numbers = zip(*((update(shape, moments), [tensor() for _ in range(6)]) for _ in range(AT_ONCE)))
            hashes = tensor(3 * AT_ONCE, shape[0], 1, dtype=torch.int32), tensor(3 * AT_ONCE, shape[1], dtype=torch.int32)
            failed += check(f"updates of {shape}, moments in {moments}", _update_alike, updates, hashes, numbers, tensor(), most=25)
    for shape in ((1024, 512), (1, 512), (512, 1), (8, 512, 256)):
        failed += check(f"hashes of {shape}", hash_places, shape, (0,) * len(shape), tensor(6, dtype=torch.int64), dynamic=True)
    failed += check("scaled gradient", _scale_widened, tensor(1024, 512, dtype=torch.bfloat16), tensor(), dynamic=True)
    logits, targets = tensor(4096, 128256, dtype=torch.bfloat16), tensor(4096, dtype=torch.int64)
    failed += check("losses", chunk_losses, logits, targets, 0.0, 0.0, 1.0, None)
    failed += check("gradient of losses", overwrite_with_gradient, logits, targets, tensor(4096), 0.0, 0.0, 1.0, None)
    failed += check("the head's gradient in bf16", times_in, tensor(128256, 4096), tensor(1), torch.bfloat16)
    failed += check("the activations' gradient", scale_in_place, tensor(8192, 4096, dtype=torch.bfloat16), tensor(1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
