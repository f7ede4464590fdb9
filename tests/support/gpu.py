"""Marks of tests that need a GPU; `tests/e2e/test_e2e_emulated_cuda.py` runs them on one that there is not."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from cuda_in_memory.emulated_cuda import VARIABLE

#: For `pytestmark`: on a GPU, or on one that is emulated in host memory.
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """The same for one test."""
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


#: What has to do with its memory, its kernels or its compiler.
NEEDS_REAL_GPU = pytest.mark.skipif(
    VARIABLE in os.environ or not torch.cuda.is_available(), reason="there is no GPU that is one"
)
