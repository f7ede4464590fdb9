"""States that are in memory only, until their worker dies: then the process beside it writes the newest one.

The process has the memory open as its worker had it, so a worker's death, in whatever way, takes nothing from it. Where
several workers have a part each, all their processes have to write the same step: they leave notes of what they have,
and the first one chooses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.core.files import is_there, write_json
from headway.core.foreign import read_json

#: How long a process waits for what another one has to say of which nobody knows whether it lives, and how often it
#: looks.
_MEETING_SECONDS, _LOOK_SECONDS = 5.0, 0.02

SaveJob = Mapping[str, Any]


class MemorySnapshots:
    """What one process has of states that nobody has ordered to be written.

    Args:
        directory: The run's `checkpoints` folder.
        rank: Of the worker.
        workers: How many there are.
        has_ended: Whether the process beside another worker is gone; None where that cannot be known.
        patience_seconds: How long one that lives is waited for: it may have a write under way, and has to end that.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        workers: int,
        has_ended: Callable[[int], bool | None],
        patience_seconds: float = 600.0,
    ) -> None:
        self._directory, self._rank, self._workers = directory, rank, workers
        self._has_ended, self._patience_seconds = has_ended, patience_seconds
        self._jobs: dict[int, SaveJob] = {}
        self._place = 0  # the folder's inode

    def add(self, job: SaveJob) -> None:
        """A state is whole in its buffer."""
        self._jobs[job["descriptor"]] = job

    def release_snapshot(self, descriptor: int) -> None:
        """The buffer is about to be overwritten."""
        self._jobs.pop(descriptor, None)

    def flush_snapshot(self, newest_saved: int, write: Callable[[SaveJob], None]) -> None:
        """The worker is dead: write the newest state that all have, if it is newer than what was saved.

        Args:
            newest_saved: The step of the newest checkpoint that was published; -1 for none. Only the first worker's
                process knows it: of a part that was written, the checkpoint may have failed.
            write: Writes one.
        """
        held = {int(job["step"]): job for job in self._jobs.values()}
        newer = {step for step in held if step > newest_saved}
        for step in sorted(newer)[-1:] if self._workers == 1 else self._agreed(held, newer):
            write(held[step])

    def _agreed(self, held: Mapping[int, SaveJob], newer: set[int]) -> list[int]:
        """The step to write, as a list of at most one: the others offer all, and the first one knows which are newer
        than what was saved."""
        if not held:
            return []
        tag = next(iter(held.values()))["tag"]
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
        """What another process has left; None when it has not in time, or is gone without, or when the folder is not
        the one any more in which they were to meet: each would wait for what the other has left in the old one."""
        start = time.monotonic()
        while not is_there(path):
            ended = self._has_ended(rank)
            seconds = self._patience_seconds if ended is False else _MEETING_SECONDS
            if ended or time.monotonic() - start > seconds or self._directory.stat().st_ino != self._place:
                break
            time.sleep(_LOOK_SECONDS)
        if not is_there(path):  # it may have been the last thing that it did
            return None
        steps: list[int] = read_json(path)
        return steps


def clear_notes(directory: Path, but_of: object) -> None:
    """Remove what rescues of other attempts have left, for who owns the run."""
    for path in directory.glob(".held-*.json"):
        if not path.name.startswith(f".held-{but_of}-"):
            path.unlink(missing_ok=True)
