"""The workers of a cell on this machine: `python -m headway.bench.local SPEC` starts them and waits for them.

A cell on several machines has such a process on each of them.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from headway.bench.blocks import block
from headway.bench.suite import Cell
from headway.bench.worker import Spec, run_worker
from headway.core.console import print_lines
from headway.core.coordination.launched import MachinePart
from headway.supervisor.watchdog import in_words
from headway.supervisor.worker import begin_process


def main() -> None:
    """Run as the only worker, or start as many as the cell has on this machine."""
    begin_process()
    path = Path(sys.argv[1])
    spec = Spec.read(path)
    cell = spec.result.cell
    if cell.workers == 1:
        run_worker(path)
        return
    from headway.supervisor.agent import load_training
    from headway.supervisor.local_workers import WorkersFailed, start_workers

    try:
        start_workers(
            cell.workers // cell.machines,
            path.parent,
            {},
            "headway.bench.worker",
            str(path),
            load=load_training,
            part=_part(cell) if cell.machines > 1 else None,
        )
    except WorkersFailed as error:
        # Workers whose peer has died end with errors of their own.
        if killed := error.killed:
            reason = f"worker {killed.rank} died ({in_words(killed.code)})"
            print_lines("\n" + block(spec.ended("killed", reason).model_dump(mode="json")))
        sys.exit(1)


def _part(cell: Cell) -> MachinePart:
    """Return the part of this machine, whose number its launcher has set as for `headway train`.

    Raises:
        ConfigError: it has not.
    """
    from headway.supervisor.machines.interfaces import interface_of
    from headway.supervisor.machines.place import find_number_and_lead

    number, host, port = find_number_and_lead(cell.machines, os.environ)
    first_rank = number * cell.workers // cell.machines
    return MachinePart(first_rank, cell.workers, host, port, interface_of(_address_towards(host, port)))


def _address_towards(host: str, port: int) -> str:
    """Return the address of this machine from which another one is reached; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as end:
        end.connect(address)
        return str(end.getsockname()[0])


if __name__ == "__main__":
    main()
