"""Memory snapshots: states that are written only when their worker dies.

The writer process shares the memory with its worker, so a snapshot survives the worker's death. With several workers,
all writer processes must write the same step: each leaves a note of the steps that it has, and the first worker's
process chooses the newest common one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from headway.checkpoint.save.messages import SaveJob
from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json
from headway.core.files.paths import is_there

#: How long to wait for the note of a process that may or may not be alive.
_MEETING_SECONDS = 5.0
#: How often to look for it.
_LOOK_SECONDS = 0.02


class MemorySnapshots:
    """The memory snapshots of one worker, in its writer process.

    Args:
        directory: The run's `checkpoints` folder.
        rank: Rank of the worker.
        workers: Number of workers.
        has_ended: Return whether another worker's writer process has ended; None if that cannot be known.
        patience_seconds: How long to wait for a process that is alive: it may have to finish a write first.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        workers: int,
        has_ended: Callable[[int], bool | None],
        patience_seconds: float = 600.0,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._workers = workers
        self._has_ended = has_ended
        self._patience_seconds = patience_seconds
        self._jobs: dict[int, SaveJob] = {}
        self._place = 0  # the folder's inode

    def add(self, job: SaveJob) -> None:
        """Register a snapshot whose copy is complete."""
        self._jobs[job.descriptor] = job

    def release_snapshot(self, descriptor: int) -> None:
        """Forget the snapshot in a buffer, which is about to be overwritten."""
        self._jobs.pop(descriptor, None)

    def flush_snapshot(self, newest_saved: int, write: Callable[[SaveJob], None]) -> None:
        """Write the newest snapshot that all workers have, if it is newer than the newest checkpoint.

        Args:
            newest_saved: Step of the newest published checkpoint; -1 for none. Only the first worker's process knows
                it, since a checkpoint may fail after another worker has written its part.
            write: Writes a snapshot.
        """
        held = {job.step: job for job in self._jobs.values()}
        newer = {step for step in held if step > newest_saved}
        for step in sorted(newer)[-1:] if self._workers == 1 else self._agreed(held, newer):
            write(held[step])

    def _agreed(self, held: Mapping[int, SaveJob], newer: set[int]) -> list[int]:
        """Return the step to write, as a list of at most one.

        The other workers offer all their steps; the first worker chooses among those newer than the last checkpoint.
        """
        if not held:
            return []
        tag = next(iter(held.values())).tag
        choice = self._directory / f".held-{tag}-choice.json"
        mine = self._directory / f".held-{tag}-{self._rank:05d}.json"
        with suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._place = self._directory.stat().st_ino
            if self._rank > 0:
                write_json(mine, sorted(held), exact=True)
                chosen = self._read_when_there(choice, 0)
                return [step for step in chosen or [] if step in held]
            common = set(newer)
            for rank in range(1, self._workers if newer else 1):
                note = self._directory / f".held-{tag}-{rank:05d}.json"
                common &= set(self._read_when_there(note, rank) or [])
                note.unlink(missing_ok=True)
            steps = sorted(common)[-1:]
            write_json(choice, steps, exact=True)
            return steps
        return []

    def _read_when_there(self, path: Path, rank: int) -> list[int] | None:
        """Return the steps that another process noted.

        Returns:
            None if the note did not come in time, or its process ended without one. None also if the folder was moved
            or replaced: each process would wait for a note that lies in the other folder.
        """
        start = time.monotonic()
        while not is_there(path):
            ended = self._has_ended(rank)
            seconds = self._patience_seconds if ended is False else _MEETING_SECONDS
            if ended or time.monotonic() - start > seconds or self._directory.stat().st_ino != self._place:
                break
            time.sleep(_LOOK_SECONDS)
        if not is_there(path):  # look again: a process may have left its note just before it ended
            return None
        steps: list[int] = read_json(path)
        return steps


def clear_notes(directory: Path, but_of: object) -> None:
    """Remove the notes of other attempts' snapshots; only the owner of the run may call this."""
    for path in directory.glob(".held-*.json"):
        if not path.name.startswith(f".held-{but_of}-"):
            path.unlink(missing_ok=True)
