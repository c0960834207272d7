"""Joules that a rank's device has used, where the hardware counts them: NVIDIA GPUs by NVML, Intel and AMD processors by RAPL."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

RAPL = Path("/sys/class/powercap")
"""Counters of the Linux kernel (Documentation/power/powercap). Since 2020 only root may read them, unless the administrator allows it."""


class EnergyMeter:
    """What a rank's device uses. Ranks of a host share its processors; the first of them counts those."""

    def __init__(self, device: torch.device, local_rank: int, rapl: Path = RAPL) -> None:
        self._counters: list[Callable[[], float]] = []
        self.counts = True
        """Whether this rank's joules are those of its device. If they are unknown, so is the sum over ranks."""
        if device.type == "cuda":
            self._counters = _of_gpu(device)
        elif local_rank == 0:
            self._counters = _of_processors(rapl)
        else:
            return
        self.counts = bool(self._counters)
        self._last = [counter() for counter in self._counters]

    def take(self) -> float:
        """Joules since the last call."""
        used = 0.0
        for i, counter in enumerate(self._counters):
            with contextlib.suppress(Exception):  # it only observes the run: what cannot be read now counts the next time
                now = counter()
                used, self._last[i] = used + now - self._last[i], now
        return used


def _of_gpu(device: torch.device) -> list[Callable[[], float]]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # not installed, no driver, a device that does not count, a part of one (MIG)
        return []
    return [lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000]


def _of_processors(rapl: Path) -> list[Callable[[], float]]:
    """A counter per processor package, without those of its parts, which it contains."""
    found = []
    for package in sorted(rapl.glob("*-rapl:*")):
        with contextlib.suppress(OSError, ValueError):
            if package.name.count(":") == 1 and (package / "name").read_text().startswith("package"):
                found.append(_Package(package))
    return found


class _Package:
    """The energy counter of a processor package, which begins anew at its end."""

    def __init__(self, folder: Path) -> None:
        self._file, self._end = folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())
        self._rounds, self._last = 0, int(self._file.read_text())

    def __call__(self) -> float:
        now = int(self._file.read_text())
        self._rounds, self._last = self._rounds + (now < self._last), now
        return (self._rounds * self._end + self._last) / 1e6
