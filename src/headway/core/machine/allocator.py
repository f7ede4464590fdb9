"""Settings of the C library's allocator: keep the memory that a training step frees."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4


def keep_freed_memory(*, of_all_sizes: bool) -> None:
    """Let glibc keep large freed blocks for the next step instead of returning them to the kernel.

    Every step allocates the same activations and gradients again; without this each of them is mapped, zeroed page by
    page and unmapped. Has no effect on other systems or allocators.

    Args:
        of_all_sizes: Keep blocks above 32 MiB too, the largest threshold that glibc accepts; the gradient of a
            vocabulary is such a block. On a GPU, blocks of that size are copies of a state: they are allocated once,
            so the kernel should have them back.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # not glibc
        return
    if of_all_sizes:
        mallopt(_M_MMAP_MAX, 0)
    else:
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_M_TRIM_THRESHOLD, 2**30)


def give_back_freed_memory() -> None:
    """Return the memory that `keep_freed_memory` has kept to the kernel, when no further step needs it."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
