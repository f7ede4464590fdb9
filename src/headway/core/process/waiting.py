"""Polling for conditions that send no notification."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds after which all machines see what one of them has written: longer than an NFS client caches attributes
#: (`acdirmax` is 60 s).
VISIBILITY_TIMEOUT = 75.0


def wait_until(condition: Callable[[], object], seconds: float, look_seconds: float = 0.02) -> bool:
    """Poll a condition until it holds or the time is over, and return whether it held.

    Args:
        condition: The condition; it is checked at least once.
        seconds: Time limit; 0 checks once.
        look_seconds: Pause between two checks.
    """
    until = time.monotonic() + seconds
    while not condition():
        left = until - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(look_seconds, left))
    return True
