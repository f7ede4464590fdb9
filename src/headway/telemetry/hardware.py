"""The hardware of a machine, the peak speed of its accelerators, and this process's memory use."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from headway.core.machine.cores import usable_cores
from headway.core.machine.processor import cpu_flags, cpu_name

if TYPE_CHECKING:
    import torch

_GIB = 2**30

#: Instruction sets that determine how fast a CPU multiplies matrices.
_INSTRUCTION_SETS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "sve", "sve2", "bf16",
)  # fmt: skip


def _tflops(
    bf16: float | None, fp16: float | None, tf32: float | None, fp32: float, fp8: float | None = None
) -> dict[str, float]:
    values = {"bf16": bf16, "fp16": fp16, "tf32": tf32, "fp32": fp32, "fp8": fp8}
    return {name: value * 1e12 for name, value in values.items() if value is not None}


#: Device name, as the driver reports it, to dense peaks in FLOP/s: without sparsity, tensor cores for bf16, fp16, tf32
#: and fp8 (with fp32 accumulation), plain cores for fp32; fp8 last, where there is any. The first pattern that is found
#: wins. Sources, by row: the vendor's datasheet of that product, unless another document is named. Sparse figures in a
#: datasheet are halved.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"GB200", _tflops(2500, 2500, 1250, 80, 5000)),  # GB200 NVL72 datasheet, divided by its 72 GPUs
    (r"B200", _tflops(2250, 2250, 1125, 75, 4500)),  # HGX B200, divided by its 8 GPUs
    (r"GH200", _tflops(989.5, 989.5, 494.7, 67, 1979)),
    (r"H200 NVL", _tflops(835.5, 835.5, 417.5, 60, 1670.5)),
    (r"H200", _tflops(989.5, 989.5, 494.7, 67, 1979)),
    (r"H100 NVL", _tflops(835.5, 835.5, 417.5, 60, 1670.5)),
    (r"H100 PCIe", _tflops(756, 756, 378, 51, 1513)),
    (
        r"H[18]00.* HBM3",
        _tflops(989.5, 989.5, 494.7, 67, 1979),
    ),  # the SXM modules; H800 differs in NVLink and FP64 only
    (r"H20", _tflops(148, 148, 74, 44, 296)),
    (r"A[18]00", _tflops(312, 312, 156, 19.5)),
    (r"A40", _tflops(149.7, 149.7, 74.8, 37.4)),
    (r"A30", _tflops(165, 165, 82, 10.3)),
    (r"A10", _tflops(125, 125, 62.5, 31.2)),
    (r"L40S", _tflops(362.05, 362.05, 183, 91.6, 733)),
    (r"L40", _tflops(181.05, 181.05, 90.5, 90.5, 362)),
    (r"L4", _tflops(121, 121, 60, 30.3, 242.5)),
    (r"RTX 6000 Ada Generation", _tflops(364.25, 364.25, 182.1, 91.1, 728.5)),
    (r"RTX A6000", _tflops(154.8, 154.8, 77.4, 38.7)),
    (r"RTX 5090", _tflops(209.5, 209.5, 104.8, 104.8, 419)),  # RTX Blackwell architecture whitepaper, appendix A
    (r"RTX 4090", _tflops(165.2, 165.2, 82.6, 82.6, 330.3)),  # Ada architecture whitepaper, appendix A
    (r"RTX 3090", _tflops(71, 71, 35.6, 35.6)),  # GA102 architecture whitepaper, table 2
    (r"T4", _tflops(None, 65, None, 8.1)),
    (r"V100S", _tflops(None, 130, None, 16.4)),
    (r"V100-SXM\d", _tflops(None, 125, None, 15.7)),
    (r"V100-PCIE", _tflops(None, 112, None, 14)),
    (r"MI325X", _tflops(1307.4, 1307.4, 653.7, 163.4, 2614.9)),
    (r"MI300X", _tflops(1307.4, 1307.4, 653.7, 163.4, 2614.9)),
    (r"MI250X", _tflops(191.5, 191.5, None, 23.95)),  # one device is one of the product's two dies
)


def peak_flops(name: str, precision: str) -> float | None:
    """Return the dense peak of one accelerator in FLOP/s, the denominator of MFU (Chowdhery et al. 2022, appendix B).

    Args:
        name: As `device_name` returns it.
        precision: "bf16", "fp16", "tf32", "fp32" or "fp8".

    Returns:
        None if the accelerator is unknown, lacks the precision, or is a CPU: then there is no MFU.
    """
    # A slice of a partitioned GPU (MIG) has an unknown share of the whole.
    if re.search(r"\bMIG\b", name):
        return None
    for pattern, peaks in _PEAKS:
        # "A10" must match neither "A100" nor "A10G", and "RTX 4090" neither "RTX 4090 Laptop GPU" nor "4090 D".
        if re.search(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])(?! (Laptop|D\b|Ti))", name):
            return peaks.get(precision)
    return None


def device_name(device: torch.device) -> str:
    """Return the product's name: "NVIDIA H100 80GB HBM3", "AMD EPYC 9654 96-Core Processor"."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return cpu_name()


def peak_memory_gib(device: torch.device) -> float | None:
    """Return the peak memory of this process so far, in GiB; None if no peak is available.

    On a CUDA device: what PyTorch allocated there. On the CPU: resident memory.
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / _GIB
    if device.type == "cpu":
        import resource

        # getrusage(2) counts in KiB on Linux and in bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB
    return None


def hardware_facts() -> dict[str, Any]:
    """Return CPU, memory and accelerators of this machine, ready for JSON; unknown ones are None or absent."""
    import psutil

    flags = cpu_flags()
    return {
        "cpu": cpu_name(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": psutil.cpu_count(),
        "cores_usable": usable_cores(),
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in flags],
        "memory_gib": round(psutil.virtual_memory().total / _GIB, 2),
        "accelerators": _accelerators(),
    }


def local_accelerators() -> list[tuple[str, float]]:
    """Return name and memory in GiB of each accelerator of this machine; none without PyTorch."""
    try:
        return [(facts["name"], facts["memory_gib"]) for facts in _accelerators()]
    except ImportError:
        return []


def _accelerators() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": facts.name,
                "memory_gib": round(facts.total_memory / _GIB, 2),
                "compute_capability": f"{facts.major}.{facts.minor}",
                "multiprocessors": facts.multi_processor_count,
            }
        )
    return found
