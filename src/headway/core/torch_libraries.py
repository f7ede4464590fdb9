"""PyTorch's libraries, brought into this process while it does something else.

A fifth of a second of `import torch`, more with CUDA, goes into what the linker and the libraries' own beginnings do
without Python. A thread can do that while the command line and the config are read.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from headway.core.waiting import wait_until

#: Modules with libraries of their own that a command loads next: the linker takes one at a time, so they go first.
_BEFORE = ("yaml", "queue", "mmap", "ssl", "statistics", "sqlite3")

_loading: threading.Thread | None = None


def load_libraries_ahead() -> None:
    """Begin to load them, where PyTorch is installed; `import torch` finds what is there by then."""
    global _loading
    if _loading is None:
        for name in _BEFORE:
            import_module(name)
        # No daemon: a process that ends while its libraries begin would crash, so its end waits for the thread.
        _loading = threading.Thread(target=_load, name="torch-libraries", daemon=False)
        _loading.start()


def wait_for_libraries() -> None:
    """Until the thread has ended, if there is one: a process can be copied (`fork`) only without threads."""
    if _loading is not None:
        _loading.join()
        # The interpreter is done with a thread a moment before the kernel is.
        task = Path(f"/proc/self/task/{_loading.native_id}")
        wait_until(lambda: not task.exists(), 1.0, 0.001)


def _load() -> None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent / "lib"
    # `ctypes.CDLL(path)` would hold the interpreter's lock; a call of a C function does not.
    # What goes wrong here, `import torch` meets again, and either knows what to do about it or says so.
    with suppress(OSError, AttributeError):
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
        # As PyTorch does it: what others link to first, for all to see.
        dlopen(os.fsencode(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL)
        dlopen(os.fsencode(folder / "libtorch.so"), os.RTLD_NOW)
