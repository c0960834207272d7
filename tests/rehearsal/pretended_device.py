"""The Python side of the pretended device: torch.cuda as on a host with GPUs. Kernels that only a GPU has are computed by other means."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import types

NAME = "NVIDIA H200"
_library: ctypes.CDLL | None = None


def load_library() -> None:
    """Before torch is imported: it looks for hooks of CUDA once."""
    global _library
    _library = ctypes.CDLL(os.environ["REHEARSAL_LIBRARY"], ctypes.RTLD_GLOBAL)
    for name in ("allocated", "peak"):
        getattr(_library, f"rehearsal_{name}").restype = ctypes.c_int64


def pretend() -> None:
    """After torch is imported: let it say that there are GPUs."""
    import torch

    _describe(torch)
    _streams(torch)
    _memory(torch)
    _storages(torch)
    _kernels(torch)
    _compiler(torch)
    _graphs(torch)
    _nccl(torch)


def _index(torch, device=None) -> int:
    if device is None:
        return _library.rehearsal_device()
    return device if isinstance(device, int) else torch.device(device).index or 0


def _set_device(torch, device) -> None:
    if not isinstance(device, int) and torch.device(device).index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")  # as torch.cuda does
    _library.rehearsal_set_device(_index(torch, device))


_waiting_is_an_error = False


def _set_sync_debug_mode(mode: int | str) -> None:
    global _waiting_is_an_error
    _waiting_is_an_error = mode in (2, "error")
    _library.rehearsal_waiting_is_an_error(_waiting_is_an_error)


def _device_count() -> int:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = _library.rehearsal_devices()
    return there if named is None else min(there, len(named.split(",")))


def _describe(torch) -> None:
    known = types.SimpleNamespace(
        name=NAME, total_memory=140 << 30, major=9, minor=0, multi_processor_count=132, uuid="0", pci_domain_id=0, pci_bus_id=1,
        pci_device_id=0, L2_cache_size=50 << 20, warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, gcnArchName="",
    )  # fmt: skip
    of_cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": _device_count,
        "current_device": lambda: _index(torch),
        "set_device": lambda device: _set_device(torch, device),
        "get_device_properties": lambda device=None: known,
        "get_device_capability": lambda device=None: (known.major, known.minor),
        "get_device_name": lambda device=None: known.name,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state.cpu()),
        "set_sync_debug_mode": _set_sync_debug_mode,
        "get_sync_debug_mode": lambda: 2 * _waiting_is_an_error,
        "default_generators": (torch.default_generator,) * _library.rehearsal_devices(),
    }
    for name, value in of_cuda.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = lambda self, device=None, non_blocking=False: self.to(
        torch.device("cuda", _index(torch, device)), non_blocking=non_blocking
    )
    torch.nn.Module.cuda = lambda self, device=None: self.to(torch.device("cuda", _index(torch, device)))


def _streams(torch) -> None:
    """All work is done when it is asked for, in the order in which it is asked for."""

    class Event(torch.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            return super().__new__(cls, torch.device("cuda", _index(torch)), enable_timing=enable_timing)

    class Stream(torch.Stream):
        cuda_stream = 0

        def __new__(cls, device=None, priority=0, **same):
            return super().__new__(cls, torch.device("cuda", _index(torch, device)))

    @contextlib.contextmanager
    def on_device(device):
        before = _library.rehearsal_device()
        _library.rehearsal_set_device(_index(torch, device))
        try:
            yield
        finally:
            _library.rehearsal_set_device(before)

    of_cuda = {
        "Event": Event,
        "Stream": Stream,
        "device": on_device,
        "current_stream": lambda device=None: Stream(device),
        "default_stream": lambda device=None: Stream(device),
        "stream": lambda stream: contextlib.nullcontext(),
        "set_stream": lambda stream: None,
        "synchronize": lambda device=None: None,
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in of_cuda.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.device_count = torch.cuda.device_count


def _memory(torch) -> None:
    def counted(name: str):
        return lambda device=None: getattr(_library, f"rehearsal_{name}")(_index(torch, device))

    of_cuda = {
        "memory_allocated": counted("allocated"),
        "memory_reserved": counted("allocated"),
        "max_memory_allocated": counted("peak"),
        "max_memory_reserved": counted("peak"),
        "reset_peak_memory_stats": lambda device=None: _library.rehearsal_reset_peak(_index(torch, device)),
        "mem_get_info": lambda device=None: (139 << 30, 140 << 30),
        "memory_stats": lambda device=None: {},
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }
    for name, value in of_cuda.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.memory, name):
            setattr(torch.cuda.memory, name, value)


def _storages(torch) -> None:
    """torch resizes the memory of GPUs in code that a CPU build lacks."""
    of_cpu = torch.UntypedStorage.resize_

    def resize_(self, size: int):
        if self.device.type != "cuda":
            return of_cpu(self, size)
        owner = torch.empty(0, dtype=torch.uint8, device=self.device)
        torch.ops.rehearsal.resize_storage(owner.set_(self), size)
        return self

    torch.UntypedStorage.resize_ = resize_


def _kernels(torch) -> None:
    """What torch has for GPUs alone: attention that returns the logarithm of its denominator, in rows of a multiple of 32; the backward of a norm."""
    library = torch.library.Library("aten", "IMPL", "CUDA")

    def scores(q, k, bias, causal, scale):
        found = q.float() @ k.float().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if bias is not None:
            found = found + bias.float()
        if causal:
            found = found.masked_fill(torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        return found

    def efficient(q, k, v, bias, with_lse, dropout=0.0, causal=False, *, scale=None):
        assert not dropout
        found = scores(q, k, bias, causal, scale)
        lse = found.logsumexp(-1)
        y = torch.exp(found - lse.unsqueeze(-1)).nan_to_num() @ v.float()
        padded = -(-q.shape[-2] // 32) * 32
        lse = torch.nn.functional.pad(lse, (0, padded - q.shape[-2]), value=torch.inf) if with_lse else lse[..., :0]
        none = torch.empty((), dtype=torch.long)
        return y.to(q.dtype), lse, none, none

    def efficient_backward(g, q, k, v, bias, y, lse, seed, offset, dropout, wanted, causal=False, *, scale=None):
        p = torch.exp(scores(q, k, bias, causal, scale) - lse[..., : q.shape[-2], None]).nan_to_num()
        g32 = g.float()
        g_p = g32 @ v.float().transpose(-1, -2)
        g_s = p * (g_p - (g32 * y.float()).sum(-1, keepdim=True))
        by = q.shape[-1] ** -0.5 if scale is None else scale
        g_q, g_k, g_v = g_s @ k.float() * by, g_s.transpose(-1, -2) @ q.float() * by, p.transpose(-1, -2) @ g32
        return g_q.to(q.dtype), g_k.to(k.dtype), g_v.to(v.dtype), g_s.to(q.dtype) if wanted[3] else None

    def rms_norm_backward(g, x, shape, inverse, gain, wanted):
        normed, count = x * inverse, shape[0]
        g_normed = g if gain is None else g * gain
        grad_x = (g_normed - normed * (g_normed * normed).sum(-1, keepdim=True) / count) * inverse if wanted[0] else None
        return grad_x, (g * normed).reshape(-1, count).sum(0) if wanted[1] else None

    library.impl("_fused_rms_norm_backward", rms_norm_backward)
    library.impl("_scaled_dot_product_efficient_attention", efficient)
    library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward)
    torch.cuda.rehearsed_kernels = library  # lives as long as torch


def _compiler(torch) -> None:
    """Programs are traced and differentiated as for a GPU, and then run operator by operator: there is no Triton here."""
    compile_with = torch.compile
    torch.compile = functools.wraps(compile_with)(
        lambda model=None, **options: compile_with(model, **options | {"backend": "aot_eager"})
    )


def _graphs(torch) -> None:
    """What is recorded is not done, and nothing may wait meanwhile."""
    from pretended_graph import CUDAGraph

    @contextlib.contextmanager
    def graph(made, pool=None, stream=None, capture_error_mode="global"):
        before = _waiting_is_an_error
        _set_sync_debug_mode("error")
        try:
            with made.recording():
                yield
        finally:
            _set_sync_debug_mode("error" if before else "default")

    torch.cuda.CUDAGraph, torch.cuda.graph = CUDAGraph, graph


def _nccl(torch) -> None:
    """An NCCL group is a gloo group, to which the library hands the device's memory. As with NCCL, it takes no tensors of the host."""
    from torch import distributed as dist
    from torch.distributed import distributed_c10d as c10d

    def of_gloo(backend: str) -> str:
        return "cuda:gloo" if backend == "nccl" else backend.replace("nccl", "gloo")

    def with_gloo(make, place: int):
        def made(*given, **named):
            assert "device_id" not in named, "NCCL would connect every group at once (distributed/ranks.py)"
            given = list(given)
            if len(given) > place and given[place]:
                given[place] = of_gloo(given[place])
            if named.get("backend"):
                named["backend"] = of_gloo(named["backend"])
            return make(*given, **named)

        return made

    for name, place in {"init_process_group": 0, "new_group": 2}.items():
        made = with_gloo(getattr(c10d, name), place)
        setattr(dist, name, made)
        setattr(c10d, name, made)
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True
