"""Process-wide switches that implement the levels of `determinism`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

#: The compiler's own switch, read when it is loaded.
_COMPILER = "TORCHINDUCTOR_DETERMINISTIC"


def apply_determinism(level: str) -> None:
    """Select kernels that repeat their bits; call it before the first GPU work of the process.

    An operation without such a kernel then raises an error instead of silently breaking the promise.
    """
    exact = level != "off"
    if exact:
        # cuBLAS picks its workspace, and with it the order of its sums, per stream unless this is set.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(exact)
    else:  # equivalent, but sets the compiler's switch without loading the compiler, which takes a second
        os.environ[_COMPILER] = str(int(exact))
        torch.set_deterministic_debug_mode("error" if exact else "default")
    # Filling fresh memory only helps to find reads of uninitialised values, and costs time in every allocation.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not exact


@contextmanager
def determinism_restored() -> Iterator[None]:
    """Restore the switches of this process at the end of a block, those of `apply_precision` included.

    Environment variables are not restored.
    """
    mode = torch.get_deterministic_debug_mode()
    benchmark = torch.backends.cudnn.benchmark
    cudnn: Any = torch.backends.cudnn  # by part: where these differ, `allow_tf32` cannot be read
    convolutions = cudnn.conv.fp32_precision
    recurrent = cudnn.rnn.fp32_precision
    products = torch.get_float32_matmul_precision()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    compiler = sys.modules.get("torch._inductor.config")
    compiles_exactly = compiler.deterministic if compiler else os.environ.get(_COMPILER) == "1"
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        # If the compiler was loaded within the block, it has taken its switch from the environment.
        if (compiler := sys.modules.get("torch._inductor.config")) is not None:
            compiler.deterministic = compiles_exactly  # type: ignore[attr-defined]
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
        torch.set_float32_matmul_precision(products)
        cudnn.conv.fp32_precision = convolutions
        cudnn.rnn.fp32_precision = recurrent
