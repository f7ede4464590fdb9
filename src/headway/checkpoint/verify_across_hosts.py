"""Whether all machines read a checkpoint as the one that has verified it does.

The first worker hashes every byte, through the page cache of its machine. What others map comes through caches and
mounts of their own: a stale or flipped page would enter the state unseen, and a read error would kill the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from headway.checkpoint.format.reading import files_of
from headway.checkpoint.store import CheckpointInfo
from headway.checkpoint.verify import check_file
from headway.core.cores import usable_cores
from headway.core.errors import CorruptionError
from headway.core.machine import host_name, kernel_name

if TYPE_CHECKING:
    from headway.core.types import StateBlocks


def check_same_on_all_hosts(
    info: CheckpointInfo, blocks: StateBlocks, rank: int, gather: Callable[[Any], Sequence[Any]]
) -> None:
    """Hash what the workers of each machine need of a checkpoint, but on the machine that has verified it. All workers
    together; those of a machine share its files out. On a single machine nothing is read.

    Args:
        info: The checkpoint, as this worker sees it.
        blocks: What this worker will read of it.
        rank: This worker's; the first one has verified the checkpoint.
        gather: Gives what every worker says, by rank.

    Raises:
        CorruptionError: some machine sees another checkpoint, or other bytes; on every worker alike.
        ConfigError: the checkpoint is encrypted, and this machine has no key, or another one.
    """
    everyone = gather([kernel_name(), info.state_sha256])
    machines, states = [said[0] for said in everyone], [said[1] for said in everyone]
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
    told = [said for said in gather({"host": host_name(), "wrong": wrong}) if said["wrong"]]
    if told:
        hosts = sorted({said["host"] for said in told})
        raise CorruptionError(
            f"{', '.join(hosts)} does not read the checkpoint of step {info.step} as the first worker has verified it:"
            f" {told[0]['wrong'][0]}",
            where=str(info.path),
            fix="the next attempt reads it again; if that happens once more, look at mount, memory and disk there",
        )


def _damage(info: CheckpointInfo, files: Collection[str], threads: int) -> list[str]:
    with ThreadPoolExecutor(max(1, threads)) as pool:
        found = pool.map(lambda name: check_file(info.path, name, info.manifest), files)
        return [str(damage) for damage in found if damage is not None]
