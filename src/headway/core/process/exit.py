"""Process exit: skip Python's shutdown where it would block forever, crash, or waste time.

An error may leave a process in the middle of a collective on GPUs. NCCL groups are destroyed by all of their workers
together: a worker with an error would wait there for the others, which wait for it in a collective that it never joins,
and its message would be lost. So no worker destroys these groups, and the process ends without Python's shutdown.

Groups of gloo leave threads behind, even after they are destroyed. If such a thread releases a tensor during
interpreter shutdown, Python ends the thread in the middle of it, and C++ ends the process by SIGABRT although its work
was done (PyTorch 2.13). So interpreter shutdown is skipped there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any, NoReturn

from headway.core.console import flush_streams

_all_clear = False
_threads_stay = False
# The exit code, when interpreter shutdown is to be skipped.
_code: int | None = None


def allow_fast_exit() -> None:
    """Allow this process to skip interpreter shutdown, since nothing depends on it.

    That holds when only our own code and that of known libraries has run, and every file is closed. Freeing a large
    vocabulary takes as long as encoding a few mebibytes.
    """
    global _all_clear
    _all_clear = True


def keep_gloo_threads() -> None:
    """Record that this process has, or will have, process groups of gloo."""
    global _threads_stay
    _threads_stay = True


def end() -> None:
    """End the process here if interpreter shutdown can or must be skipped.

    Register it with `atexit` before all other functions, so that it runs after them.
    """
    if _code is not None:
        flush_streams()
        os._exit(_code)


def has_gpu_groups() -> bool:
    """Return whether this process has process groups of NCCL."""
    dist: Any = sys.modules.get("torch.distributed")
    is_initialized = getattr(dist, "is_initialized", None)  # another thread may be about to load it
    return is_initialized is not None and is_initialized() and "nccl" in dist.get_backend_config()


def exit_process(code: int) -> NoReturn:
    """End this process, which must belong to Headway, with an exit code.

    It ends at once if NCCL groups are left. Interpreter shutdown is skipped if `end` is registered and has a reason.
    """
    global _code
    if has_gpu_groups():
        flush_streams()
        os._exit(code)
    if _all_clear or _threads_stay:
        _code = code
    sys.exit(code)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that the agent's death leaves no writing orphans."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    parent = os.getppid()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request was in place
        os.kill(os.getpid(), signal.SIGKILL)
