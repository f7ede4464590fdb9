"""The process beside a worker that writes its checkpoints (`write_process`), as the worker sees it."""

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
from headway.core.module_command import module_command


@dataclass(frozen=True)
class WriterSettings:
    """What does not change from save to save."""

    directory: Path
    """The run's `checkpoints` folder."""
    keep: int = 3
    """Newest checkpoints that are kept."""
    fence: Fence | None = None
    rank: int = 0
    workers: int = 1
    patience_seconds: float = 600.0
    """How long the first worker's process waits for the others' parts."""
    stalled_seconds: float = 450.0
    """A process that has not finished a file for so long is given up: the disk hangs."""
    memory_snapshots: bool = False
    """States will be held in memory too, which takes a third buffer."""
    max_shard_bytes: int = 2 * 1024**3
    """Size of a file, roughly; a larger tensor gets one of its own."""
    after_save: Mapping[str, Any] | None = None
    """What `CheckpointMaintainer` has to know; when not given, the newest `keep` are kept, and that is all."""
    sign: bool = False
    """Sign manifests with the key of the environment."""
    encrypt: bool = False
    """Encrypt files with the key of the environment."""

    def record(self) -> dict[str, Any]:
        """Its JSON form."""
        return {**vars(self), "directory": str(self.directory), "fence": self.fence and self.fence.record()}


class WriterProcess:
    """The process beside this worker, and the thread that takes its answers.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        settings: WriterSettings,
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        settle: Callable[[Outcome], None],
        uploaded: Callable[[Upload], None],
        lost: Callable[[CheckpointError], None],
        at_end: Callable[[WriterProcess, str], None],
    ) -> None:
        self.ended = False
        self.heard_seconds = time.monotonic()
        """When it last told that it gets on."""
        self._on_complete, self._on_upload, self._on_tier_lost, self._on_exit = settle, uploaded, lost, at_end
        lock = [open_writer_lock(settings.fence.run, settings.rank)] if settings.fence else []
        try:
            self._popen = subprocess.Popen(
                module_command("headway.checkpoint.save.writer_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="backslashreplace",  # what others have printed may be anything
                pass_fds=[*descriptors, *lock],
                env=environment,
            )
        finally:
            for descriptor in lock:  # it is the process's from here on, until its end
                os.close(descriptor)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        try:
            self._listener.start()
        except RuntimeError as error:  # no thread can be started: as little as a process
            self._popen.kill()
            raise OSError(errno.EAGAIN, str(error)) from error
        self.send({**settings.record(), "lock": lock[0] if lock else None})

    def send(self, record: Mapping[str, Any]) -> None:
        """Send a line."""
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):  # it has died, which the listener notices
            self._popen.stdin.write(json.dumps(record) + "\n")
            self._popen.stdin.flush()

    def finish(self, tell_end: bool) -> None:
        """Let it do what it has been told, and end then."""
        assert self._popen.stdin is not None
        if tell_end and not self._popen.stdin.closed:
            self.send({"kind": "end"})
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        self.heard_seconds = time.monotonic()

    def join(self, seconds: float) -> None:
        """Wait for its end."""
        self._listener.join(seconds)

    def kill(self) -> None:
        """End it, or have it end with the call to the kernel that it is in; nobody waits for that."""
        self._popen.kill()

    def _listen(self) -> None:
        """Take answers until there are no more. Whatever goes wrong, who waits for saves learns of the end."""
        assert self._popen.stdout is not None
        try:
            for line in self._popen.stdout:
                self.heard_seconds = time.monotonic()
                self._hear(line)
            code = self._popen.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
        except Exception as error:  # an answer is lost, and nobody takes the others
            self._popen.kill()
            how = f"its answers cannot be taken: {type(error).__name__}: {error}"
        self._on_exit(self, f"the process that writes checkpoints died ({how})")

    def _hear(self, line: str) -> None:
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
    """What the process has said; None for what another has printed there, such as a `sitecustomize` at its start."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and "kind" in answer else None
