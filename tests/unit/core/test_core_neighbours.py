"""When OpenMP's threads sleep while they wait, by tables of readings; and readings from a recorded machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from headway.core.machine.neighbours import Load, LoadMeter, Start, choose_at_start, choose_wait_mode, look_at_start
from headway.core.machine.system import Machine


@pytest.mark.parametrize(
    ("threads", "allowed", "runnable", "pressure", "mode"),
    [
        (2, 2, 0.0, 0.0, "spin"),
        (2, 2, 1.0, 0.0, "sleep"),
        (2, 2, 0.0, 0.5, "sleep"),
        (4, 8, 4.0, 0.0, "spin"),
        (4, 8, 4.5, 0.0, "sleep"),
        (4, 2, 0.0, 0.0, "sleep"),  # more threads than processors, without any neighbour
        (2, 2, None, None, "spin"),  # nothing is known
        (2, 2, None, 0.19, "spin"),
    ],
)
def test_the_mode_at_start(
    threads: int, allowed: int, runnable: float | None, pressure: float | None, mode: str
) -> None:
    assert choose_at_start(Start(threads, allowed, runnable, pressure)) == mode


@pytest.mark.parametrize(
    ("load", "from_spin", "from_sleep"),
    [
        (Load(), "spin", "spin"),
        (Load(waited=0.0, others=0.0, stolen=0.0, throttled=0.0), "spin", "spin"),
        (Load(waited=0.01), "spin", "spin"),
        (Load(waited=0.03), "spin", "sleep"),  # as it was: the mode must not change at every look
        (Load(waited=0.06), "sleep", "sleep"),
        (Load(waited=0.0, stolen=0.3), "sleep", "sleep"),
        (Load(throttled=0.2), "sleep", "sleep"),
        (Load(waited=0.0, others=60.0), "spin", "spin"),  # busy neighbours on processors that are not needed here
    ],
)
def test_the_mode_while_a_run_goes_on(load: Load, from_spin: str, from_sleep: str) -> None:
    assert (choose_wait_mode(load, "spin", 8), choose_wait_mode(load, "sleep", 8)) == (from_spin, from_sleep)


@pytest.mark.parametrize(("waited", "from_spin", "from_sleep"), [(0.04, "spin", "spin"), (0.1, "spin", "sleep")])
def test_two_threads_sleep_only_for_a_larger_loss(waited: float, from_spin: str, from_sleep: str) -> None:
    """One busy process takes a third of two threads' time."""
    load = Load(waited=waited)
    assert (choose_wait_mode(load, "spin", 2), choose_wait_mode(load, "sleep", 2)) == (from_spin, from_sleep)
    assert choose_wait_mode(Load(waited=0.33), "spin", 2) == "sleep"


class Recorded:
    """A machine of four processors, of which this process may use two."""

    def __init__(self, root: Path) -> None:
        self.machine, self._root = Machine(root=root), root
        self.write("proc/self/status", "Cpus_allowed_list:\t2-3\n")
        self.write("sys/devices/system/cpu/online", "0-3")
        self.write("proc/self/cgroup", "4:cpu,cpuacct:/job\n")
        self.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "200000")
        self.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000")

    def write(self, path: str, text: str) -> None:
        (self._root / path).parent.mkdir(parents=True, exist_ok=True)
        (self._root / path).write_text(text)

    def counters(self, *, ran: float, waited: float, busy: float, steal: float, own: float, throttled: float) -> None:
        tick = os.sysconf("SC_CLK_TCK")
        self.write("proc/self/task/71/schedstat", f"{int(ran * 1e9)} {int(waited * 1e9)} 5")
        lines = [f"cpu{n} {int(busy / 2 * tick)} 0 0 9999 9 0 0 {int(steal / 2 * tick)} 0 0" for n in (2, 3)]
        self.write("proc/stat", "\n".join(["cpu 9 9 9", f"cpu0 {99 * tick} 0 0 0 0 0 0 {9 * tick} 0 0", *lines]))
        fields = ["S", "1", *["0"] * 9, str(int(own / 2 * tick)), "0", "0", "0"]
        self.write("proc/71/stat", f"71 (a (b) c) {' '.join(fields)}")
        fields[1] = "71"  # a child
        self.write("proc/72/stat", f"72 (child) {' '.join(fields)}")
        fields[1] = "1"
        self.write("proc/73/stat", f"73 (neighbour) {' '.join(fields)}")
        self.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.stat", f"nr_throttled 3\nthrottled_time {int(throttled * 1e9)}")


def test_shares_are_of_what_lies_between_two_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    recorded = Recorded(tmp_path)
    recorded.counters(ran=50, waited=20, busy=400, steal=10, own=80, throttled=7)
    meter = LoadMeter(recorded.machine, 71)
    now[0] = 110.0
    recorded.counters(ran=56, waited=24, busy=419, steal=11, own=92, throttled=9)
    load = meter.read()
    assert load.waited == pytest.approx(0.4), "4 s of 10 s in which threads had work"
    assert load.others == pytest.approx((19 - 12) / 10), "of processors 2 and 3, less this process and its child"
    assert load.stolen == pytest.approx(1 / 20) and load.throttled == pytest.approx(0.2) and load.seconds == 10
    assert load.lost == pytest.approx(0.4)
    now[0] = 111.0
    idle = meter.read()
    assert (idle.waited, idle.others, idle.stolen, idle.throttled) == (None, 0.0, 0.0, 0.0)


def test_a_machine_that_shows_nothing_is_unknown(tmp_path: Path) -> None:
    assert LoadMeter(Machine(root=tmp_path)).read().lost == 0.0
    assert look_at_start(Machine(root=tmp_path), 2, 1) == Start(2, 1, None, None)


@pytest.mark.parametrize(("running", "workers", "others"), [(5, 1, 2.0), (5, 2, 1.5), (1, 1, 0.0)])
def test_a_start_counts_who_runs(tmp_path: Path, running: int, workers: int, others: float) -> None:
    recorded = Recorded(tmp_path)
    recorded.write("proc/stat", f"cpu 1 2 3\nprocs_running {running}\n")
    recorded.write("proc/pressure/cpu", "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\n")
    recorded.write("proc/self/task/71/stat", "71 (python) R 1 71")
    recorded.write("proc/self/task/72/stat", "72 (python) S 1 71")
    seen = look_at_start(recorded.machine, 2, workers)
    assert seen == Start(2, 2, others, 0.125), "half of the machine's processors are this process's"


def test_this_process_can_be_measured() -> None:
    meter = LoadMeter(Machine(), os.getpid())
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass
    load = meter.read()
    assert 0.0 <= load.lost <= 1.0 and load.seconds < 60
