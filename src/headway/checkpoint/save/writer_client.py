"""The worker's handle of its writer process (`writer_process`)."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.save.fence import Fence, Fenced
from headway.checkpoint.save.outcomes import Outcome, Upload
from headway.checkpoint.save.writer_locks import open_writer_lock
from headway.core import console
from headway.core.errors import CheckpointError
from headway.core.process.command import module_command
from headway.core.process.table import continue_stopped


@dataclass(frozen=True)
class WriterSettings:
    """Settings of a writer process that hold for all saves."""

    directory: Path
    """The run's `checkpoints` folder."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    fence: Fence | None = None
    rank: int = 0
    workers: int = 1
    patience_seconds: float = 600.0
    """How long the first worker's process waits for the others' parts."""
    stalled_seconds: float = 450.0
    """A process without progress for so long is killed: the disk hangs."""
    memory_snapshots: bool = False
    """Whether the run takes memory snapshots, which need a third buffer."""
    max_shard_bytes: int = 2 * 1024**3
    """Approximate size of a file; a larger tensor gets a file of its own."""
    after_save: Mapping[str, Any] | None = None
    """Settings of `CheckpointMaintainer`; without them, the process only keeps the newest `keep` checkpoints."""
    sign: bool = False
    """Whether to sign manifests with the key from the environment."""
    encrypt: bool = False
    """Whether to encrypt files with the key from the environment."""
    relay: Mapping[str, Any] | None = None
    """Record of the `Relay` by which parts come from other machines, if they share no disk with the first worker's."""

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**vars(self), "directory": str(self.directory), "fence": self.fence and self.fence.record()}


class WriterProcess:
    """A writer process, and the thread that receives its answers.

    Args:
        settings: Settings of the process.
        descriptors: File descriptors of the staging buffers, which the process inherits.
        environment: Environment of the process.
        on_complete: Called with the outcome of each save.
        on_upload: Called with the outcome of each upload.
        on_tier_lost: Called if another owner of the remote tier kept a checkpoint out of it.
        on_exit: Called with this object and a description when the process has ended.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(
        self,
        settings: WriterSettings,
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        *,
        on_complete: Callable[[Outcome], None],
        on_upload: Callable[[Upload], None],
        on_tier_lost: Callable[[CheckpointError], None],
        on_exit: Callable[[WriterProcess, str], None],
    ) -> None:
        self.ended = False
        self.heard_seconds = time.monotonic()
        """Time of the last sign of progress."""
        self._on_complete, self._on_upload = on_complete, on_upload
        self._on_tier_lost, self._on_exit = on_tier_lost, on_exit
        lock = [open_writer_lock(settings.fence.run, settings.rank)] if settings.fence else []
        try:
            self._popen = subprocess.Popen(
                module_command("headway.checkpoint.save.writer_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="backslashreplace",  # other code may print anything
                pass_fds=[*descriptors, *lock],
                env=environment,
            )
        finally:
            for descriptor in lock:  # from here on the process holds the lock, until it ends
                os.close(descriptor)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        try:
            self._listener.start()
        except RuntimeError as error:  # no thread can be started
            self._popen.kill()
            raise OSError(errno.EAGAIN, str(error)) from error
        self.send({**settings.record(), "lock": lock[0] if lock else None})

    def send(self, record: Mapping[str, Any]) -> None:
        """Send a message, as one line of JSON."""
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):  # the process has died, which the listener thread reports
            self._popen.stdin.write(json.dumps(record) + "\n")
            self._popen.stdin.flush()

    def finish(self, tell_end: bool) -> None:
        """Let the process finish its jobs and end.

        Args:
            tell_end: Whether to announce an orderly end. Without that, the process flushes its memory snapshot.
        """
        assert self._popen.stdin is not None
        if tell_end and not self._popen.stdin.closed:
            self.send({"kind": "end"})
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        self.heard_seconds = time.monotonic()

    def join(self, seconds: float) -> None:
        """Wait for the process to end, at most so many seconds."""
        self._listener.join(seconds)

    def wake(self) -> None:
        """Continue the process if a signal has stopped it: it does not see otherwise that it is to end."""
        continue_stopped(self._popen.pid)

    def kill(self) -> None:
        """Kill the process without waiting for its end: it may be in a system call that cannot be interrupted."""
        self._popen.kill()

    def _listen(self) -> None:
        """Receive answers until there are no more, and report the end of the process whatever goes wrong."""
        assert self._popen.stdout is not None
        try:
            for line in self._popen.stdout:
                self.heard_seconds = time.monotonic()
                self._receive(line)
            code = self._popen.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
        except Exception as error:  # an answer is lost, and no thread receives the others
            self._popen.kill()
            how = f"its answers cannot be read: {type(error).__name__}: {error}"
        self._on_exit(self, f"the process that writes checkpoints died ({how})")

    def _receive(self, line: str) -> None:
        answer = _answer(line)
        if answer is None:
            console.write_log(line.rstrip())
        elif answer["kind"] == "message":
            console.say(answer["text"])
        elif answer["kind"] == "log":
            console.write_log(answer["text"])
        elif answer["kind"] == "uploaded":
            self._on_upload(Upload(answer["step"], answer["seconds"]))
        elif answer["kind"] == "tier lost":
            self._on_tier_lost(CheckpointError(answer["what"], where=answer["where"], fix=answer["fix"]))
        elif answer["kind"] == "saved":
            self._on_complete(Outcome(answer["step"], answer["seconds"], answer["bytes"]))
        elif answer["kind"] == "failed":
            kind = Fenced if answer["fatal"] else CheckpointError
            error = kind(answer["what"], where=answer["where"], fix=answer["fix"])
            self._on_complete(Outcome(answer["step"], error=error))


def _answer(line: str) -> dict[str, Any] | None:
    """Parse an answer; None for other output on the same stream, such as that of a `sitecustomize`."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and "kind" in answer else None
