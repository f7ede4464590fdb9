"""No search for garbage while modules are loaded: they stay, and looking through all of PyTorch takes a tenth of a
second of a start."""

from __future__ import annotations

import gc

_paused = False


def pause_collection() -> None:
    """From here on nothing is looked for; for a process of our own only."""
    global _paused
    _paused = True
    gc.disable()


def resume_collection() -> None:
    """The end of it, if it was begun: what is there by now is never looked through again."""
    global _paused
    if _paused:
        _paused = False
        gc.freeze()
        gc.enable()
