"""Loading of PyTorch's shared libraries in a thread, while the process does something else.

The linker and the libraries' initialisers take a fifth of a second of `import torch`, more with CUDA, without holding
Python's lock. A thread can run them while the command line and the config are read.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from headway.core.process.waiting import wait_until

#: Extension modules that a command imports next. The linker loads one library at a time, so they go first.
_BEFORE = ("yaml", "queue", "mmap", "ssl", "statistics", "sqlite3")

_loading: threading.Thread | None = None


def load_libraries_ahead() -> None:
    """Start to load the libraries if PyTorch is installed; `import torch` uses those that are loaded by then."""
    global _loading
    if _loading is None:
        for name in _BEFORE:
            import_module(name)
        # No daemon: a process that ends while libraries initialise would crash, so its end waits for the thread.
        _loading = threading.Thread(target=_load, name="torch-libraries", daemon=False)
        _loading.start()


def wait_for_libraries() -> None:
    """Wait until the thread has ended, if there is one: `fork` is safe only without threads."""
    if _loading is not None:
        _loading.join()
        # For the interpreter a thread ends a moment before it does for the kernel.
        task = Path(f"/proc/self/task/{_loading.native_id}")
        wait_until(lambda: not task.exists(), 1.0, 0.001)


def _load() -> None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent / "lib"
    # `ctypes.CDLL(path)` would hold the interpreter's lock; a call of a C function does not.
    # `import torch` meets the same errors again, and handles or reports them.
    with suppress(OSError, AttributeError):
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.restype = ctypes.c_void_p
        dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
        # As PyTorch does: first the library that the others link to, with global symbols.
        dlopen(os.fsencode(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL)
        dlopen(os.fsencode(folder / "libtorch.so"), os.RTLD_NOW)
