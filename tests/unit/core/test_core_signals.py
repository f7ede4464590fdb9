"""Signals that are taken for a while."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from headway.core.signals import STOPPING, handled, held


@pytest.fixture
def came() -> Iterator[list[int]]:
    """What reaches the handler that was there before."""
    numbers: list[int] = []
    with handled(STOPPING, lambda number, frame: numbers.append(number)):
        yield numbers


def test_signals_are_held_until_the_end_of_the_block(came: list[int]) -> None:
    with held():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert not came
    assert came == [signal.SIGTERM, signal.SIGUSR1]


def test_a_held_signal_comes_after_an_error_too(came: list[int]) -> None:
    with pytest.raises(ValueError, match="no"), held():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("no")
    assert came == [signal.SIGINT]


def test_handlers_are_handed_back(came: list[int]) -> None:
    inner: list[int] = []
    with handled([signal.SIGUSR1], lambda number, frame: inner.append(number)):
        signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert (inner, came) == ([signal.SIGUSR1], [signal.SIGUSR1])


def test_another_thread_leaves_signals_as_they_are() -> None:
    given: list[object] = []

    def work() -> None:
        with handled(STOPPING, lambda number, frame: None) as before, held():
            given.append(before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert given == [{}]
