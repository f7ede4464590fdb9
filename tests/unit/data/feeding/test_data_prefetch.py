"""Reading ahead."""

from __future__ import annotations

import threading
import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.core.process.waiting import wait_until
from headway.data.feeding import prefetch
from headway.data.feeding.prefetch import Prefetcher
from support.waits import LONG


class Counting:
    """A feed that tells which steps were read."""

    rows = 1

    def __init__(self, fails_at: int = -1, seconds: float = 0.0) -> None:
        self.fails_at, self.seconds = fails_at, seconds
        self.read: list[tuple[int, int]] = []

    def batch(self, step: int, lane: int) -> Sequence[Any]:
        time.sleep(self.seconds)
        if step == self.fails_at:
            raise ValueError(f"step {step} cannot be read")
        self.read.append((step, lane))
        return [{"x": torch.tensor([step, lane])}]

    def rows_by_source(self, first_step: int, last_step: int) -> dict[str, int]:
        return {}


def running() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "headway-prefetch"}


@pytest.fixture
def threads() -> Callable[[], set[threading.Thread]]:
    """Those that a test has started and that go on; another test may have left some."""
    before = running()
    return lambda: running() - before


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine is busy, a thread may take seconds to come to its end."""
    monkeypatch.setattr(prefetch, "_CLOSE_SECONDS", 60.0)


def test_steps_come_in_order_with_their_lanes(threads: Callable[[], set[threading.Thread]]) -> None:
    with Prefetcher(Counting(), range(2, 4), 5, 9) as prefetcher:
        items = list(prefetcher)
    assert [step for step, _ in items] == [5, 6, 7, 8]
    assert all(list(lanes) == [2, 3] for _, lanes in items)
    assert items[1][1][3][0]["x"].tolist() == [6, 3]
    with pytest.raises(StopIteration):
        prefetcher.next()
    assert not threads()


def test_it_reads_ahead_but_not_further_than_asked(threads: Callable[[], set[threading.Thread]]) -> None:
    feed = Counting()
    with Prefetcher(feed, [0], 0, 100, depth=3) as prefetcher:
        for there in (4, 5):  # three wait in the queue and one is in the thread's hands
            assert wait_until(lambda there=there: len(feed.read) >= there, LONG)  # type: ignore[misc]
            time.sleep(0.2)
            assert len(feed.read) == there
            prefetcher.next()
    assert not threads()


def test_errors_come_at_their_step(threads: Callable[[], set[threading.Thread]]) -> None:
    with Prefetcher(Counting(fails_at=2), [0], 0, 10) as prefetcher:
        assert prefetcher.next()[0] == 0
        assert prefetcher.next()[0] == 1
        with pytest.raises(ValueError, match="step 2 cannot be read"):
            prefetcher.next()
    assert not threads()


def test_waiting_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own, which goes on while a batch is waited for and while it is used."""
    now, wait = 0.0, Prefetcher._wait

    def wait_longer_and_longer(prefetcher: Prefetcher) -> Any:
        nonlocal now
        now += 0.25 * (1 + prefetcher._next_step)
        return wait(prefetcher)

    monkeypatch.setattr(prefetch, "time", SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic))
    monkeypatch.setattr(Prefetcher, "_wait", wait_longer_and_longer)
    with Prefetcher(Counting(), [0], 0, 4) as prefetcher:
        waited = []
        for _ in prefetcher:
            waited.append(prefetcher.wait_seconds)
            now += 8.0
    assert waited == [0.25, 0.75, 1.5, 2.5] and prefetcher.wait_seconds == 2.5


def test_closing_early_and_twice_leaves_no_thread(threads: Callable[[], set[threading.Thread]]) -> None:
    for taken in (0, 1, 5):
        prefetcher = Prefetcher(Counting(), [0, 1], 0, 10**6)
        for _ in range(taken):
            prefetcher.next()
        prefetcher.close()
        prefetcher.close()
        assert list(prefetcher) == []
    assert not threads()


def test_nothing_to_do_is_nothing_done() -> None:
    with Prefetcher(Counting(), [0], 7, 7) as prefetcher:
        assert list(prefetcher) == []


class Stuck(Counting):
    """A feed whose data stop coming."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.comes = at, threading.Event()

    def batch(self, step: int, lane: int) -> Sequence[Any]:
        if step == self.at:
            self.comes.wait()
        return super().batch(step, lane)


def test_a_wish_to_stop_is_heard_while_data_do_not_come(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[], set[threading.Thread]]
) -> None:
    monkeypatch.setattr(prefetch, "_CLOSE_SECONDS", 0.1)
    feed, wish, steps = Stuck(at=2), threading.Event(), list[int]()
    with Prefetcher(feed, [0], 0, 10, stopped=wish.is_set) as prefetcher:
        for step, _ in prefetcher:
            steps.append(step)
            if step == 1:
                threading.Timer(0.3, wish.set).start()
    # Closing does not wait for data either, which come only now.
    assert steps == [0, 1] and threads()
    feed.comes.set()
    assert wait_until(lambda: not threads(), LONG)


def test_batches_that_are_ready_are_handed_out_whatever_is_wished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_LOOK_SECONDS", 60.0)
    with Prefetcher(Counting(seconds=0.01), [0], 0, 5, stopped=lambda: True) as prefetcher:
        assert len(list(prefetcher)) == 5


def test_going_back_waits_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset need not bear two threads."""
    monkeypatch.setattr(prefetch, "_CLOSE_SECONDS", 0.01)
    feed = Stuck(at=1)
    with Prefetcher(feed, [0], 0, 3) as prefetcher:
        prefetcher.next()
        threading.Timer(0.3, feed.comes.set).start()
        prefetcher.rewind(0)
        assert feed.comes.is_set() and [step for step, _ in prefetcher] == [0, 1, 2]


Pair = namedtuple("Pair", "a b")


def test_pinning_reaches_nested_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    elsewhere, sparse = torch.zeros(1, device="meta"), torch.eye(2).to_sparse()
    value = [{"x": torch.zeros(1), "y": (torch.ones(1), "name")}, Pair(torch.zeros(2), 3), elsewhere, sparse]
    result = prefetch._pinned(value)
    assert len(pinned) == 3, "page-locked memory is for dense tensors of the host"
    assert result[2] is elsewhere and result[3] is sparse
    assert isinstance(result[1], Pair) and isinstance(result[0]["y"], tuple)
