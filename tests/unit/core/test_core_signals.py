"""Signals that are taken for a while."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from headway.core.errors import HeadwayError, Preempted
from headway.core.process.signals import STOP_SIGNALS, defer_signals, handled, reset
from headway.training.stop import StopSignals


@pytest.fixture
def came() -> Iterator[list[int]]:
    """What reaches the handler that was there before."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under `nohup`
    with handled(STOP_SIGNALS, lambda number, frame: numbers.append(number)):
        yield numbers
    signal.signal(signal.SIGHUP, before)


def test_signals_are_held_until_the_end_of_the_block(came: list[int]) -> None:
    with defer_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert not came
    assert came == [signal.SIGTERM, signal.SIGUSR1]


def test_a_held_signal_comes_after_an_error_too(came: list[int]) -> None:
    with pytest.raises(ValueError, match="no"), defer_signals():
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
        with handled(STOP_SIGNALS, lambda number, frame: None) as before, defer_signals():
            given.append(before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert given == [{}]


def test_a_copy_finds_signals_as_a_program_would() -> None:
    with handled(STOP_SIGNALS, lambda number, frame: None):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            reset(STOP_SIGNALS)
            found = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
            assert found == [signal.SIG_DFL, signal.default_int_handler, signal.SIG_IGN]
            signal.signal(signal.SIGHUP, lambda number, frame: None)
            reset([signal.SIGHUP])
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        finally:
            signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("own_process", "error", "heard"),
    [(True, Preempted("saved"), 0), (True, HeadwayError("a mistake"), 1), (False, Preempted("saved"), 1)],
)
def test_a_process_that_ends_once_all_is_saved_is_asked_for_nothing_more(
    came: list[int], own_process: bool, error: HeadwayError, heard: int
) -> None:
    with suppress(HeadwayError), StopSignals(own_process=own_process):
        raise error
    gc.collect()  # handlers do not come back with what is freed either
    signal.raise_signal(signal.SIGTERM)
    assert len(came) == heard


def test_one_ctrl_c_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a scheduler signals the supervisor and its workers, and the supervisor passes it on."""
    now = [100.0]
    monkeypatch.setattr("headway.training.stop.time.monotonic", lambda: now[0])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where tests run behind a shell
    try:
        with StopSignals() as signals:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            assert signals.stop and signals.name == "SIGINT"
            now[0] += 2.0
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
