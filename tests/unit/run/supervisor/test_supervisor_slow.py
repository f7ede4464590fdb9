"""A worker that holds the others up is named within a minute, however long steps are, and one that is well never."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from headway.config.sections.supervise import SuperviseConfig
from headway.core.coordination.heartbeat import Phase, Reading
from headway.core.process.table import ProcessState
from headway.run.supervisor.watchdog import Watchdog

RUNNING: dict[int, ProcessState | None] = {rank: ProcessState(10 + rank, "R", 1, 10 + rank) for rank in (0, 1)}


def named_at(parts: Callable[[int], tuple[float, float]], begin: float, seconds: float) -> list[tuple[float, int]]:
    """When a watchdog names whom, in a run of two workers.

    Args:
        parts: What each computes in a step, in seconds, by the step's number. The first worker does its part at the
            beginning of a step and the second at its end.
        begin: When the first step begins, relative to a look.
        seconds: How long the run is looked at.
    """
    dog, found = Watchdog(SuperviseConfig()), list[tuple[float, int]]()
    step, own, at = 1, [0.0, 0.0], begin
    for look in range(int(seconds * 5)):
        now = look * 0.2
        while now >= at + max(parts(step)):
            own = [before + part for before, part in zip(own, parts(step), strict=True)]
            at, step = at + max(parts(step)), step + 1
        first, second = parts(step)
        since = max(0.0, now - at)
        done = (own[0] + min(since, first), own[1] + max(0.0, since - (max(first, second) - second)))
        readings = {
            rank: Reading(
                10 + rank, Phase.COMPUTE, step, 1000.0 + now, 1000.0, step, "", done[rank], 0.0, 0, 1000.0 + at
            )
            for rank in (0, 1)
        }
        seen = dog.look(1000.0 + now, readings, RUNNING)
        if seen is not None:
            assert seen.kind == "slow"
            found.append((now, seen.rank))
    return found


@pytest.mark.parametrize("slow", [0.5, 3.0, 5.0, 7.9, 8.1, 9.9, 10.1, 12.0, 15.0, 20.0])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_takes_five_times_as_long_is_named_within_a_minute(slow: float, rank: int) -> None:
    usual = slow / 5
    for well in range(1, 9):  # it becomes slow after so many steps, at any place in a window

        def parts(step: int, well: int = well) -> tuple[float, float]:
            mine = slow if step > well else usual
            return (mine, usual) if rank == 0 else (usual, mine)

        ((at, who),) = named_at(parts, 0.1, 200.0)
        assert who == rank and at - well * usual <= 61.0


@pytest.mark.parametrize("seconds", [0.5, 3.0, 4.1, 6.0, 8.0, 10.0, 11.0, 13.0, 25.0])
def test_nobody_is_named_for_less_than_the_factor_or_a_single_step(seconds: float) -> None:
    def even(slower: float, rank: int) -> tuple[float, float]:
        return (slower, seconds) if rank == 0 else (seconds, slower)

    for begin, rank in itertools.product((0.0, 0.07, 0.13), (0, 1)):
        assert named_at(lambda step, rank=rank: even(2.8 * seconds, rank), begin, 300.0) == []
        for one in (3, 4):  # five times as long, once
            assert named_at(lambda step, r=rank, o=one: even((1 + 4 * (step == o)) * seconds, r), begin, 300.0) == []
