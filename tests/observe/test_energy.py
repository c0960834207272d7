"""Joules: counters of the kernel, made here as files, and of NVML, played by a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from pretrain.observe.energy import EnergyMeter

CPU = torch.device("cpu")


def package(folder, name: str, kind: str, joules: float, end: float = 1000.0) -> None:
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "name").write_text(f"{kind}\n")
    (place / "energy_uj").write_text(f"{round(joules * 1e6)}\n")
    (place / "max_energy_range_uj").write_text(f"{round(end * 1e6)}\n")


def test_processor_packages_are_added_up_without_their_parts_and_counters_begin_anew(tmp_path):
    package(tmp_path, "intel-rapl:0", "package-0", 990)
    package(tmp_path, "intel-rapl:0:0", "dram", 5)
    package(tmp_path, "intel-rapl:1", "package-1", 10)
    package(tmp_path, "intel-rapl:2", "psys", 10)
    meter = EnergyMeter(CPU, 0, tmp_path)
    assert meter.counts and meter.take() == 0
    package(tmp_path, "intel-rapl:0", "package-0", 15)  # 25 J more, over the end at 1,000
    package(tmp_path, "intel-rapl:1", "package-1", 12)
    package(tmp_path, "intel-rapl:0:0", "dram", 500)
    assert meter.take() == pytest.approx(27)
    assert meter.take() == 0


def test_one_rank_of_a_host_counts_its_processors(tmp_path):
    package(tmp_path, "intel-rapl:0", "package-0", 1)
    meter = EnergyMeter(CPU, 1, tmp_path)
    package(tmp_path, "intel-rapl:0", "package-0", 100)
    assert meter.counts and meter.take() == 0


def test_what_cannot_be_read_is_unknown_and_not_zero(tmp_path):
    assert not EnergyMeter(CPU, 0, tmp_path).counts
    package(tmp_path, "intel-rapl:0", "package-0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    (tmp_path / "intel-rapl:0" / "energy_uj").mkdir()  # as unreadable as without the right
    assert not EnergyMeter(CPU, 0, tmp_path).counts


def test_a_gpu_is_asked_by_its_own_number(monkeypatch):
    joules = {"GPU-abc": 5.0}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 1000 * joules[handle],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    meter = EnergyMeter(torch.device("cuda", 3), 3)
    joules["GPU-abc"] = 12.5
    assert meter.counts and meter.take() == 7.5
    del joules["GPU-abc"]
    assert meter.take() == 0  # the driver answered with an error once: it ended the run
    joules["GPU-abc"] = 14.0
    assert meter.take() == 1.5
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="another"))
    assert not EnergyMeter(torch.device("cuda", 3), 3).counts
