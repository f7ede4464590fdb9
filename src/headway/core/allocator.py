"""The C library's allocator, told to keep what a training step gives back."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4


def keep_freed_memory(*, of_all_sizes: bool) -> None:
    """Let glibc keep large freed blocks for the next step instead of returning them to the kernel.

    Every step allocates the same activations and gradients again; without this each of them is mapped, zeroed page by
    page and unmapped. Has no effect on other systems or allocators.

    Args:
        of_all_sizes: Those above 32 MiB too, the most that glibc takes for a threshold: the gradient of a vocabulary is
            one. Where steps compute elsewhere, they are copies of a state, which come once and should go for good.
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
    """Let the kernel have what `keep_freed_memory` keeps: no step comes that would need it."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
