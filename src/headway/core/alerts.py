"""Telling a command of the user's choice what goes wrong, so that nobody has to watch a screen."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from headway.core import console
from headway.core.machine import host_name

#: So many at a time; one that has not ended after this long is killed, and the end of a run waits this long at most.
_MOST, _LIMIT_SECONDS, _END_SECONDS = 4, 30.0, 5.0


class Alerts:
    """Starts the command for every message and waits for none; without threads, since this process may be copied.

    Args:
        command: For the shell. It gets a line of JSON on standard input: `run`, `what`, `host`, `time` (Unix seconds).
        run: What to call the run.
    """

    def __init__(self, command: str, run: str) -> None:
        self._command, self._run = command, run
        self._running: list[tuple[subprocess.Popen[bytes], float]] = []

    def tell(self, what: str) -> None:
        """Start the command; what cannot be told, the log alone has."""
        self._look()
        if len(self._running) >= _MOST:
            console.write_log(f"not told to telemetry.alert, which is busy: {what}")
            return
        message = {"run": self._run, "what": what, "host": host_name(), "time": time.time()}
        quiet = subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                self._command, shell=True, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
            )
        except OSError as error:
            console.write_log(f"telemetry.alert cannot be started: {error.strerror or error}")
            return
        self._running.append((process, time.monotonic()))
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stream:  # a pipe takes a line whether or not it is read
            stream.write(json.dumps(message).encode()[:60_000] + b"\n")

    def close(self) -> None:
        """Wait a little for those that are under way."""
        deadline = time.monotonic() + _END_SECONDS
        for process, _ in self._running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _look(self) -> None:
        still = []
        for process, started in self._running:
            if process.poll() is None and time.monotonic() - started > _LIMIT_SECONDS:
                process.kill()
            elif process.poll() is None:
                still.append((process, started))
            elif process.returncode:
                console.write_log(f"telemetry.alert ended with exit code {process.returncode}")
        self._running = still


@contextmanager
def alerting(command: str | None, run: str) -> Iterator[None]:
    """Have warnings of this process told to a command, for the length of a block."""
    if command is None:
        yield
        return
    alerts = Alerts(command, run)
    with console.alert_with(alerts.tell):
        try:
            yield
        finally:
            alerts.close()
