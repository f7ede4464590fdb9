"""How a process ends: what Python does at its exit is left out where it would wait forever, or is of no use.

An error may leave a process in the middle of what GPUs exchange.
NCCL's groups are taken down by all of their workers together: one that has met an error would wait there for others,
which wait for it in an exchange that it never joins, and what it has to say would be lost. So nobody takes them down,
and the process ends without what Python does at its exit.

Gloo's groups leave threads, whatever becomes of the groups. One of them that gives back a tensor while Python takes
itself apart is ended in the middle of that, and C++ ends the process by SIGABRT for it, after all it had to do (PyTorch
2.13). So Python does not take itself apart there.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from headway.core.console import settle_streams

_all_clear = False
_threads_stay = False
# The exit code, when Python does not take itself apart.
_code: int | None = None


def allow_fast_exit() -> None:
    """Say that nothing depends on Python's taking itself apart at the exit: nobody's code but ours and that of known
    libraries has run, and every file is closed. To free a large vocabulary takes as long as to encode a few
    mebibytes."""
    global _all_clear
    _all_clear = True


def keep_gloo_threads() -> None:
    """Say that there are, or will be, groups of gloo in this process."""
    global _threads_stay
    _threads_stay = True


def end() -> None:
    """End the process where Python need not, or must not, take itself apart. Register it with `atexit` before all
    others, then it comes after them."""
    if _code is not None:
        settle_streams()
        os._exit(_code)


def has_gpu_groups() -> bool:
    """Whether there are process groups of NCCL in this process."""
    dist: Any = sys.modules.get("torch.distributed")
    is_initialized = getattr(dist, "is_initialized", None)  # another thread may be about to load it
    return is_initialized is not None and is_initialized() and "nccl" in dist.get_backend_config()


def exit_process(code: int) -> NoReturn:
    """End this process, which is nobody else's, with an exit code: like any other, but for groups that are left, and
    without taking Python apart where `end` is registered and has a reason."""
    global _code
    if has_gpu_groups():
        settle_streams()
        os._exit(code)
    if _all_clear or _threads_stay:
        _code = code
    sys.exit(code)
