"""Construction of modules without their first values."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class NoFirstValues(TorchFunctionMode):
    """Leaves the weights of new modules uninitialised.

    Their values would be overwritten anyway, and drawing them on the meta device imports PyTorch's compiler, which
    takes a second.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
