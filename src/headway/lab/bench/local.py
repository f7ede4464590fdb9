"""The workers of a cell on this machine: `python -m headway.lab.bench.local SPEC` starts them and waits for them.

A cell on several machines has such a process on each of them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from pathlib import Path

from headway.core.console import print_lines
from headway.core.coordination.launch_variables import LEAD
from headway.core.coordination.launched import MachinePart
from headway.core.errors import ConfigError
from headway.core.files.atomic import write_text
from headway.core.process.waiting import VISIBILITY_TIMEOUT, wait_until
from headway.lab.bench.blocks import block
from headway.lab.bench.launchers import lead_file
from headway.lab.bench.spec import Spec
from headway.lab.bench.suite import Cell
from headway.lab.bench.worker import run_worker
from headway.run.supervisor.agent import load_training
from headway.run.supervisor.local_workers import WorkersFailed, start_workers
from headway.run.supervisor.machines.interfaces import interface_of
from headway.run.supervisor.machines.machine_role import find_number_and_lead
from headway.run.supervisor.watchdog import in_words
from headway.run.supervisor.worker import begin_process


def main() -> None:
    """Run as the only worker, or start as many as the cell has on this machine."""
    begin_process()
    path = Path(sys.argv[1])
    spec = Spec.read(path)
    cell = spec.result.cell
    if cell.workers == 1:
        run_worker(path)
        return

    try:
        part = MachinePart.take()  # of a lead (`bench.machines`)
        if part is None and cell.machines > 1:
            part = _part(cell, lead_file(path))
    except ConfigError as error:
        reason = f"{error.what} ({error.fix})"
        print_lines("\n" + block(spec.ended("refused", reason).model_dump(mode="json")))
        sys.exit(error.exit_code)
    try:
        start_workers(
            cell.workers // cell.machines,
            path.parent,
            {},
            "headway.lab.bench.worker",
            str(path),
            load=load_training,
            part=part,
        )
    except WorkersFailed as error:
        # Workers whose peer has died end with errors of their own.
        if killed := error.killed:
            reason = f"worker {killed.rank} died ({in_words(killed.code)})"
            print_lines("\n" + block(spec.ended("killed", reason).model_dump(mode="json")))
        sys.exit(1)


def _part(cell: Cell, lead: Path) -> MachinePart:
    """Return the part of this machine, whose number its launcher has set as for `headway train`.

    Args:
        cell: The cell.
        lead: Where machine 1 writes the address of machine 0.

    Raises:
        ConfigError: it has not, or the address at which the others reach machine 0 cannot be found.
    """
    number, host, port = find_number_and_lead(cell.machines, os.environ)
    found = _resolve(host, port)
    if number == 1:
        write_text(lead, found)
    if number == 0 and ipaddress.ip_address(found).is_loopback and host not in ("localhost", found):
        # Its own name stands for loopback here (127.0.1.1 in Debian's /etc/hosts), where the others do not reach it.
        if not wait_until(lead.exists, VISIBILITY_TIMEOUT, 0.2):
            raise _no_address(
                host, f"stands for {found} there, and machine 1 does not say what it stands for elsewhere"
            )
        host = lead.read_text(encoding="utf-8")
        if not ipaddress.ip_address(host).is_loopback and interface_of(host) is None:
            raise _no_address(host, "as machine 1 knows it, is no address that it has")
    first_rank = number * cell.workers // cell.machines
    return MachinePart(first_rank, cell.workers, host, port, interface_of(_address_towards(host, port)))


def _resolve(host: str, port: int) -> str:
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]).partition("%")[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that DNS could not hold
        raise _no_address(host, f"is not known here: {error}") from error


def _no_address(host: str, what: str) -> ConfigError:
    return ConfigError(
        f"the name of machine 0, {host}, {what}",
        where=LEAD,
        fix=f"set {LEAD} on every machine to an address of machine 0 that the others reach, and a free port there",
    )


def _address_towards(host: str, port: int) -> str:
    """Return the address of this machine from which another one is reached; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as end:
        end.connect(address)
        return str(end.getsockname()[0])


if __name__ == "__main__":
    main()
