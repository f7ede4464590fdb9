"""Where masters and moments lie: in host memory, or in mapped files in the run directory where that is short."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headway.config.strategies import distinct_strategies
from headway.core.console import notice
from headway.core.coordination.launched import workers_of_this_machine
from headway.core.errors import ConfigError, explaining_refusals
from headway.core.format import format_bytes
from headway.core.machine.memory import host_memory
from headway.core.machine.system import Machine

if TYPE_CHECKING:
    from headway.config.derived.host_weights import HostTypes
    from headway.parallel.world import World

#: Share of the available memory that may be taken. What is left is little: all of a machine is meant for this, and each
#: update of what lies in files takes minutes.
_USABLE_SHARE = 0.99
#: The first save moves masters and moments to the file that it is written from.
_COPIES_ON_DISK = 2


@dataclass(frozen=True)
class HostNeed:
    """Bytes on one machine, of all its workers."""

    kept_bytes: int
    """Masters and moments, which change once in a step."""
    summed_bytes: int
    """Sums of gradients, which change in every micro-batch."""


@dataclass(frozen=True)
class HostRoom:
    """What a machine has."""

    memory_bytes: int | None
    """Available memory; None if unknown."""
    disk_bytes: int
    """Free space on the file system of the run directory."""


def found_room(machine: Machine, folder: Path) -> HostRoom:
    """Return the available memory of a machine, within the limits of control groups, and the free space of a folder."""
    memory = host_memory(machine)
    return HostRoom(None if memory is None else memory.available_bytes, machine.space(folder).free_bytes)


def needs_file(need: HostNeed, room: HostRoom, where: str) -> bool:
    """Return whether masters and moments must lie in a file.

    Sums of gradients stay in memory in either case: they are read and written in every micro-batch.

    Args:
        where: The run directory.

    Raises:
        ConfigError: neither memory nor the file system has room.
    """
    usable = math.inf if room.memory_bytes is None else room.memory_bytes * _USABLE_SHARE
    if need.kept_bytes + need.summed_bytes <= usable:
        return False
    if need.summed_bytes <= usable and _COPIES_ON_DISK * need.kept_bytes <= room.disk_bytes:
        return True
    able = " or ".join(spec.name for spec in distinct_strategies() if spec.build_on_host and spec.sums_gradients)
    raise ConfigError(
        f"masters and moments take {format_bytes(need.kept_bytes)} of memory, or twice that of disk, and sums of"
        f" gradients {format_bytes(need.summed_bytes)} of memory; this machine has"
        f" {format_bytes(int(usable))} of memory to use and {format_bytes(room.disk_bytes)} of free disk",
        where=f"train.weights; {where}",
        fix=f"optimizer.moments=bf16, more machines with {able}, or a machine with more memory",
    )


def open_host_memory(run: Path, types: HostTypes, world: World, elements: int) -> HostMemory:
    """Choose where masters and moments of this worker lie. All workers must call it.

    Args:
        run: The run directory, where files lie if it exists.
        types: Types of masters and moments.
        elements: Weights that this worker updates.

    Raises:
        ConfigError: there is no room for them.
    """
    folder = run if run.is_dir() else Path(tempfile.gettempdir())
    room = found_room(Machine(), folder)
    world.barrier()  # before another worker of this machine takes its share
    here = workers_of_this_machine(world.size)
    need = HostNeed(elements * types.kept_bytes * here, elements * types.summed_bytes * here)
    if not needs_file(need, room, str(folder)):
        return HostMemory()
    notice(
        f"masters and moments, {format_bytes(need.kept_bytes)}, lie in files in {folder}, since memory is short:"
        " updates take as long as it takes to read and write that"
    )
    return HostMemory(folder)


class HostMemory:
    """Makes tensors in host memory, or each in a mapped file without a name, which goes with the tensor.

    Args:
        folder: Where to make files; None for memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def hold(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value in this memory: the tensor itself, if it lies alone in memory of the host already."""
        is_alone = value.untyped_storage().nbytes() == value.nbytes and value.is_contiguous()
        if self.folder is None and value.device.type == "cpu" and is_alone:
            return value.detach()
        return self.empty(value.shape, value.dtype).copy_(value)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor without values.

        Raises:
            ConfigError: the file system has no room for it.
        """
        elements = math.prod(shape)
        if self.folder is None or not elements:
            return torch.empty(tuple(shape), dtype=dtype)
        size = elements * dtype.itemsize
        with (
            explaining_refusals(ConfigError, f"{format_bytes(size)} of masters and moments in {self.folder}"),
            tempfile.TemporaryFile(dir=self.folder) as file,
        ):
            # Reserved now: a disk that fills up later would kill the process when it writes to a page.
            os.posix_fallocate(file.fileno(), 0, size)
            mapping = mmap.mmap(file.fileno(), size)
        return torch.frombuffer(mapping, dtype=dtype).view(tuple(shape))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros, whose pages the system provides when they are first written.

        Raises:
            ConfigError: the file system has no room for it.
        """
        if self.folder is None:
            return torch.zeros(tuple(shape), dtype=dtype)
        return self.empty(shape, dtype)  # space that is reserved in a file reads as zeros
