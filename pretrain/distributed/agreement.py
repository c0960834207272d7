"""The facts that all ranks of a run must share before it begins: configuration, data, code and versions.

Each rank describes itself in flat facts and compares their digest with the main rank's. If it differs, the rank asks for the
main rank's facts and names the first difference (joining.py). So a thousand ranks that agree exchange one hash each.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pretrain.config.written import flatten

MAY_DIFFER = ("data.cache.dir",)
"""Keys of the configuration that nodes may set differently: a folder on a node's own disk."""
_ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # variables that change numbers
_PACKAGE = Path(__file__).resolve().parents[1]
_REMEDY = "start all nodes with the same command and files"


def run_facts(config: dict[str, Any], device: str, more: dict[str, Any], packages: Iterable[str] = ()) -> dict[str, Any]:
    """The facts of this process as JSON values by name. A fact that causes others comes before them.

    `config`: the resolved configuration; `more`: its results on this host (layout, content of the data); `packages`: optional ones
    that take part in computing.
    """
    configured = {key: value for key, value in flatten(config, complete=True).items() if key not in MAY_DIFFER}
    return {
        "device type": device,
        **versions(packages),
        **{f"the environment variable {name}": os.environ.get(name) for name in _ENVIRONMENT},
        **code_hashes(),
        **configured,
        **flatten(more, complete=True),
    }


def versions(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Versions of everything that computes."""
    import torch

    cuda = torch.version.cuda
    found: dict[str, Any] = {
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "version of torch": torch.__version__,
        "version of CUDA": cuda,
        "version of cuDNN": torch.backends.cudnn.version() if cuda else None,
        "version of NCCL": str(torch.cuda.nccl.version()) if cuda and torch.distributed.is_nccl_available() else None,
        "precision of float32 products": torch.get_float32_matmul_precision(),
    }
    for name in ("numpy", "triton", *packages):
        try:
            found[f"version of {name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[f"version of {name}"] = None
    return found


def code_hashes() -> dict[str, str]:
    """A hash of every source file of this package, and of the program that was started."""
    # Emacs keeps links such as .#trainer.py, which lead nowhere, beside files that are being edited.
    found = [path for path in sorted(_PACKAGE.rglob("*.py")) if path.is_file()]
    files = {f"{_PACKAGE.name}/{path.relative_to(_PACKAGE).as_posix()}": path for path in found}
    entry = getattr(sys.modules.get("__main__"), "__file__", None)
    if entry and Path(entry).is_file() and Path(entry).resolve() not in files.values():
        files[Path(entry).name] = Path(entry)
    return {f"the code of {name}": hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in files.items()}


def machine_name(device: str) -> str:
    """The kind of processor that computes, as `cpu` or `cuda:1`. It may differ between ranks; a line then says so."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"


def digest_of(facts: dict[str, Any]) -> str:
    """sha256 of facts; equal facts, equal digest."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def difference(own: dict[str, Any], other: dict[str, Any], who: str, whose: str) -> tuple[str, list[str]]:
    """The first difference between two ranks' facts as one line, and a line for each."""
    other = json.loads(json.dumps(other))
    own = json.loads(json.dumps(own))
    names = [*own, *(name for name in other if name not in own)]
    lines = []
    for name in names:
        if name not in own or name not in other:
            has, lacks = (who, whose) if name in own else (whose, who)
            lines.append(f"{has} has {name}={_shown((own | other)[name])}, {lacks} has none")
        elif own[name] != other[name]:
            lines.append(f"{who} has {name}={_shown(own[name])}, {whose} {_shown(other[name])}")
    more = f" and {len(lines) - 1} more difference{'s' if len(lines) > 2 else ''}, listed in the log" if len(lines) > 1 else ""
    return f"{lines[0]}{more}; {_REMEDY}", lines


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
