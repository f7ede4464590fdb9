"""The supervisor's side of the process that follows a run into trackers.

It survives attempts, is started again when it dies, and is given some time at the end. Nothing here waits for it
otherwise, and nothing that happens to it changes how the run ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from headway.config import Config
from headway.core.console import notice, warning
from headway.core.coordination.follower_messages import FOLLOWER, FollowerDone, FollowerSaid
from headway.core.process.command import module_command
from headway.core.process.faults import FAULTS_VARIABLE
from headway.core.process.waiting import wait_until

#: How long the process may take at the end for what has not arrived; and when the run was stopped by a signal, after
#: which a machine may be gone soon.
END_SECONDS = 60.0
STOPPED_SECONDS = 8.0
#: How long it may take to export the model of a run that was not stopped, and to log it.
_MODEL_SECONDS = 3600.0
#: A wait that takes longer than this is reported. How long the process may take to end once it is asked to.
_SILENT_SECONDS = 2.0
_GIVE_UP_SECONDS = 2.0
#: Seconds before it is started again, at first and at most; after living this long it counts as sound.
_FIRST_DELAY = 1.0
_LONGEST_DELAY = 60.0
_SOUND_SECONDS = 60.0


class FollowerProcess:
    """Starts, tends and ends the process that follows a run.

    Args:
        config: The run's; without trackers nothing is ever started.
    """

    def __init__(self, config: Config) -> None:
        self._path = config.run_directory
        self._trackers = config.track
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._is_done = False
        self._started = 0.0
        self._delay = _FIRST_DELAY
        self._next = 0.0
        # A copy of this process must not hold the end of the pipe that says that the run is over.
        os.register_at_fork(after_in_child=self._close)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process, with whose family an attempt's end has nothing to do."""
        return () if self._process is None else (self._process.pid,)

    def begin(self) -> None:
        """Start the process, unless it runs; the run directory exists."""
        if self._trackers and self._process is None and not self._is_done:
            self._start()

    def tend(self) -> None:
        """Pass on what the process says, and start it again if it has died."""
        process = self._process
        if process is None:
            if self._next and time.monotonic() >= self._next:
                self._start()
            return
        self._listen(process)
        if process.poll() is None:
            return
        self._listen(process)
        self._close()
        self._process = None
        if self._is_done:
            return
        lived = time.monotonic() - self._started
        self._delay = _FIRST_DELAY if lived > _SOUND_SECONDS else self._delay
        self._next = time.monotonic() + self._delay
        warning(f"the process that sends metrics to trackers died; it is started again in {self._delay:.0f} s")
        self._delay = min(2 * self._delay, _LONGEST_DELAY)

    def finish(self, is_stopped: bool, gives_up: Callable[[], bool]) -> None:
        """Tell the process that the run is over, and wait until everything has arrived, but not for long.

        Args:
            is_stopped: A signal has stopped the run.
            gives_up: Whether not to wait any longer.
        """
        if self._process is None and self._next and not self._is_done:
            self._start()  # it has died a moment ago
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        logs_model = any(getattr(tracker.settings, "log_model", False) for tracker in self._trackers)
        seconds = STOPPED_SECONDS
        if not is_stopped:
            seconds = _MODEL_SECONDS if logs_model else END_SECONDS

        def has_ended() -> bool:
            self._listen(process)
            return process.poll() is not None or gives_up()

        if not wait_until(has_ended, _SILENT_SECONDS, 0.05) and not gives_up():
            what = "the last steps and the model" if logs_model and not is_stopped else "the last steps"
            notice(f"waiting for trackers to get {what}, for at most {seconds:.0f} s")
            wait_until(has_ended, seconds - _SILENT_SECONDS, 0.05)
        self._listen(process)
        if process.poll() is None or not self._is_done:
            warning(f"not all has reached the trackers; `headway track {self._path}` sends the rest")
        self._end(process)
        self._process = None

    def _start(self) -> None:
        self._next = 0.0
        trackers = json.dumps([tracker.model_dump(mode="json") for tracker in self._trackers])
        command = module_command("headway.tracking.process", str(self._path), trackers)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment.pop(FAULTS_VARIABLE, None)  # meant for the training
        try:
            log = (self._path / "tracking.log").open("ab")
        except OSError as error:
            warning(f"nothing is sent to trackers: {error.strerror or error} ({error.filename})")
            self._is_done = True
            return
        with log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._started = time.monotonic()
        self._rest = b""

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what the process has said."""
        stream = process.stdout
        if stream is None or stream.closed:
            return
        with suppress(BlockingIOError):
            while block := os.read(stream.fileno(), 65536):
                self._rest += block
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            with suppress(ValueError):  # a library has printed it
                match FOLLOWER.decode(line):
                    case FollowerDone():
                        self._is_done = True
                    case FollowerSaid(text):
                        warning(text)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End the process, and what it has started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GIVE_UP_SECONDS)
        self._close()

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout) if self._process is not None else ():
            if stream is not None:
                with suppress(OSError):
                    stream.close()
