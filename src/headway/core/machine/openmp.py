"""How OpenMP's threads wait for their next piece of work: spinning, or asleep.

GNU's library (libgomp, which PyTorch uses on Linux) spins for some milliseconds before a thread sleeps. On processors
of its own that is fastest. Beside other busy processes it takes the time that the thread with the work needs, and a
step takes many times as long. `OMP_WAIT_POLICY` and `GOMP_SPINCOUNT` are read once, when the library is loaded. But it
spins a few microseconds only while it has more threads than there are processors, and that can be changed at any time
(`gomp_managed_threads` and `gomp_throttled_spin_count_var` in its `config/linux/wait.h`): a team of idle threads makes
them more. Which thread computes what does not change, and so no bit does.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

from headway.core.machine.cgroups import threads_left
from headway.core.machine.system import Machine

#: By these the user chooses how threads wait; then nothing is changed here.
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
#: Time for the idle team to come up. It takes well under a millisecond where a processor is free.
_START_SECONDS = 5.0


def chosen_by_user() -> str | None:
    """Return the variable by which the user has chosen how threads wait, as `NAME=value`; None if none is set."""
    return next((f"{name}={os.environ[name]}" for name in WAIT_VARIABLES if os.environ.get(name)), None)


def find_libgomp() -> ctypes.CDLL | None:
    """Return GNU's OpenMP library if it is loaded; None if this process uses another one, or none.

    Other packages may bring copies of their own. PyTorch's is the one whose threads compute.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return None
    for path in libgomp_paths(maps):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            assert library.GOMP_parallel and library.omp_get_num_procs
        except (OSError, AttributeError):  # replaced on disk meanwhile, or too old
            continue
        return library
    return None


def libgomp_paths(maps: str) -> list[str]:
    """Return the loaded copies of libgomp that a process's memory map names, PyTorch's own first."""
    lines = (line for line in maps.splitlines() if "/" in line and "libgomp" in line.rpartition("/")[2])
    paths = dict.fromkeys(line[line.index("/") :] for line in lines)
    return sorted(paths, key=lambda path: not {"torch", "torch.libs"} & set(Path(path).parts))


class WaitSwitch:
    """Switches whether this process's OpenMP threads sleep at once, or spin first.

    Args:
        library: GNU's OpenMP library.
        threads: Size of the team that computes.
        workers: Processes here that may all do this at the same time.
        room: Returns how many more threads may be started; None without a limit.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        threads: int,
        workers: int = 1,
        room: Callable[[], int | None] = lambda: threads_left(Machine()),
    ) -> None:
        self._library = library
        self._workers = workers
        self._room = room
        # More threads than processors, with those that compute. A team counts the thread that has it, as they do.
        self._size = max(2, library.omp_get_num_procs() - threads + 2)
        self._end: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def sleeps(self) -> bool:
        """Whether threads sleep at once."""
        return self._thread is not None

    def sleep(self) -> None:
        """Have waiting threads sleep at once, from their next wait on.

        Where the idle team would use up the threads that this group of processes may have, nothing is changed: the
        library ends a process that cannot start a thread.
        """
        if self._thread is not None:
            return
        room = self._room()
        if room is not None and room < 2 * self._size * self._workers:
            return
        self._end, up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(up, self._end), name="headway-idle-team", daemon=True)
        self._thread.start()
        up.wait(_START_SECONDS)

    def spin(self) -> None:
        """Have waiting threads spin first, as the library does by itself."""
        if self._thread is not None and self._end is not None:
            self._end.set()
            self._thread.join()  # with its thread the idle team ends
            self._thread = self._end = None

    def _hold(self, up: threading.Event, end: threading.Event) -> None:
        # Each thread of the team calls this function of the C library, which does nothing, and then waits for more.
        nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
        self._library.GOMP_parallel(nothing, None, ctypes.c_uint(self._size), ctypes.c_uint(0))
        up.set()
        end.wait()
