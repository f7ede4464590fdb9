"""The watchdog names the right worker, at the right time, and nobody else."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from headway.config.sections.supervise import SuperviseConfig
from headway.core.coordination import heartbeat
from headway.core.coordination.heartbeat import Heartbeat, Phase, Reading, read_heartbeat
from headway.core.process.table import DEAD, STOPPED, TRACED, ProcessState
from headway.core.process.waiting import wait_until
from headway.run.supervisor.watchdog import Finding, Watchdog, stragglers
from support.waits import LONG

CONFIG = SuperviseConfig()


def reading(**values: object) -> Reading:
    """A worker in the middle of training, whose last beat was at second 100."""
    plain = Reading(
        pid=10, phase=Phase.COMPUTE, step=20, beat_seconds=100.0, phase_seconds=100.0, collectives=40, waits_for="",
        own_seconds=20.0, data_seconds=0.0, first_step=5, steps_seconds=99.0,
    )  # fmt: skip
    return replace(plain, **values)  # type: ignore[arg-type]


def running(*states: str, status: int | None = None) -> dict[int, ProcessState | None]:
    return {rank: ProcessState(10 + rank, state, 1, 10 + rank, status) for rank, state in enumerate(states)}


@pytest.mark.parametrize("shared", [True, False])
def test_a_page_says_what_was_told_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENODEV, "what a FUSE mount without shared memory says")

    if not shared:
        monkeypatch.setattr(mmap, "mmap", refuse)
    heart = Heartbeat(tmp_path / "heartbeat-0")
    heart.beat(Phase.DATA, 7)
    heart.beat(Phase.COMPUTE)
    heart.begin("sum of gradients", everyone=True)
    found = read_heartbeat(tmp_path / "heartbeat-0")
    assert found is not None
    told = (found.phase, found.step, found.first_step, found.collectives, found.waits_for)
    assert told == (Phase.COMPUTE, 7, 7, 1, "sum of gradients")
    before = found.own_seconds
    heart.end()
    heart.begin("between stages", everyone=False)
    heart.end()
    heart.beat(Phase.DATA, 8)
    found = read_heartbeat(tmp_path / "heartbeat-0")
    assert found is not None and found.own_seconds >= before and found.steps_seconds > 0
    assert (found.step, found.first_step, found.collectives, found.waits_for) == (8, 7, 1, "")
    assert found.begun == found.finished == (2, "between stages")
    # One that an error has ended is no longer waited in, and was not finished.
    monkeypatch.setattr(heartbeat, "_heartbeat", heart)
    with suppress(RuntimeError), heartbeat.exchanging("gather of numbers", everyone=True):
        raise RuntimeError("connection closed by peer")
    found = read_heartbeat(tmp_path / "heartbeat-0")
    assert found is not None and (found.begun, found.waits_for) == ((3, "gather of numbers"), "")
    assert found.finished == (2, "between stages")
    assert read_heartbeat(tmp_path / "nobody") is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is a file")
@pytest.mark.parametrize("leads", ["nowhere", "elsewhere"])
def test_a_link_that_leads_to_no_page_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: str) -> None:
    """A healthy worker would be ended as one that did not begin: /proc may be of another process namespace."""
    path, other, link = tmp_path / "heartbeat-0", tmp_path / "elsewhere", Path.symlink_to
    (tmp_path / "elsewhere").touch()
    monkeypatch.setattr(Path, "symlink_to", lambda path, _: link(path, tmp_path / leads))
    Heartbeat(path).beat(Phase.DATA, 7)
    assert not path.is_symlink() and other.read_bytes() == b"" and not (tmp_path / "nowhere").exists()
    found = read_heartbeat(path)
    assert found is not None and found.step == 7


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is a file")
def test_a_page_is_on_no_disk_and_outlives_its_worker(tmp_path: Path) -> None:
    """A store to a page of a disk that hangs would wait; of one that is broken, it would end the worker."""
    path = tmp_path / "heartbeat-0"
    script = (
        "import pathlib, sys\n"
        "from headway.core.coordination.heartbeat import Heartbeat, Phase\n"
        "heart = Heartbeat(pathlib.Path(sys.argv[1]))\n"
        "heart.beat(Phase.DATA, 7)\n"
        "input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE) as worker:
        assert wait_until(lambda: (found := read_heartbeat(path)) is not None and found.step == 7, LONG)
        assert path.readlink().is_relative_to(f"/proc/{worker.pid}")
        page = os.open(path, os.O_RDONLY)
        worker.kill()
    found = read_heartbeat(page)
    os.close(page)
    assert found is not None and found.step == 7 and read_heartbeat(path) is None


@pytest.mark.parametrize("shared", [True, False])
def test_a_page_is_never_found_half_written(tmp_path: Path, shared: bool) -> None:
    """A supervisor that looked while a worker wrote once took it for one that had been silent for 22 hours."""
    path, start = tmp_path / "heartbeat-0", time.monotonic()
    script = (
        "import mmap, sys, pathlib\n"
        "from headway.core.coordination.heartbeat import Heartbeat, Phase\n"
        "def refuse(*_): raise OSError(19, 'No such device')\n"
        f"mmap.mmap = mmap.mmap if {shared} else refuse\n"
        "heart = Heartbeat(pathlib.Path(sys.argv[1]))\n"
        "while True:\n"
        "    heart.beat(Phase.DATA, 7)\n"
        "    heart.beat(Phase.COMPUTE)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", script, str(path)])
    try:
        assert wait_until(lambda: (found := read_heartbeat(path)) is not None and found.step == 7, LONG)
        for _ in range(50_000):
            found = read_heartbeat(path)
            assert found is not None and found.beat_seconds > start and found.phase_seconds > start
            assert (found.pid, found.step) == (worker.pid, 7) and found.phase in (Phase.DATA, Phase.COMPUTE)
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 30.0),
        ({"step": 5, "steps_seconds": 0.0}, 900.0),  # the first step compiles
        ({"step": 3}, 30.0),  # a rollback has gone to before the attempt's first step
        ({"first_step": -1, "step": 0, "phase": Phase.START}, 900.0),
        ({"phase": Phase.START}, 900.0),  # a new shape compiles
        ({"phase": Phase.CHECKPOINT}, 900.0),
        ({"phase": Phase.DATA}, 300.0),
        ({"phase": Phase.EVALUATION}, 30.0),
    ],
)
def test_a_worker_without_a_beat_is_hung_after_the_limit_of_its_phase(changes: dict[str, object], limit: float) -> None:
    silent = reading(**changes)
    for seconds, hung in ((limit - 0.5, False), (limit + 0.5, True)):
        found = Watchdog(CONFIG).look(100.0 + seconds, {0: silent}, running("S"))
        assert (found is not None and found.kind == "hung") == hung
    assert found is not None and (found.kind, found.rank) == ("hung", 0) and str(silent.phase) in found.what


def test_waiting_for_data_is_said_once_before_it_is_a_hang() -> None:
    dog, waiting = Watchdog(CONFIG), {0: reading(phase=Phase.DATA)}
    seen = [dog.look(100.0 + second, waiting, running("S")) for second in range(0, 60, 4)]
    (found,) = [found for found in seen if found is not None]
    assert (found.kind, found.what) == ("waits", "has waited 32 s for data of step 21")
    assert Watchdog(CONFIG, compiles=True).limit_seconds(reading(phase=Phase.EVALUATION)) == 900.0


@pytest.mark.parametrize(
    ("phase", "steps_seconds", "said_at"),
    [(Phase.CHECKPOINT, 99.0, 32), (Phase.END, 99.0, 32), (Phase.START, 0.0, 56), (Phase.COMPUTE, 0.0, 56)],
)
def test_what_may_take_long_is_named_within_a_minute(phase: Phase, steps_seconds: float, said_at: int) -> None:
    dog, busy = Watchdog(CONFIG), {0: reading(phase=phase, steps_seconds=steps_seconds)}
    seen = {second: dog.look(100.0 + second, busy, running("S")) for second in range(0, 100, 4)}
    ((second, found),) = [(second, found) for second, found in seen.items() if found is not None]
    assert (second, found.kind) == (said_at, "waits") and f"phase '{phase}', which may take 15 m" in found.what


def test_long_steps_raise_the_limit() -> None:
    dog = Watchdog(CONFIG)
    for tick in range(12):
        now, step = 1000.0 + 4.0 * tick, 20 + tick // 2
        ended = 1000.0 + 8.0 * (tick // 2)
        assert dog.look(now, {0: reading(step=step, steps_seconds=ended, beat_seconds=now)}, running("S")) is None
    assert dog.step_seconds == pytest.approx(8.0)
    assert dog.limit_seconds(reading()) == pytest.approx(80.0)


def steps_of(seconds: float, steps: int, first_silence: float | None = None) -> list[Reading]:
    """Two beats each, from second 1000, and then nothing more: the last one begins a backward pass."""
    beats, now = [], 1000.0
    for step in range(steps + 1):
        half = first_silence if step == 0 and first_silence is not None else seconds / 2
        page = reading(step=step, first_step=0, steps_seconds=now if step else 0.0)
        beats.append(replace(page, phase=Phase.COMPUTE, beat_seconds=now))
        beats.append(replace(page, phase=Phase.BACKWARD, beat_seconds=now + half))
        now += half + seconds / 2
    return beats


def watch(dog: Watchdog, *workers: list[Reading], until: float, every: float = 0.5) -> list[tuple[float, Finding]]:
    """What is found, and when, by looks at pages on which these are written one after the other, up to the first that
    ends the attempt."""
    found, now = [], min(beats[0].beat_seconds for beats in workers)
    while now <= until:
        pages = {rank: [r for r in beats if r.beat_seconds <= now] for rank, beats in enumerate(workers)}
        seen = dog.look(now, {rank: beats[-1] for rank, beats in pages.items()}, running(*"S" * len(workers)))
        found += [] if seen is None else [(now, seen)]
        if seen is not None and seen.kind != "waits":
            break
        now += every
    return found


@pytest.mark.parametrize("seconds", [0.5, 8.0, 50.0, 100.0, 1000.0])
def test_a_slow_run_that_is_well_raises_no_alarm(seconds: float) -> None:
    beats = steps_of(seconds, 6)
    found = watch(Watchdog(CONFIG), beats, until=beats[-1].beat_seconds + seconds / 2 - 1, every=min(seconds / 8, 4.0))
    # Of the first step nobody knows how long it may take, so that a silence of a minute is told.
    assert [(seen.kind, when) for when, seen in found if when > 1000.0 + seconds] == []
    assert [seen.kind for _, seen in found] == ["waits"] * (seconds > 110)


@pytest.mark.parametrize(
    ("seconds", "steps", "named", "ended"),
    [
        (0.5, 1, None, 30.0),
        (0.5, 5, None, 30.0),
        (8.0, 1, 30.0, 40.0),  # of steps nothing is known but the silences of the first
        (8.0, 5, 30.0, 80.0),
        (36.0, 5, 54.0, 360.0),
        (50.0, 1, 75.0, 250.0),
        (50.0, 5, 75.0, 500.0),
    ],
)
def test_a_hang_is_named_by_the_longest_silence_and_ended_by_the_length_of_steps(
    seconds: float, steps: int, named: float | None, ended: float
) -> None:
    beats = steps_of(seconds, steps)
    silent_since = beats[-1].beat_seconds
    found = watch(Watchdog(CONFIG), beats, until=silent_since + 1000.0, every=0.2)
    assert [seen.kind for _, seen in found] == (["hung"] if named is None else ["waits", "hung"])
    # What is seen of a silence is shorter than it was, by a look.
    assert found[-1][0] - silent_since == pytest.approx(ended, abs=3.0)
    assert named is None or found[0][0] - silent_since == pytest.approx(named, abs=1.0)
    assert all(seen.rank == 0 and "in phase 'backward'" in seen.what for _, seen in found)


@pytest.mark.parametrize(("steps", "named", "ended"), [(1, 60.0, 200.0), (2, None, 30.0)])
def test_a_slow_start_of_a_quick_model_gives_no_more_than_its_second_step_time(
    steps: int, named: float | None, ended: float
) -> None:
    beats = steps_of(0.5, steps, first_silence=20.0)
    found = watch(Watchdog(CONFIG), beats, until=beats[-1].beat_seconds + 300.0, every=0.2)
    assert [seen.kind for _, seen in found] == (["hung"] if named is None else ["waits", "hung"])
    assert found[-1][0] - beats[-1].beat_seconds == pytest.approx(ended, abs=3.0)


def test_a_slow_evaluation_is_told_once_and_is_usual_then() -> None:
    """One that is slower than any step: of each of its batches it would be told again."""
    beats = steps_of(2.0, 3)
    for number in range(6):
        now = beats[-1].beat_seconds + (40.0 if number else 1.0)
        beats.append(replace(beats[-1], phase=Phase.EVALUATION, step=4 + number // 3, beat_seconds=now))
    found = watch(Watchdog(CONFIG), beats, until=beats[-1].beat_seconds + 39.0)
    assert [seen.kind for _, seen in found] == ["hung"], "longer than ten steps, and than half a minute"
    patient = Watchdog(SuperviseConfig(hang_steps=25.0))
    found = watch(patient, beats, until=beats[-1].beat_seconds + 39.0)
    assert [(seen.kind, when - beats[8].beat_seconds) for when, seen in found] == [("waits", 30.0)]
    assert patient.patience_seconds(beats[-1]) == pytest.approx(120.0, abs=2.0)
    assert patient.patience_seconds(beats[7]) == 30.0, "steps are judged by what steps take"


def test_who_waits_for_late_data_of_another_one_shows_no_usual_silence() -> None:
    dog, late, here = Watchdog(CONFIG), steps_of(2.0, 3), steps_of(2.0, 3)
    now = late[-1].beat_seconds
    here.append(replace(here[-1], waits_for="sum of gradients", collectives=41, beat_seconds=now + 1.0))
    late.append(replace(late[-1], phase=Phase.DATA, beat_seconds=now + 1.0))
    late.append(replace(here[-1], beat_seconds=now + 201.0))  # for a moment both wait
    for beats in (here, late):
        beats.append(replace(here[3], phase=Phase.RECORD, step=4, steps_seconds=now + 202.0, beat_seconds=now + 202.0))
        beats.append(replace(beats[-1], phase=Phase.COMPUTE, beat_seconds=now + 202.5))
    found = watch(dog, here, late, until=now + 203.0)
    assert [(seen.kind, seen.rank) for _, seen in found] == [("waits", 1)]
    assert dog.patience_seconds(here[-1]) == CONFIG.hang_seconds


@pytest.mark.parametrize(
    ("seconds", "timeout", "ended"),
    # Ten steps of a minute are as long as anybody waits, and an exchange may have begun before the backward pass ended.
    [(60.0, 600.0, 540.0), (160.0, 600.0, 520.0), (8.0, 600.0, 80.0), (8.0, 60.0, 54.0), (8.0, 20.0, 30.0)],
)
def test_who_hangs_is_ended_before_the_others_give_up(seconds: float, timeout: float, ended: float) -> None:
    """Or one of them would be blamed, with the error of its exchange."""
    hangs, waits = steps_of(seconds, 4), steps_of(seconds, 4)
    now = waits[-1].beat_seconds
    waits.append(replace(waits[-1], waits_for="sum of gradients", collectives=41, beat_seconds=now + 0.1))
    found = watch(Watchdog(CONFIG, timeout_seconds=timeout), hangs, waits, until=now + 1000.0)
    when, seen = found[-1]
    assert (seen.kind, seen.rank, seen.suspects) == ("hung", 0, (0,))
    assert when - now == pytest.approx(ended, abs=1.5)


def test_who_lets_others_wait_and_lives_is_not_ended() -> None:
    lives = [reading(beat_seconds=100.0 + 10 * tick, phase=Phase.CHECKPOINT) for tick in range(100)]
    waits = [reading(waits_for="gather of numbers", collectives=41)]
    assert watch(Watchdog(CONFIG), lives, waits, until=1000.0) == []


def test_the_worker_that_the_others_wait_for_is_named() -> None:
    waiting = reading(waits_for="gather of numbers", collectives=41)
    found = Watchdog(CONFIG).look(140.0, {0: waiting, 1: reading(), 2: waiting}, running("S", "R", "S"))
    assert found is not None and (found.rank, found.suspects) == (1, (1,))
    # One that has begun the same exchange waits; one that has not begun it does not.
    assert stragglers({0: reading(waits_for="x"), 1: reading()}) == [1]
    assert stragglers({0: reading(waits_for="x"), 1: reading(waits_for="x")}) == [0, 1]
    # While the one behind saves a checkpoint, those who wait for it are not hung.
    saving = reading(phase=Phase.CHECKPOINT)
    found = Watchdog(CONFIG).look(140.0, {0: saving, 1: waiting}, running("S", "S"))
    assert found is not None and (found.kind, found.rank) == ("waits", 0)


def test_a_stopped_worker_is_named_before_it_is_hung_and_a_traced_one_never() -> None:
    dog = Watchdog(CONFIG)
    readings = {0: reading(beat_seconds=100.0, phase=Phase.CHECKPOINT)}
    seen = [dog.look(100.0 + second, readings, running(STOPPED)) for second in range(7)]
    assert seen[:5] == [None] * 5
    assert seen[6] is not None and "SIGSTOP" in seen[6].what
    dog = Watchdog(CONFIG)
    assert dog.look(500.0, {0: reading()}, running(TRACED)) is None
    assert dog.look(500.0, {0: reading()}, running("S")) is not None


def test_the_supervisors_own_pause_is_not_blamed_on_workers() -> None:
    dog = Watchdog(CONFIG)
    assert dog.look(101.0, {0: reading()}, running("S")) is None
    assert dog.look(200.0, {0: reading()}, running("S")) is None, "it was stopped itself"
    assert dog.look(202.0, {0: reading()}, running("S")) is None
    seen = [dog.look(202.0 + second, {0: reading()}, running("S")) for second in range(1, 32, 3)]
    assert seen[-1] is not None, "but later they have to show that they live"


@pytest.mark.parametrize(
    ("status", "kind"), [(9, "died"), (11, "died"), (1 << 8, "died"), (0, None), (75 << 8, None), (None, None)]
)
def test_how_a_dead_worker_ended(status: int | None, kind: str | None) -> None:
    found = Watchdog(CONFIG).look(
        101.0, {0: reading(), 1: reading()}, {**running("S"), 1: running(DEAD, DEAD, status=status)[1]}
    )
    assert (found.kind if found else None) == kind
    if found and status in (9, 11):
        assert (found.rank, found.signal) == (1, status)


def test_of_several_dead_the_one_to_blame_is_named() -> None:
    """One lost its connection to the one that was killed, another one was ended by the agent."""
    ends = {0: 15, 1: 1 << 8, 2: 9}
    states: dict[int, ProcessState | None] = {rank: ProcessState(9, DEAD, 1, 9, end) for rank, end in ends.items()}
    found = Watchdog(CONFIG).look(101.0, dict.fromkeys(ends, reading()), states)
    assert found is not None and (found.rank, found.signal) == (2, 9)
    # The agent has taken leave of the killed one, and of one that had ended by itself.
    states |= {2: None, 3: None}
    readings = {**dict.fromkeys(ends, reading()), 3: reading(phase=Phase.END)}
    found = Watchdog(CONFIG).look(101.0, readings, states)
    assert found is not None and (found.kind, found.rank, found.signal) == ("died", 2, None)


def test_a_rollback_to_before_the_first_step_hides_no_slow_worker() -> None:
    dog, named = Watchdog(CONFIG), []
    for tick in range(120):
        now, step = 1000.0 + tick * 0.5, 25 - 20 * (tick > 4) + tick
        a, b = (reading(step=step, first_step=300, own_seconds=s * tick, beat_seconds=now) for s in (0.1, 0.5))
        found = dog.look(now, {0: a, 1: b}, running("S", "R"))
        named += [] if found is None else [(tick, found)]
    ((tick, found),) = named
    assert (found.kind, found.rank) == ("slow", 1) and tick * 0.5 < 60.0
    assert "0.5 s" in found.what and "0.1 s" in found.what, "steps are counted from after the rollback"


def test_a_slow_worker_is_named_once_and_a_healthy_one_never() -> None:
    dog, named = Watchdog(CONFIG), []
    for tick in range(120):
        now, steps = 1000.0 + tick * 0.5, tick  # a step of half a second, for all; one computes all of it
        healthy = reading(step=20 + steps, own_seconds=0.1 * steps, beat_seconds=now, collectives=steps)
        slow = reading(step=20 + steps, own_seconds=0.5 * steps, beat_seconds=now, collectives=steps)
        found = dog.look(now, {0: healthy, 1: slow, 2: healthy}, running("S", "R", "S"))
        if found is not None:
            named.append((tick, found))
    assert len(named) == 1
    tick, found = named[0]
    assert (found.kind, found.rank) == ("slow", 1) and tick * 0.5 < 60.0
    assert "0.5 s" in found.what and "0.1 s" in found.what and "computing" in found.what
    even = Watchdog(CONFIG)
    for tick in range(120):
        now = 1000.0 + tick * 0.5
        a, b = (reading(step=20 + tick, own_seconds=s * tick, beat_seconds=now) for s in (0.1, 0.25))
        assert even.look(now, {0: a, 1: b}, running("S", "S")) is None
