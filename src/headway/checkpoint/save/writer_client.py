"""The worker's handles of its writer process (`writer_process`): of one process, and of those that take its place."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from headway.checkpoint.save.messages import (
    FROM_WRITER,
    TO_WRITER,
    End,
    FailPart,
    FromWriter,
    RollBack,
    Said,
    Start,
    ToWriter,
    WriterSettings,
)
from headway.checkpoint.save.writer_locks import open_writer_lock
from headway.core import console
from headway.core.process.command import module_command
from headway.core.process.faults import FAULTS_VARIABLE
from headway.core.process.table import continue_stopped


class WriterProcess:
    """A writer process, and the thread that receives its answers.

    Args:
        settings: Settings of the process.
        descriptors: File descriptors of the staging buffers, which the process inherits.
        environment: Environment of the process.
        on_answer: Called with each answer but lines for people.
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
        on_answer: Callable[[FromWriter], None],
        on_exit: Callable[[WriterProcess, str], None],
    ) -> None:
        self.ended = False
        self.heard_seconds = time.monotonic()
        """Time of the last sign of progress."""
        self._on_answer = on_answer
        self._on_exit = on_exit
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
        self.pid = self._popen.pid
        self._listener = threading.Thread(target=self._listen, daemon=True)
        try:
            self._listener.start()
        except RuntimeError as error:  # no thread can be started
            self._popen.kill()
            raise OSError(errno.EAGAIN, str(error)) from error
        self.send(Start(settings, lock[0] if lock else None))

    def send(self, message: ToWriter) -> None:
        """Send a message."""
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):  # the process has died, which the listener thread reports
            self._popen.stdin.write(TO_WRITER.encode(message) + "\n")
            self._popen.stdin.flush()

    def finish(self, tell_end: bool) -> None:
        """Let the process finish its jobs and end.

        Args:
            tell_end: Whether to announce an orderly end. Without that, the process flushes its memory snapshot.
        """
        assert self._popen.stdin is not None
        if tell_end and not self._popen.stdin.closed:
            self.send(End())
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        self.heard_seconds = time.monotonic()

    def join(self, seconds: float) -> None:
        """Wait for the process to end, at most so many seconds."""
        self._listener.join(seconds)

    def wake(self) -> None:
        """Continue the process if a signal has stopped it: it does not see otherwise that it is to end."""
        continue_stopped(self.pid)

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
        try:
            answer = FROM_WRITER.decode(line)
        except ValueError:  # other output on the same stream, such as that of a `sitecustomize`
            console.write_log(line.rstrip())
            return
        if isinstance(answer, Said):
            say = console.write_log if answer.only_log else console.say
            say(answer.text)
        else:
            self._on_answer(answer)


class WriterSuccession:
    """The writer process of a worker: one that has ended gets a successor, which learns what it has to know.

    Args:
        settings: Settings of each process.
        descriptors: File descriptors of the staging buffers.
        on_answer: As for `WriterProcess`.
        on_exit: As for `WriterProcess`.

    Raises:
        OSError: No process can be started.
    """

    def __init__(
        self,
        settings: WriterSettings,
        descriptors: Sequence[int],
        on_answer: Callable[[FromWriter], None],
        on_exit: Callable[[WriterProcess, str], None],
    ) -> None:
        self._settings = settings
        self._descriptors = descriptors
        self._on_answer = on_answer
        self._on_exit = on_exit
        self._rollback: RollBack | None = None
        self._undelivered: list[FailPart] = []
        self.newest = self._start(os.environ)

    def process(self) -> WriterProcess | str:
        """Return the writer process, a new one if it has ended; or why there is none: training continues without it."""
        try:
            if self.newest.ended:
                # An injected fault is for the first process, not for its successor.
                self.newest = self._start({key: value for key, value in os.environ.items() if key != FAULTS_VARIABLE})
                if self._rollback is not None:  # the settings date from the start of the attempt
                    self.newest.send(self._rollback)
            while self._undelivered:
                self.newest.send(self._undelivered.pop(0))
        except OSError as error:
            return f"the process that writes checkpoints cannot be started ({error.strerror or error})"
        return self.newest

    def _start(self, environment: Mapping[str, str]) -> WriterProcess:
        # Plug-ins of pydantic have nothing to do there; to look for them takes a fifth of the time to start.
        return WriterProcess(
            self._settings,
            self._descriptors,
            {"PYDANTIC_DISABLE_PLUGINS": "__all__", **environment},
            on_answer=self._on_answer,
            on_exit=self._on_exit,
        )

    def roll_back(self, message: RollBack) -> None:
        """Tell the process, and its successors, that the run rolled back."""
        self._rollback = message
        process = self.process()
        if not isinstance(process, str):
            process.send(message)

    def fail_part(self, message: FailPart) -> None:
        """Have this or the next process report that a part will not come."""
        self._undelivered.append(message)
        self.process()

    def forget_failures(self, but_of: Collection[int]) -> None:
        """Report no failed part of a save that is over: the folder of a retry would be mistaken for the first one's.

        Args:
            but_of: Steps of the saves that are not over for the first worker.
        """
        self._undelivered = [message for message in self._undelivered if message.job.step in but_of]
        if self._undelivered:
            self.process()
