"""OpenMP's threads spin by themselves, sleep when they are told to, and spin again."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.machine.cgroups import threads_left
from headway.core.machine.openmp import WaitSwitch, chosen_by_user, libgomp_paths
from headway.core.machine.system import Machine

#: A team of a thread per processor does nothing, fifty times, with 5 ms between; printed is what its other threads have
#: run meanwhile: as the library has them wait, asleep, and as before.
PROBE = """
import ctypes, sys, threading, time
from contextlib import suppress
from pathlib import Path
from headway.core.machine.openmp import WaitSwitch, find_libgomp

assert find_libgomp() is None, "none is loaded yet"
ctypes.CDLL(sys.argv[1])
library = find_libgomp()
size = max(2, library.omp_get_num_procs())
switch = WaitSwitch(library, size)
nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)

def ran():
    before = cpu()
    for _ in range(50):
        library.GOMP_parallel(nothing, None, size, 0)
        time.sleep(0.005)
    mine = str(threading.get_native_id())
    return sum(seconds - before.get(name, 0.0) for name, seconds in cpu().items() if name != mine)

def cpu():
    found = {}
    for path in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # those of a team that was let go end meanwhile
            found[path.name] = int((path / "schedstat").read_text().split()[0]) / 1e9
    return found

def idle():
    return [thread.name for thread in threading.enumerate() if thread.name == "headway-idle-team"]

library.GOMP_parallel(nothing, None, size, 0)
found = [ran()]
assert not switch.sleeps
switch.sleep(); switch.sleep()
assert switch.sleeps and len(idle()) == 1
found.append(ran())
switch.spin(); switch.spin()
assert not switch.sleeps and not idle()
found.append(ran())
print(*found)
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no time of single threads to be had (Linux)")
def test_threads_sleep_when_they_are_told_to() -> None:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    libraries = sorted((Path(spec.origin).parent / "lib").glob("libgomp*"))
    if not libraries:
        pytest.skip("this PyTorch brings no libgomp of its own")
    environment = {"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)}
    probe = subprocess.run(
        [sys.executable, "-c", PROBE, str(libraries[0])], env=environment, capture_output=True, text=True, check=False
    )
    assert probe.returncode == 0, probe.stderr
    spins, sleeps, again = map(float, probe.stdout.split())
    assert sleeps < 0.3 * spins and sleeps < 0.3 * again, (spins, sleeps, again)


def test_what_the_user_has_chosen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert chosen_by_user() is None
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert chosen_by_user() == "OMP_WAIT_POLICY=PASSIVE"


def test_of_several_copies_that_of_torch_is_switched() -> None:
    line = "7f00-7f01 r-xp 00000000 08:01 17    "
    other, ours = "/v/scikit_learn.libs/libgomp-a34b.so.1.0.0", "/v/my packages/torch/lib/libgomp.so.1"
    maps = "\n".join(line + path for path in (other, other, ours, "/usr/lib/libm.so.6", "[heap]"))
    assert libgomp_paths(maps) == [ours, other]


@pytest.mark.parametrize(("room", "sleeps"), [(None, True), (40, True), (39, False)])
def test_no_idle_team_is_started_where_threads_are_scarce(room: int | None, sleeps: bool) -> None:
    teams: list[int] = []
    library: Any = SimpleNamespace(
        omp_get_num_procs=lambda: 10, GOMP_parallel=lambda *given: teams.append(given[2].value)
    )
    switch = WaitSwitch(library, 2, workers=2, room=lambda: room)
    switch.sleep()
    assert switch.sleeps == sleeps
    assert teams == ([10] if sleeps else [])
    switch.spin()


def test_the_limits_of_all_groups_above_count(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/pids.max": "100\n",
        "sys/fs/cgroup/pod/pids.current": "70\n",
        "sys/fs/cgroup/pod/box/pids.max": "max\n",
        "sys/fs/cgroup/pod/box/pids.current": "50\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads_left(Machine(root=tmp_path)) == 30
    assert threads_left(Machine(root=tmp_path / "sys")) is None
