"""The end of a process that an error has left in the middle of what GPUs exchange.

NCCL's groups are taken down by all of their workers together: one that has met an error would wait there for others,
which wait for it in an exchange that it never joins, and what it has to say would be lost. So nobody takes them down,
and the process ends without what Python does at its exit.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from headway.core.console import settle_streams


def has_gpu_groups() -> bool:
    """Whether there are process groups of NCCL in this process."""
    dist: Any = sys.modules.get("torch.distributed")
    is_initialized = getattr(dist, "is_initialized", None)  # another thread may be about to load it
    return is_initialized is not None and is_initialized() and "nccl" in dist.get_backend_config()


def leave(code: int) -> NoReturn:
    """End this process, which is nobody else's, with an exit code: like any other, but for groups that are left."""
    if has_gpu_groups():
        settle_streams()
        os._exit(code)
    sys.exit(code)
