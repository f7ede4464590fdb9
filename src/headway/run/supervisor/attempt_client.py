"""The supervisor's side of an attempt process: start it, receive its messages, wait for its end."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from headway.config import Config
from headway.core.console import flush_streams
from headway.core.process.command import module_command
from headway.core.process.exit import die_with_parent
from headway.core.process.signals import STOP_SIGNALS, reset
from headway.core.process.tree import can_be_copied
from headway.core.process.variables import with_variables
from headway.core.process.waiting import wait_until
from headway.core.storage import load_filesystem
from headway.run.session.attempt import RunOptions
from headway.run.supervisor.agent import load_training
from headway.run.supervisor.attempt_process import run_attempt
from headway.run.supervisor.messages import AttemptChannel, AttemptMessage, Order, SentConfig


class AttemptProcess:
    """The first process of an attempt, as the supervisor sees it."""

    def __init__(
        self,
        config: Config,
        options: RunOptions,
        environment: Mapping[str, str],
        own_process: bool,
        number: int | None,
    ) -> None:
        self.started = time.time()
        self._popen = None
        self.code: int | None = None
        with with_variables(environment):
            if own_process and can_be_copied():
                self.pid, self.channel = _fork(config, options, number)
            else:
                self._popen = self._start(config, options, number)

    def _start(self, config: Config, options: RunOptions, number: int | None) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair()
        command = module_command("headway.run.supervisor.attempt_process", str(theirs.fileno()))
        popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self.pid, self.channel = popen.pid, AttemptChannel(ours)
        self.channel.send(Order(SentConfig.of(config), options, number, tuple(sys.argv)))
        return popen

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        if self.code is None:
            if self._popen is not None:
                self.code = self._popen.poll()
            else:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, seconds: float) -> None:
        """Wait for its end, up to a time."""
        wait_until(lambda: self.poll() is not None, seconds, 0.01)

    def listen(self, seconds: float) -> list[AttemptMessage]:
        """Return the messages that arrive within a time."""
        messages = []
        while select.select([self.channel.end], [], [], seconds)[0]:
            message = self.channel.receive()
            if message is None:
                time.sleep(seconds)  # the process is about to end
                break
            messages.append(message)
            seconds = 0.0
        while self.channel.pending:
            message = self.channel.receive()
            assert message is not None, "received before"
            messages.append(message)
        return messages


def load_ahead(config: Config) -> None:
    """Load what workers need into this process, of which attempt processes are copies.

    After a failure the next attempt starts a second or two faster, and all processes share these 200 MB.
    """
    load_training()
    if config.checkpoint.remote is not None:
        load_filesystem(config.checkpoint.remote.url)
    gc.freeze()  # a collection in a copy would write to these pages, and so duplicate them


def _fork(config: Config, options: RunOptions, number: int | None) -> tuple[int, AttemptChannel]:
    """Start an attempt process as a copy of this process, which must have only one thread.

    Returns:
        Its process number, and the supervisor's end of the channel.
    """
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()  # or their buffers would be written twice
    # Until the copy resets them, it would handle a signal by this process's handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            ours.close()
            reset(STOP_SIGNALS)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            die_with_parent()
            code = run_attempt(AttemptChannel(theirs), config, options, number)
        finally:
            flush_streams()
            os._exit(code)  # the frames above belong to the supervisor
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    theirs.close()
    return pid, AttemptChannel(ours)
