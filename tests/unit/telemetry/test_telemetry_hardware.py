"""Facts of the machine, and the peaks behind MFU."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from headway.core.machine.processor import cpu_name
from headway.telemetry.hardware import (
    _PEAKS,
    device_name,
    hardware_facts,
    local_accelerators,
    peak_flops,
    peak_memory_gib,
)


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181.05e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GH200 480GB", 989.5e12),
        ("AMD Instinct MI300X", 1307.4e12),
    ],
)
def test_known_accelerators(name: str, bf16: float) -> None:
    assert peak_flops(name, "bf16") == bf16


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H800 PCIe",
        "NVIDIA RTX A4000",
        "AMD EPYC 9654 96-Core Processor",
        "Intel(R) Xeon(R) Platinum 8480+",
        "",
    ],
)
def test_unknown_ones_have_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None


def test_a_precision_that_a_device_lacks_has_no_peak() -> None:
    assert peak_flops("Tesla T4", "bf16") is None
    assert peak_flops("Tesla T4", "fp16") == 65e12
    assert peak_flops("Tesla V100-SXM2-16GB", "fp32") == 15.7e12
    assert peak_flops("NVIDIA H200", "int4") is None


def test_dense_peaks_rise_as_precision_falls() -> None:
    values = [peak_flops("NVIDIA A100-SXM4-40GB", precision) for precision in ("fp32", "tf32", "bf16")]
    assert values == [19.5e12, 156e12, 312e12]


def test_8_bits_are_twice_as_fast_as_16_where_there_are_any() -> None:
    fast = [peaks for _, peaks in _PEAKS if "fp8" in peaks]
    assert len(fast) > 15
    assert all(peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.02) for peaks in fast)
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA A40", "Tesla V100-SXM2-32GB", "NVIDIA GeForce RTX 3090"):
        assert peak_flops(name, "fp8") is None


def test_facts_are_json_and_sound() -> None:
    facts = hardware_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["cpu"] and facts["cores_usable"] >= 1 and facts["memory_gib"] > 0
    assert len(facts["accelerators"]) == torch.cuda.device_count()


def test_peak_memory_grows_with_what_is_used() -> None:
    cpu = torch.device("cpu")
    before = peak_memory_gib(cpu)
    block = torch.ones(160 * 2**20 // 4)
    after = peak_memory_gib(cpu)
    assert before is not None and after is not None
    assert after >= before > 0.01 and after >= block.nbytes / 2**30


def test_a_device_without_a_record_of_its_peak_is_unknown() -> None:
    assert peak_memory_gib(torch.device("meta")) is None


def test_the_cpu_has_a_name_and_no_peak() -> None:
    assert device_name(torch.device("cpu")) == cpu_name() != ""
    assert peak_flops(cpu_name(), "fp32") is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device() -> None:
    device = torch.device("cuda", 0)
    block = torch.ones(2**28, device=device)
    memory = peak_memory_gib(device)
    assert memory is not None and memory >= block.nbytes / 2**30
    assert device_name(device) == hardware_facts()["accelerators"][0]["name"]


def test_accelerators_of_this_machine_are_those_that_pytorch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    found = local_accelerators()
    assert len(found) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    assert local_accelerators() == []
