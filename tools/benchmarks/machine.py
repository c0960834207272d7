"""Where numbers were measured: the machine, the versions of packages, and the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.trainers.versions import versions

_ROOT = Path(__file__).resolve().parents[2]
_FLAGS = ("avx2", "avx512_bf16", "amx_bf16")
"""Those that decide how fast products are."""


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine that the numbers were measured on, and the commit of this checkout. `device`: cuda adds the GPU's name."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **cpu(Path("/proc/cpuinfo")),
        **gpu(device),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "versions": versions(),
        **commit(_ROOT),
    }


def cpu(info: Path) -> dict[str, Any]:
    """The CPU's name, and its family, model and flags where `info` has them. Three generations in a row have one name."""
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    first = dict(reversed([tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line]))
    found: dict[str, Any] = {"cpu": first.get("model name", platform.processor())}
    if "cpu family" in first:
        flags = first.get("flags", "").split()
        found |= {"cpu_family": first["cpu family"], "cpu_model": first.get("model"), "cpu_flags": " ".join(flag for flag in _FLAGS if flag in flags)}
    return found


def gpu(device: str) -> dict[str, str]:
    """The name of the GPU, if `device` is cuda. This begins to use the GPU, so ask after the measurement, which may set it up first."""
    if device != "cuda":
        return {}
    import torch

    return {"gpu": torch.cuda.get_device_name()}


def commit(checkout: Path) -> dict[str, Any]:
    """Its commit, and whether tracked files differ from it. Nothing without git, or where the folder is no checkout."""
    if not (checkout / ".git").exists():  # or git would find one around it
        return {}
    asked = ("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no")
    try:
        name, changed = (
            subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": name, "dirty": bool(changed)}


def cpu_text(about: dict[str, Any]) -> str:
    """The CPU of a `machine`, by all that it says of it."""
    if "cpu_family" not in about:
        return str(about["cpu"])
    flags = about.get("cpu_flags") or f"no {' or '.join(_FLAGS)}"
    return f"{about['cpu']} (family {about['cpu_family']}, model {about.get('cpu_model')}: {flags})"


def commit_text(about: dict[str, Any]) -> str | None:
    """The commit of a `machine`; None where it is not known."""
    name = about.get("commit")
    return f"{name} with changes" if name and about.get("dirty") else name
