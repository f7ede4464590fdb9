"""Trainings that other verbs start: each runs the command that a user would type, in a child process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headway.core.coordination.launch_variables import OF_A_WORKER
from headway.core.coordination.launched import world_size_from_environment
from headway.core.errors import ConfigError, HeadwayError, error_with
from headway.core.process.command import module_command
from headway.core.process.signals import TERMINATION_SIGNALS, defer_signals, handled


def check_not_a_worker(verb: str) -> None:
    """Check that this process is not itself one of several workers: its own workers would inherit that role.

    Raises:
        ConfigError: it is.
    """
    size = world_size_from_environment()
    if size is not None:
        raise ConfigError(
            f"{verb} starts its workers itself, but this process is already one of {size}",
            where="WORLD_SIZE",
            fix=f"start it once, without torchrun: unset {' '.join(OF_A_WORKER)}",
        )


def train_command(config: Path, *words: str) -> list[str]:
    """Return the command `headway train` on a config, with overrides and options."""
    return module_command("headway", "train", str(config), *words)


def place(run: str, folder: Path) -> list[str]:
    """Return the overrides that put a run of this name into a folder, quoted for YAML."""
    return [f"name={json.dumps(run)}", f"runs={json.dumps(str(folder), ensure_ascii=False)}"]


@contextmanager
def running(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process for the length of a block, and kill it at the end, together with its workers.

    Within the block a stop signal acts as Ctrl-C.

    Args:
        log: The file to which its output is appended.
        variables: Added to its environment.
    """
    environment = {**os.environ, **variables}
    with stoppable(), log.open("ab") as file, ExitStack() as stack:
        with defer_signals():  # a signal between these two lines would leave the process running
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
            stack.callback(_kill, process)
        yield process


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextmanager
def stoppable() -> Iterator[None]:
    """Treat a stop signal as Ctrl-C, so that what was started is ended and removed."""
    with handled(TERMINATION_SIGNALS, signal.default_int_handler):
        yield


def failed(what: str, code: int, log: Path) -> HeadwayError:
    """Return the error for a training that did not end as expected, with its exit code and the end of its log."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return (error_with(code) or HeadwayError)(f"{what}:\n{text[-3000:]}")
