"""The disk condition: whether the next checkpoints will fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headway.checkpoint.format.folders import checkpoint_folders
from headway.core.format import format_bytes
from headway.core.machine.system import Machine
from headway.training.conditions.condition import Reading

#: A checkpoint is written before an old one is removed, and other processes often use the disk, too.
_ENOUGH = 2


class Disk:
    """The file system of a run's checkpoints, which are all about as large as the newest.

    Args:
        checkpoints: The folder of checkpoints.
        machine: The machine that has the disk.
    """

    def __init__(self, checkpoints: Path, machine: Machine) -> None:
        self._checkpoints = checkpoints
        self._machine = machine

    def read(self) -> Reading:
        """Report free space, and warn if few checkpoints fit; before the first one their size is unknown."""
        try:
            folders = list(checkpoint_folders(self._checkpoints).values())
            size = sum(_sizes(folders[-1])) if folders else 0
            there = self._checkpoints if self._checkpoints.is_dir() else self._checkpoints.parent
            free = self._machine.space(there).free_bytes
        except OSError:
            return Reading()
        metrics = {"health/disk_free_gib": free / 2**30}
        if not size:
            return Reading(metrics)
        fit = free // size
        metrics["health/checkpoints_that_fit"] = float(fit)
        if fit >= _ENOUGH:
            return Reading(metrics)
        what = f"{format_bytes(free)} are free where checkpoints of {format_bytes(size)} are written"
        soon = "the next one will not fit" if not fit else "the one after the next will not fit"
        return Reading(metrics, {"disk": f"{what}: {soon} ({self._checkpoints}); make room, or keep fewer"})


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            yield path.stat().st_size if path.is_file() else 0
        except OSError:  # it is being removed
            continue
