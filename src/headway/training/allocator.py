"""The C library's allocator, told to keep what a training step gives back."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks for the next step instead of returning them to the kernel.

    Every step allocates the same activations and gradients again; without this each of them is mapped, zeroed page by
    page and unmapped. A threshold for that would not do: glibc takes none above 32 MiB, and the gradient of a vocabulary
    is larger. Has no effect on other systems or allocators.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # not glibc
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**30)


def give_back_freed_memory() -> None:
    """Let the kernel have what `keep_freed_memory` keeps: no step comes that would need it."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
