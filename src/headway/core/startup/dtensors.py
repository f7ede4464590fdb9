"""A check for distributed tensors that does not import their module, which takes half a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether a tensor is a `DTensor`; there is none as long as their module is not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
