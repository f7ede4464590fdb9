"""How a process ends: what Python does at its exit is left out where it would wait forever, or is of no use.

An error may leave a process in the middle of what GPUs exchange.
NCCL's groups are taken down by all of their workers together: one that has met an error would wait there for others,
which wait for it in an exchange that it never joins, and what it has to say would be lost. So nobody takes them down,
and the process ends without what Python does at its exit.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from headway.core.console import settle_streams

_all_clear = False
# The exit code, when Python need not take itself apart.
_code: int | None = None


def all_clear() -> None:
    """Say that nothing depends on Python's taking itself apart at the exit: nobody's code but ours and that of known
    libraries has run, and every file is closed. To free a large vocabulary takes as long as to encode a few
    mebibytes."""
    global _all_clear
    _all_clear = True


def end() -> None:
    """End the process where all is clear. Register it with `atexit` before all others, then it comes after them."""
    if _code is not None:
        settle_streams()
        os._exit(_code)


def has_gpu_groups() -> bool:
    """Whether there are process groups of NCCL in this process."""
    dist: Any = sys.modules.get("torch.distributed")
    is_initialized = getattr(dist, "is_initialized", None)  # another thread may be about to load it
    return is_initialized is not None and is_initialized() and "nccl" in dist.get_backend_config()


def leave(code: int) -> NoReturn:
    """End this process, which is nobody else's, with an exit code: like any other, but for groups that are left."""
    global _code
    if has_gpu_groups():
        settle_streams()
        os._exit(code)
    if _all_clear:
        _code = code
    sys.exit(code)
