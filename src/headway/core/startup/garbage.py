"""Garbage collection is paused while modules are imported.

Modules stay in memory, and scanning all of PyTorch's objects takes a tenth of a second of the start.
"""

from __future__ import annotations

import gc

_paused = False


def pause_collection() -> None:
    """Pause garbage collection; only in a process that belongs to Headway."""
    global _paused
    _paused = True
    gc.disable()


def resume_collection() -> None:
    """Resume garbage collection if it was paused, and never scan the objects that exist by now."""
    global _paused
    if _paused:
        _paused = False
        gc.freeze()
        gc.enable()
