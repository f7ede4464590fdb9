"""OpenMP's threads spin by themselves, sleep when they are told to, and spin again."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from headway.core.openmp import chosen_by_user

#: A team of a thread per processor does nothing, fifty times, with 5 ms between; printed is what its other threads have
#: run meanwhile: as the library has them wait, asleep, and as before.
PROBE = """
import ctypes, sys, threading, time
from pathlib import Path
from headway.core.openmp import WaitSwitch, find_libgomp

assert find_libgomp() is None, "none is loaded yet"
ctypes.CDLL(sys.argv[1])
library = find_libgomp()
size = max(2, library.omp_get_num_procs())
switch = WaitSwitch(library, size)
nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)

def ran():
    before = {path.name: cpu(path) for path in Path("/proc/self/task").iterdir()}
    for _ in range(50):
        library.GOMP_parallel(nothing, None, size, 0)
        time.sleep(0.005)
    mine = str(threading.get_native_id())
    after = {path.name: cpu(path) for path in Path("/proc/self/task").iterdir()}
    return sum(seconds - before.get(name, 0.0) for name, seconds in after.items() if name != mine)

def cpu(path):
    return int((path / "schedstat").read_text().split()[0]) / 1e9

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
