"""No search for garbage while a program loads what it needs."""

from __future__ import annotations

import gc

from headway.core.startup.garbage import pause_collection, resume_collection


def test_what_was_loaded_meanwhile_is_not_looked_through_again() -> None:
    pause_collection()
    assert not gc.isenabled()
    kept = [[] for _ in range(1000)]
    before = gc.get_freeze_count()
    resume_collection()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


def test_who_has_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        resume_collection()
        assert not gc.isenabled()
    finally:
        gc.enable()
