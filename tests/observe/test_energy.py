"""Joules: the counters of NVML, played by a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

from pretrain.observe.energy import EnergyMeter


def test_on_a_cpu_energy_is_unknown_and_not_zero():
    assert not EnergyMeter(torch.device("cpu")).counts


def test_a_gpu_is_asked_by_its_own_number(monkeypatch):
    joules = {"GPU-abc": 5.0}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 1000 * joules[handle],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    meter = EnergyMeter(torch.device("cuda", 3))
    joules["GPU-abc"] = 12.5
    assert meter.counts and meter.take() == 7.5
    del joules["GPU-abc"]
    assert meter.take() == 0  # the driver answered with an error once: it ended the run
    joules["GPU-abc"] = 14.0
    assert meter.take() == 1.5
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="another"))
    assert not EnergyMeter(torch.device("cuda", 3)).counts
