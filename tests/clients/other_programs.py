"""Other people's programs, installed or built once into build/clients, and exports for them to read."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.save import write_checkpoint
from pretrain.config.model_schema import Model
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.distributed.ranks import ALONE
from pretrain.huggingface.export_model import export
from pretrain.models import build_network

CACHE = Path(__file__).resolve().parents[2] / "build" / "clients"
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
TOKENIZERS = {"bpe": 1000, "byte_bpe": 1000, "unigram": 1000, "byte": None, "char": None}


@contextlib.contextmanager
def made_once(name: str) -> Iterator[Path | None]:
    """A folder of the cache to fill, or None where an earlier session has filled it; other processes wait."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = CACHE / name / "done"
        if done.is_file():
            yield None
            return
        shutil.rmtree(CACHE / name, ignore_errors=True)
        (CACHE / name).mkdir()
        yield CACHE / name
        done.touch()


def run_or_skip(what: str, *command: object, **options) -> None:
    """A step that needs a package registry or a compiler; without them these tests cannot run, which is said."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()
        reason = next((line for line in reversed(lines) if line.lower().startswith("error")), lines[-1])
        pytest.skip(f"{what} cannot be had: {reason}")


def download(requirement: str, folder: Path, wheel: bool) -> None:
    """A package as it lies in the registry, without what it needs: its wheel or its sources."""
    kind = "--only-binary" if wheel else "--no-binary"
    pip = (sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q", "--no-deps", kind, ":all:")
    run_or_skip(f"{requirement} from a package registry", *pip, requirement, "-d", folder)


def environment(name: str, *requirements: str) -> Path:
    """The Python of a virtual environment that has these packages, and ours for whatever they leave open."""
    with made_once(name) as folder:
        if folder is not None:
            ours_and(folder, *requirements)
    return CACHE / name / "venv" / "bin" / "python"


def ours_and(folder: Path, *requirements: str, also: Path | None = None) -> None:
    """Make the environment of `environment` in a folder. `also`: a folder of more modules, which is put on its path afterwards."""
    run_or_skip(folder.name, sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = (folder / "venv" / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "-q")
    run_or_skip(f"{' '.join(requirements)} from a package registry", *pip, *requirements)
    if also is not None:
        (packages / "also.pth").write_text(f"{also}\n")


@dataclass(frozen=True)
class LlamaCpp:
    """`sources` of llama.cpp, `bindings` to it (llama_cpp/ of llama-cpp-python) and the folder of its built `library`."""

    sources: Path
    bindings: Path
    library: Path


def build_llama_cpp(sources: Path, target: Path) -> None:
    cmake = shutil.which("cmake") or environment("cmake", "cmake").with_name("cmake")
    options = ("BUILD_COMMON", "BUILD_TESTS", "BUILD_TOOLS", "BUILD_EXAMPLES", "BUILD_SERVER", "CURL")
    flags = [f"-DLLAMA_{name}=OFF" for name in options] + [f"-DGGML_{name}=OFF" for name in ("NATIVE", "OPENMP", "CCACHE")]
    run_or_skip("a build of llama.cpp", cmake, "-S", sources, "-B", target, "-DCMAKE_BUILD_TYPE=Release", *flags)
    nice = ["nice", "-n", "10"] if shutil.which("nice") else []
    run_or_skip("a build of llama.cpp", *nice, cmake, "--build", target, "--target", "llama", "-j", "2")


# ---- what they read ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """An export, ids to compute and our logits of them."""

    directory: Path
    model: Model
    tokenizer: Path
    ids: list[int]
    logits: torch.Tensor


def exported(folder: Path, model: Model, tokenizer: Path, seed: int = 0, length: int = 60) -> Exported:
    """An export of random weights, wide enough that every part matters."""
    model = dataclasses.replace(model, vocab_size=load_tokenizer(tokenizer).vocab_size)
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        network = build_network(model)
    weights = {f"model.{name}": _drawn(name, p, model, generator) for name, p in network.named_parameters()}
    state = {"step": 1, "samples": 1, "tokens": 1, "world_size": 1, "layout": "single", "model": dataclasses.asdict(model)}
    write_checkpoint(folder / "checkpoint", weights, state, {"tokenizer": tokenizer}, ALONE)
    export(folder / "checkpoint", folder / "hf")
    network = build_network(model)
    network.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
    length = length if model.positions == "rope" else min(length, model.max_sequence_length)
    ids = torch.randint(model.vocab_size, (1, length), generator=generator)
    with torch.no_grad():
        return Exported(folder / "hf", model, tokenizer, ids[0].tolist(), network.eval()(ids)[0])


def _drawn(name: str, parameter: torch.Tensor, model: Model, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(parameter.shape, generator=generator)
    if name.endswith("correction"):  # transformers 4 lets experts of groups that were not chosen win over negative scores
        return 0.1 * values.abs()
    if parameter.dim() > 1:
        return 0.15 * values
    centre = float("norm" in name and model.norm.kind != "rms_offset" and name.endswith("weight"))
    return centre + 0.2 * values


def child_environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
