"""Trainings that other verbs start: the command that a user types, in a process that does not outlive them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headway.core.errors import ConfigError, HeadwayError, error_with
from headway.core.launched import world_size_from_environment
from headway.core.module_command import module_command
from headway.core.signals import TERMINATION_SIGNALS, defer_signals, handled


def check_not_a_worker(verb: str) -> None:
    """Refuse to start workers in a process that is itself said to be one of several: they would inherit that, and take
    themselves for those of the other agent.

    Raises:
        ConfigError: it is.
    """
    size = world_size_from_environment()
    if size is not None:
        raise ConfigError(
            f"{verb} starts its workers itself, and this process is said to be one of {size} already",
            where="WORLD_SIZE",
            fix="start it once, without torchrun: unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT",
        )


def train_command(config: Path, *words: str) -> list[str]:
    """`headway train` on a config, with overrides and options."""
    return module_command("headway", "train", str(config), *words)


def place(run: str, folder: Path) -> list[str]:
    """The overrides that put a run of this name into a folder, whatever its path looks like as YAML."""
    return [f"name={json.dumps(run)}", f"runs={json.dumps(str(folder), ensure_ascii=False)}"]


@contextmanager
def running(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the length of a block; it is killed at the end of it, and its workers with it.

    In the block a signal to stop is as Ctrl-C.

    Args:
        log: What it says is appended to this file.
        variables: Added to its environment.
    """
    environment = {**os.environ, **variables}
    with stoppable(), log.open("ab") as file, ExitStack() as stack:
        with defer_signals():  # a signal between the two would leave it without anybody to end it
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
            stack.callback(_end, process)
        yield process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextmanager
def stoppable() -> Iterator[None]:
    """Have a signal to stop mean what Ctrl-C means, so that what was begun is ended and removed."""
    with handled(TERMINATION_SIGNALS, signal.default_int_handler):
        yield


def failed(what: str, code: int, log: Path) -> HeadwayError:
    """The error for a training that went otherwise than it was to: with its own exit code, and with its last words."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return (error_with(code) or HeadwayError)(f"{what}:\n{text[-3000:]}")
