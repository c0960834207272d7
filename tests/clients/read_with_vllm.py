"""Run by another Python: vLLM's own configuration and weight loader on exports, on a CPU, without its compiled kernels.

Tasks come as JSON on standard input, answers leave as JSON lines. Nothing is computed: what needs a kernel is left out, and packages that only serve
requests are replaced by empty ones.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path

import torch
from pydantic_core import core_schema
from safetensors.torch import load_file

KERNELS = torch.library.Library("_C", "FRAGMENT")
EMPTY = {"llguidance", "xgrammar", "model_hosting_container_standards"}
OF_IMAGES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


class AnyType(type):
    """A class of whatever name a package is asked for."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return any_type(name)

    def __call__(cls, *arguments: object, **named: object) -> object:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else cls  # as a decorator


def any_type(name: str) -> type:
    return AnyType(name, (), {"__get_pydantic_core_schema__": classmethod(lambda cls, *_: core_schema.any_schema())})


class EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return any_type(name)


class EmptyPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in EMPTY else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = EmptyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare() -> None:
    """vLLM on a CPU that its wheel for GPUs has no kernels for."""
    sys.meta_path.insert(0, EmptyPackages())
    sys.modules[OF_IMAGES] = EmptyModule(OF_IMAGES)  # needs torchvision; imported for Qwen3.5's text models too
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        setattr(torch.accelerator, name, lambda *_, **__: None)
    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.accelerator, name, lambda *_, **__: 0)
    KERNELS.define("gelu_new(Tensor! out, Tensor input) -> ()")
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.triton_utils import triton

    triton.set_allocator = lambda *_: None  # the stand-in for Triton lacks it
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # in which nothing of this would hold
    base_loader.process_weights_after_loading = lambda *_: None  # packs weights for kernels


def loaded(directory: Path) -> dict:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(
        model=str(directory), dtype="float32", enforce_eager=True, skip_tokenizer_init=True
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{directory.parent / 'rendezvous'}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        model = get_model(vllm_config=config)
    # A tied head is the embedding itself, or a copy of it.
    names = dict(model.named_parameters())
    head = next((p for name, p in names.items() if name.endswith("lm_head.weight")), None)
    own = {
        id(p): p
        for name, p in names.items()
        if not (name.endswith("lm_head.weight") and config.model_config.hf_config.tie_word_embeddings)
    }
    squares = sum(float(p.detach().double().square().sum()) for p in own.values())
    theirs = [
        tensor.exp() if name.endswith(("mamba.A_log", "mixer.A_log")) else tensor  # of Mamba 2, vLLM holds the decays themselves
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    ]
    return {
        "class": type(model).__name__,
        "squares": squares,
        "exported": sum(float(tensor.double().square().sum()) for tensor in theirs),
        "head": head is not None,
    }


def main() -> None:
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    prepare()
    for directory in json.load(sys.stdin):
        try:
            answer = loaded(Path(directory))
        except Exception as error:  # is an answer as well
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("answer:" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
