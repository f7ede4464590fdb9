"""Waiting for what nobody tells of."""

from __future__ import annotations

import time
from collections.abc import Callable

#: After so long all machines see what one of them has written: longer than a client of NFS goes by what it remembers
#: (`acdirmax` is 60 s).
VISIBILITY_TIMEOUT = 75.0


def wait_until(condition: Callable[[], object], seconds: float, look_seconds: float = 0.02) -> bool:
    """Look again and again until something holds, for at most so long; whether it did.

    Args:
        condition: Asked once at least.
        seconds: 0 asks once.
        look_seconds: Between two looks.
    """
    until = time.monotonic() + seconds
    while not condition():
        left = until - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(look_seconds, left))
    return True
