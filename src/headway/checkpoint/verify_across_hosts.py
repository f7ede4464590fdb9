"""A check that all machines read the same bytes of a checkpoint.

The first worker verifies every byte through the page cache of its machine. Other machines have caches and mounts of
their own. There, a stale or corrupt page would enter the state unnoticed, and a read error in a mapped file would kill
the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headway.checkpoint.format.reading import files_of
from headway.checkpoint.store import CheckpointInfo
from headway.checkpoint.verify import check_file
from headway.core.errors import CorruptionError
from headway.core.machine.cores import usable_cores
from headway.core.machine.system import host_name, kernel_name
from headway.core.types import StateBlocks


def check_same_on_all_hosts(
    info: CheckpointInfo, blocks: StateBlocks, rank: int, gather: Callable[[Any], Sequence[Any]]
) -> None:
    """Hash the needed files of a checkpoint on every machine except the one that has verified it.

    All workers call this together; the workers of a machine share its files. On a single machine nothing is read.

    Args:
        info: The checkpoint, as this worker sees it.
        blocks: The parts that this worker will read.
        rank: Rank of this worker; the first one has verified the checkpoint.
        gather: Exchanges a value with all workers and returns the values by rank.

    Raises:
        CorruptionError: A machine sees another checkpoint, or other bytes; raised on every worker.
        ConfigError: The checkpoint is encrypted, and this machine's key is missing or wrong.
    """
    everyone = gather([kernel_name(), info.state_sha256])
    machines = [answer[0] for answer in everyone]
    states = [answer[1] for answer in everyone]
    needed: list[str] = []
    if machines[rank] != machines[0]:
        needed = sorted(set().union(*(files_of(info.manifest, name, block) for name, block in blocks.items())))
    wrong = [] if states[rank] == states[0] else [f"it is another state, {states[rank][:12]}"]
    if len(set(machines)) > 1:
        peers = [worker for worker, machine in enumerate(machines) if machine == machines[rank]]
        wanted = gather(needed)
        files = sorted(set().union(*(wanted[peer] for peer in peers)))
        if not wrong:
            wrong = _damage(info, files[peers.index(rank) :: len(peers)], usable_cores() // len(peers))
    if len(set(machines)) == 1 and len(set(states)) == 1:
        return
    reports = [report for report in gather({"host": host_name(), "wrong": wrong}) if report["wrong"]]
    if reports:
        hosts = sorted({report["host"] for report in reports})
        raise CorruptionError(
            f"{', '.join(hosts)} does not read the checkpoint of step {info.step} as the first worker has verified it:"
            f" {reports[0]['wrong'][0]}",
            where=str(info.path),
            fix="the next attempt reads it again; if that happens once more, check mount, memory and disk there",
        )


def _damage(info: CheckpointInfo, files: Collection[str], threads: int) -> list[str]:
    with ThreadPoolExecutor(max(1, threads)) as pool:
        found = pool.map(lambda name: check_file(info.path, name, info.manifest), files)
        return [str(damage) for damage in found if damage is not None]
