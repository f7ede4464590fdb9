"""The processes of one measurement: the command that starts them, and their end in every case."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.core.console import notice
from headway.core.errors import ConfigError
from headway.core.process.command import module_command
from headway.core.process.signals import defer_signals
from headway.core.process.tree import end_all

#: Named launchers; any other is a command that starts the rest of the command line. `machines` is `local` on each of
#: the machines that run the same command (`bench.machines`).
LOCAL = "local"
TORCHRUN = "torchrun"
MACHINES = "machines"


def launch_command(launcher: str, spec: Path, workers: int, machines: int = 1) -> list[str]:
    """Return the command that starts the workers of a cell.

    Args:
        launcher: `local`, `torchrun`, `machines`, or a command that runs the rest of its command line in so many
            processes and gives each the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT);
            `{workers}` in it is their number. With `{machines}` in it, it runs the rest once on each of so many
            machines.
        spec: The cell, and how it is measured.
        workers: Workers of all machines.
        machines: Machines.

    Raises:
        ConfigError: there is no such launcher.
    """
    if machines > 1 and launcher in (LOCAL, TORCHRUN):
        raise ConfigError(
            f"'{launcher}' starts workers on this machine only, and cells have up to {machines} machines",
            where="--launcher, machines",
            fix="--launcher machines, started on each of them; a command with {machines}, as in"
            " 'srun --nodes {machines} --ntasks-per-node 1'; or machines=1",
        )
    if launcher in (LOCAL, MACHINES):
        return module_command("headway.lab.bench.local", str(spec))
    if launcher == TORCHRUN:
        nodes = ["--standalone", "--nproc-per-node", str(workers), "--no-python"]
        return module_command("torch.distributed.run", *nodes, *module_command("headway.lab.bench.worker", str(spec)))
    on_machines = "{machines}" in launcher
    if "{workers}" not in launcher and not on_machines:
        raise ConfigError(
            f"the launcher '{launcher}' is not told how many workers to start",
            where="--launcher",
            fix="local, torchrun, or a command with {workers}, as in"
            " 'torchrun --standalone --nproc-per-node {workers} --no-python'",
        )
    try:
        words = shlex.split(launcher.replace("{workers}", str(workers)).replace("{machines}", str(machines)))
    except ValueError as error:
        raise ConfigError(
            f"the launcher '{launcher}' is no command: {error}", where="--launcher", fix="close its quotes"
        ) from None
    # Without the working folder, too; but in few words: a launcher may pass them to the shell of another machine.
    module = "headway.lab.bench.local" if on_machines else "headway.lab.bench.worker"
    return [*words, sys.executable, "-P", "-m", module, str(spec)]


def lead_file(spec: Path) -> Path:
    """Return the file, beside that of a cell, in which machine 1 writes the address by which it knows machine 0."""
    return spec.with_suffix(".lead")


def run_command(command: Sequence[str], environment: dict[str, str], log: Any, timeout_seconds: float) -> int | None:
    """Run a command and return its exit code; None if it took too long. No process of it is left running."""
    process = None
    try:
        with defer_signals():  # a stop signal during the start must find the process to end
            process = start_command(command, environment, log)
        return process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process is not None:
            end_command(process)


def end_command(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a command."""
    left = end_all([process.pid])
    process.poll()
    if left:
        notice(f"processes that cannot be ended are left: {left}")


def start_command(command: Sequence[str], environment: Mapping[str, str], log: Any) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own.

    Raises:
        ConfigError: it cannot be started.
    """
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(
            f"the launcher cannot be started: {error}", where="--launcher", fix="check the command"
        ) from error
