"""How much work something is, in what Python does for it: the same number on every machine, however busy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def count_calls(work: Callable[[], object]) -> int:
    """Calls of functions while something is done in this thread, of Python's and of C's."""
    number = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return number


def count_lines(work: Callable[[], object]) -> int:
    """Lines of Python that are executed while something is done in this thread, calls of C's functions uncounted."""
    number = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal number
        number += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return number
