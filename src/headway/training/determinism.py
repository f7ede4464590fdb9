"""Process-wide switches behind the promise of `determinism`."""

from __future__ import annotations

import os
import sys

import torch
from torch.utils import deterministic


def apply_determinism(level: str) -> None:
    """Ask for kernels that repeat their bits; must come before the first GPU work of the process.

    An operation that has no such kernel then raises an error instead of silently breaking the promise.
    """
    exact = level != "off"
    if exact:
        # cuBLAS picks its workspace, and with it the order of its sums, per stream unless this is set.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(exact)
    else:  # the same, but for the compiler's own switch: it need not be loaded to be told, which takes a second
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(exact))
        torch.set_deterministic_debug_mode("error" if exact else "default")
    # Filling fresh memory only serves to find reads of uninitialised values, and costs time in every allocation.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not exact
