"""Joules that a rank's GPU has used, where NVML counts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch


class EnergyMeter:
    """What a rank's device uses."""

    def __init__(self, device: torch.device) -> None:
        self._counter = _counter_of(device)
        self.counts = self._counter is not None
        """Whether the joules of this rank's device are known. If they are not, neither is the sum over ranks."""
        self._last = self._counter() if self._counter is not None else 0.0

    def take(self) -> float:
        """Joules since the last call."""
        before = self._last
        if self._counter is not None:
            with contextlib.suppress(Exception):  # it only observes the run: what cannot be read now counts the next time
                self._last = self._counter()
        return self._last - before


def _counter_of(device: torch.device) -> Callable[[], float] | None:
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # not installed, no driver, a device that does not count, a part of one (MIG)
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
