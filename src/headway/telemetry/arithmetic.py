"""Matrix products on a CPU: the library for fp32, and the speed of bf16."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headway.core.machine import processor

if TYPE_CHECKING:
    import torch

#: MKL, which PyTorch uses for fp32 products, uses AVX-512 on Intel's CPUs only.
_SLOW_WITH_MKL = ("AuthenticAMD", "HygonGenuine")
#: With one of these instruction sets oneDNN would round operands to bf16 if allowed.
_ROUNDS_WITH = "amx_"


def set_fp32_products(device: torch.device) -> None:
    """Let this process multiply matrices in fp32 with the faster library, without a loss of precision.

    PyTorch has no setting for "in fp32, by oneDNN". It uses oneDNN where "medium" allows rounding of operands to bf16,
    which oneDNN does only with tile instructions (AMX). Without these its products are in fp32, summed in another
    order.
    """
    import torch

    by_onednn = device.type == "cpu" and onednn_multiplies_fp32()
    torch.set_float32_matmul_precision("medium" if by_onednn else "highest")


@functools.cache
def onednn_multiplies_fp32() -> bool:
    """Return whether oneDNN multiplies fp32 faster than MKL (twice as fast): on a non-Intel CPU with AVX-512.

    It follows from the processor alone, so a run that is resumed on an equal one keeps its bits.
    """
    import torch

    flags = processor.cpu_flags()
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if processor.cpu_vendor() not in _SLOW_WITH_MKL or "avx512f" not in flags:
        return False
    return not any(flag.startswith(_ROUNDS_WITH) for flag in flags) and _keeps_fp32()


def _keeps_fp32() -> bool:
    """Return whether "medium" preserves the last bit of fp32, which bf16 cannot represent."""
    import torch

    matrix = torch.full((256, 256), 1 + torch.finfo(torch.float32).eps)
    with _trying():
        torch.set_float32_matmul_precision("medium")
        return bool(torch.equal(matrix @ torch.eye(256), matrix))


@functools.cache
def cpu_bf16_speed() -> float:
    """Measure how fast this CPU multiplies in bf16, as a multiple of its speed in fp32.

    It takes some hundredths of a second on one thread. The result is 0 without bf16 instructions: emulation is a
    hundred times slower. The instructions alone do not tell: with some, and in some virtual machines, bf16 has half the
    speed of fp32.
    """
    flags = processor.cpu_flags()
    if flags and flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16")):
        return 0.0
    import torch

    seconds = {dtype: float("inf") for dtype in (torch.float32, torch.bfloat16)}
    with _trying():
        set_fp32_products(torch.device("cpu"))
        operands = {dtype: torch.ones(384, 384).to(dtype) for dtype in seconds}
        for _ in range(8):  # in turns; the first ones include loading
            for dtype, matrix in operands.items():
                began = time.perf_counter()
                matrix @ matrix
                seconds[dtype] = min(seconds[dtype], time.perf_counter() - began)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def cpu_multiplies_bf16() -> bool:
    """Return whether products in bf16 are faster than in fp32 on this CPU."""
    return cpu_bf16_speed() > 1.1


@contextmanager
def _trying() -> Iterator[None]:
    """Restore the process after trial products, on one thread: other threads would stay, and prevent copies of the
    process."""
    import torch

    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
