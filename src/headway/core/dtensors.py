"""Telling distributed tensors from others without loading what they are made of, which takes half a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Whether it is a `DTensor`; as long as nobody has loaded them, there is none."""
    # A compiler that traces this has loaded them itself, and may not look into `sys.modules`.
    if not torch.compiler.is_compiling() and "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
