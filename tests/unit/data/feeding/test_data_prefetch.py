"""Reading ahead."""

from __future__ import annotations

import threading
import time
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headway.data.feeding import prefetch
from headway.data.feeding.feed import Prefetcher


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


def threads() -> int:
    return sum(thread.name == "headway-prefetch" for thread in threading.enumerate())


def test_steps_come_in_order_with_their_lanes() -> None:
    with Prefetcher(Counting(), range(2, 4), 5, 9) as prefetcher:
        items = list(prefetcher)
    assert [step for step, _ in items] == [5, 6, 7, 8]
    assert all(list(lanes) == [2, 3] for _, lanes in items)
    assert items[1][1][3][0]["x"].tolist() == [6, 3]
    with pytest.raises(StopIteration):
        prefetcher.next()
    assert threads() == 0


def test_it_reads_ahead_but_not_further_than_asked() -> None:
    feed = Counting()
    with Prefetcher(feed, [0], 0, 100, depth=3) as prefetcher:
        time.sleep(0.2)
        # Three wait in the queue and one is in the thread's hands.
        assert len(feed.read) == 4
        prefetcher.next()
        time.sleep(0.2)
        assert len(feed.read) == 5
    assert threads() == 0


def test_errors_come_at_their_step() -> None:
    with Prefetcher(Counting(fails_at=2), [0], 0, 10) as prefetcher:
        assert prefetcher.next()[0] == 0
        assert prefetcher.next()[0] == 1
        with pytest.raises(ValueError, match="step 2 cannot be read"):
            prefetcher.next()
    assert threads() == 0


def test_waiting_is_measured() -> None:
    with Prefetcher(Counting(seconds=0.05), [0], 0, 4) as prefetcher:
        list(prefetcher)
        assert 0.15 < prefetcher.wait_seconds < 1.0
    with Prefetcher(Counting(), [0], 0, 4) as prefetcher:
        for _ in prefetcher:
            time.sleep(0.02)
        assert prefetcher.wait_seconds < 0.05


def test_closing_early_and_twice_leaves_no_thread() -> None:
    for taken in (0, 1, 5):
        prefetcher = Prefetcher(Counting(), [0, 1], 0, 10**6)
        for _ in range(taken):
            prefetcher.next()
        prefetcher.close()
        prefetcher.close()
        assert list(prefetcher) == []
    assert threads() == 0


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


def test_a_wish_to_stop_is_heard_while_data_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_CLOSE_SECONDS", 0.1)
    feed, wish = Stuck(at=2), threading.Event()
    timer = threading.Timer(0.3, wish.set)
    timer.start()
    with Prefetcher(feed, [0], 0, 10, stopped=wish.is_set) as prefetcher:
        assert [step for step, _ in prefetcher] == [0, 1]
        start = time.monotonic()
    assert time.monotonic() - start < 2, "closing does not wait for data either"
    feed.comes.set()
    while threads():
        time.sleep(0.01)


def test_batches_that_are_ready_are_handed_out_whatever_is_wished() -> None:
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
    value = [{"x": torch.zeros(1), "y": (torch.ones(1), "name")}, Pair(torch.zeros(2), 3)]
    result = prefetch._pinned(value)
    assert len(pinned) == 3
    assert isinstance(result[1], Pair) and isinstance(result[0]["y"], tuple)
