"""Environment variables that are set for the length of a block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: Keeps NumPy from starting threads when it is loaded: a process with several threads cannot be copied.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


@contextmanager
def with_variables(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables in a block, for libraries and for processes that are started there.

    Args:
        variables: By name; None for one that is not to be set.
    """
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
