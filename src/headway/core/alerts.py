"""Alerts: run a command of the user's choice for every warning, so that a run needs no one at the screen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from headway.core import console
from headway.core.credentials import secrets
from headway.core.machine.system import host_name

#: Commands that run at a time; seconds after which one is killed; seconds that `close` waits for all of them.
_MOST = 4
LIMIT_SECONDS = 30.0
_END_SECONDS = 5.0
#: Standard error of the command passes through a filter, since `curl -v` prints every header that it sends. The filter
#: also reports the exit code, because a supervisor reaps every child that ends, including this one. The filter stops
#: when the command ends, even if the command left a process running. If the filter cannot start, nothing is logged.
_SCRIPT = (
    'command=$1; shift; { sh -c "$command" 2>&1 >/dev/null; printf "\\n%s%s\\n" "$1" "$?"; }'
    ' | { shift; "$@" || cat >/dev/null; }'
)
_BEGINNING = ["sh", "-c", _SCRIPT, "headway-alert"]
_FILTER = [secrets.END_MARK, sys.executable, "-I", "-S", str(Path(secrets.__file__))]


def is_alert(arguments: Sequence[str]) -> bool:
    """Return whether this is the command line of a shell that runs an alert command; such a shell leads a session."""
    return list(arguments[: len(_BEGINNING)]) == _BEGINNING


class Alerts:
    """Starts the command for every message without waiting for it. Uses no threads, since this process may fork.

    Args:
        command: For the shell. It gets a line of JSON on standard input: `run`, `what`, `host`, `time` (Unix seconds).
        run: Name of the run in the messages.
        errors: File that receives the command's standard error, redacted, and its exit code when that is not 0.
    """

    def __init__(self, command: str, run: str, errors: Path) -> None:
        self._command = command
        self._run = run
        self._errors = errors
        self._stream: IO[bytes] | None = None
        if errors.parent.is_dir():
            self.open_file()
        self._running: list[tuple[subprocess.Popen[bytes], float]] = []

    def open_file(self) -> None:
        """Open the file for errors again, after its folder was made or replaced.

        It is opened ahead of the first alert: an alert may report a hanging disk, and opening a file there would hang.
        """
        if self._stream is not None:
            self._stream.close()
        self._stream = self._open()

    def tell(self, what: str) -> None:
        """Start the command with a message; if it cannot start, only the log has the message."""
        for item in list(self._running):  # the list changes in place, since several threads send alerts
            if item[0].poll() is None and time.monotonic() - item[1] > LIMIT_SECONDS:
                _kill(item[0])
            if item[0].poll() is not None:
                with suppress(ValueError):
                    self._running.remove(item)
        if len(self._running) >= _MOST:
            console.write_log(f"telemetry.alert is busy; no alert was sent for: {what}")
            return
        message = {"run": self._run, "what": secrets.redact(what), "host": host_name(), "time": time.time()}
        try:
            process = self._start()
        except OSError as error:
            console.write_log(f"telemetry.alert cannot be started: {error.strerror or error}")
            return
        self._running.append((process, time.monotonic()))
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stream:  # a pipe takes a line even if no process reads it
            stream.write(json.dumps(message).encode()[:60_000] + b"\n")

    def _start(self) -> subprocess.Popen[bytes]:
        # Variables that the command names probably hold secrets, whatever their names.
        named = re.findall(r"\$\{?([A-Za-z_]\w*)", self._command)
        command = [*_BEGINNING, self._command, *_FILTER, *dict.fromkeys(named)]
        quiet = subprocess.DEVNULL
        self._stream = self._stream or self._open()
        log = self._stream or quiet
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=quiet, start_new_session=True)

    def _open(self) -> IO[bytes] | None:
        try:
            return self._errors.open("ab", buffering=0)
        except OSError:  # the disk may be what the alert is about
            return None

    def close(self) -> None:
        """Wait a few seconds for the commands that still run, then kill them."""
        deadline = time.monotonic() + _END_SECONDS
        for process, _ in self._running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(process)
        if self._stream is not None:
            self._stream.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and all processes that it started: it leads a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def alerting(command: str | None, run: Path) -> Iterator[Alerts | None]:
    """Send the warnings of this process to a command, for the length of a block.

    Args:
        command: For the shell; None sends nothing.
        run: The run directory; errors of the command go to `alerts.log` there.
    """
    if command is None:
        yield None
        return
    alerts = Alerts(command, run.name, run / "alerts.log")
    with console.alert_with(alerts.tell):
        try:
            yield alerts
        finally:
            alerts.close()
