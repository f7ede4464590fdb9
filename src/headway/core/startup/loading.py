"""Loading of code at a start."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Load code in a block without a search for garbage, which took a seventh of the time of `import torch`.

    Code that loads leaves no garbage, but its many objects set off collections.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
