"""A run's directory: its files, its attempts, and where an attempt starts."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.checkpoint.save.fence import OWNER_FILE, Fence, Owner, fenced, read_owner
from headway.checkpoint.save.writer_locks import wait_for_writers
from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.core import console
from headway.core.errors import CheckpointError, fix_for
from headway.core.files import is_there, remove_unfinished, sync_folder, write_json
from headway.core.foreign import read_json_object
from headway.core.preemption_board import posted
from headway.core.secrets import redact_arguments
from headway.core.waiting import wait_until
from headway.runs.ledger import Ledger
from headway.runs.ownership import OwnerLock

_ATTEMPT_FILE = "attempt.json"
#: How long processes of an earlier attempt may take to end the checkpoints that they have begun.
_WRITERS_SECONDS = 5.0


def command_line() -> str:
    """This process's command as it can be typed again, but for credentials: `checkpoint.every='3 steps'` keeps its
    quotes."""
    return shlex.join(redact_arguments(sys.argv))


@dataclass(frozen=True)
class RunDirectory:
    """Where everything about one run lies. Making this object touches nothing."""

    path: Path

    @property
    def config_path(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def record_path(self) -> Path:
        """Where the run comes from: command, code, environment, fingerprints."""
        return self.path / "run.json"

    @property
    def metrics_path(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def ledger_path(self) -> Path:
        """Rows consumed, per range of steps."""
        return self.path / "ledger.jsonl"

    @property
    def attempts(self) -> Path:
        """One folder per attempt."""
        return self.path / "attempts"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.path / "checkpoints"

    @property
    def report_path(self) -> Path:
        """The run on one page."""
        return self.path / "report.html"

    def claim(self) -> OwnerLock:
        """Lock the run directory, made if need be, for this process: for one attempt, or for several.

        Raises:
            CheckpointError: it is in use, cannot be written, or is a folder of something else.
        """
        self.check_usable()
        try:
            new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            if new:
                sync_folder(self.path.parent)
        except OSError as error:
            raise self._unusable(error) from error
        return OwnerLock.take(self.path)

    def check_usable(self) -> None:
        """Refuse a place that cannot become a run directory; touches nothing.

        Raises:
            CheckpointError: it cannot be written, or is a folder of something else.
        """
        try:
            there = next(place for place in (self.path, *self.path.parents) if place.exists())
            if not there.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
            if not os.access(there, os.W_OK | os.X_OK):
                number = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
                raise OSError(number, os.strerror(number), str(there))
            if there == self.path:
                self._check_own_folder()
        except OSError as error:
            raise self._unusable(error) from error

    def begin_attempt(
        self, command: str, claimed: OwnerLock | None = None, started: float | None = None, **facts: Any
    ) -> Attempt:
        """Begin an attempt, which fences all earlier ones.

        Args:
            claimed: The lock, when this process has it already and keeps it when the attempt ends.
            started: When the attempt's first process began, in Unix seconds, if that was before now.
            facts: More for its record.

        Raises:
            CheckpointError: the directory is in use, cannot be written, or is a folder of something else.
        """
        lock = claimed or self.claim()
        try:
            # Of an attempt that was killed with its supervisor: from the new token on they could publish nothing.
            wait_for_writers(self.path, _WRITERS_SECONDS)
            self._mark_dead_attempt()
            # One more than any that ever was, whether or not its folder or the owner's record is still there.
            last_owner = read_owner(self.path)
            number = max([*self._attempt_numbers(), last_owner.attempt if last_owner else 0, 0]) + 1
            owner = Owner.this_process(number)
            lock.write(owner)
            before = max(0.0, owner.since - started) if started else 0.0
            attempt = Attempt(self.path, owner, None if claimed else lock, time.monotonic() - before)
            attempt.directory.mkdir(parents=True)
            beginning = {"command": command, "pid": owner.pid, "host": owner.host, "started": started or owner.since}
            write_json(attempt.directory / _ATTEMPT_FILE, {"number": number, **beginning, **facts})
        except OSError as error:
            if claimed is None:
                lock.release()
            raise self._unusable(error) from error
        return attempt

    def has_begun(self) -> bool:
        """Whether a step was ever done: there is a record of one, or a checkpoint (damaged or not)."""
        recorded = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
        saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return recorded or saved or (self.ledger_path.exists() and self.ledger_path.stat().st_size > 0)

    def archive(self) -> Path | None:
        """Move the run to `<name>.old-NNN` beside it, so that the name is free; None when there is nothing to move.

        Raises:
            CheckpointError: the run is in use, is no run, or cannot be moved.
        """
        try:
            if not self.path.is_dir() or not any(self.path.iterdir()):
                return None
            self._check_own_folder()
        except OSError as error:
            raise self._unusable(error) from error
        lock = OwnerLock.take(self.path)
        try:
            number = 1
            while os.path.lexists(target := self.path.with_name(f"{self.path.name}.old-{number:03d}")):
                number += 1
            self.path.rename(target)
            sync_folder(target.parent)
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            lock.release()
        return target

    def attempt_records(self) -> list[dict[str, Any]]:
        """`attempt.json` of every attempt, by number. One without an `outcome` is going on, or died unseen."""
        return [_read_record(self._attempt_folder(number)) for number in self._attempt_numbers()]

    def _attempt_numbers(self) -> list[int]:
        folders = self.attempts.iterdir() if self.attempts.is_dir() else ()
        return sorted(int(folder.name) for folder in folders if folder.name.isdecimal())

    def _attempt_folder(self, number: int) -> Path:
        return attempt_folder(self.path, number)

    def _mark_dead_attempt(self) -> None:
        """Complete the record of the attempt before this one; having the lock proves that it is not going on."""
        numbers = self._attempt_numbers()
        if not numbers:
            return
        folder = self._attempt_folder(numbers[-1])
        record = _read_record(folder)
        if "outcome" not in record:
            console.notice(f"attempt {numbers[-1]} died without a word (process {record.get('pid', 'unknown')})")
            write_json(folder / _ATTEMPT_FILE, {**record, "number": numbers[-1], "outcome": "died"})
        for place in (self.path, folder):
            remove_unfinished(place)
        for page in folder.glob("heartbeat-*"):  # links that lead nowhere by now, or to another process
            page.unlink()

    def _check_own_folder(self) -> None:
        known = (self.path / OWNER_FILE).exists() or self.attempts.is_dir()
        if not known and any(self.path.iterdir()):
            raise CheckpointError(
                "this folder is not empty and is not a run directory; nothing in it was touched",
                where=str(self.path),
                fix="choose another name=... or runs=...",
            )

    def _unusable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"the run directory cannot be used: {error.strerror or error}",
            where=str(error.filename or self.path),
            fix=fix_for(error, "make room there, or choose a place that you may write to with runs=... or name=..."),
        )


def attempt_folder(run: Path, number: int) -> Path:
    """What an attempt leaves behind."""
    return run / "attempts" / f"{number:03d}"


def worker_log(attempt: Path, rank: int) -> Path:
    """What a worker prints, in its attempt's folder."""
    return attempt / f"worker-{rank}.log"


@dataclass(frozen=True)
class Attempt:
    """One start of a run, as its owner (`RunDirectory.begin_attempt`) or one of its workers (`join`) has it."""

    run: Path
    owner: Owner
    _lock: OwnerLock | None = field(default=None, repr=False)
    _began: float | None = field(default=None, repr=False, compare=False)
    """By a clock that nobody sets; known to whoever has begun the attempt."""

    @classmethod
    def join(cls, run: Path, number: int, token: str | None = None, patience_seconds: float = 0.0) -> Attempt:
        """Take part in an attempt that another process owns.

        Args:
            token: The owner's; not compared when not given, on the owner's own machine.
            patience_seconds: How long it may take until this machine sees what the owner has written.

        Raises:
            CheckpointError: the run is at another attempt by now, or this machine sees another directory.
        """

        def seen() -> Owner | None:
            return read_owner(run) if is_there(run / OWNER_FILE, folders=3) else None

        def is_known() -> bool:
            owner = seen()
            return owner is not None and (owner.attempt > number or _is(owner, number, token))

        wait_until(is_known, patience_seconds, 0.2)
        owner = seen()
        if owner is not None and _is(owner, number, token):
            return cls(run, owner)
        if token is None or (owner is not None and owner.attempt > number):
            raise fenced(run, number)
        raise CheckpointError(
            f"{socket.gethostname()} does not see the run directory of the first worker: attempt {number} has not begun"
            " in this one",
            where=str(run.absolute()),
            fix="choose a place on a file system that all machines of the run share (runs=...)",
        )

    @property
    def number(self) -> int:
        """Counted from 1 over the life of the run."""
        return self.owner.attempt

    @property
    def directory(self) -> Path:
        """Logs, stacks, and why it ended."""
        return attempt_folder(self.run, self.number)

    def worker_log(self, rank: int) -> Path:
        """What a worker prints."""
        return worker_log(self.directory, rank)

    def assert_current(self) -> None:
        """Make sure that the run still belongs to this attempt; call it before publishing anything.

        Raises:
            CheckpointError: another attempt has taken over, or the run was moved away.
        """
        self.fence.assert_held()

    @property
    def fence(self) -> Fence:
        """The same for a process that writes on behalf of this one."""
        return Fence(self.run, self.owner)

    def withdraw(self) -> None:
        """Let the run go as if this attempt had never been; it has done nothing."""
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()

    def finish(
        self,
        outcome: str,
        exit_code: int,
        first_step: int | None = None,
        last_step: int | None = None,
        **facts: Any,
    ) -> None:
        """Write down why this attempt ended, and let the run go. For the attempt's owner.

        A disk too full for that only causes a warning, since there is a reason for ending that matters more.

        Args:
            outcome: In words.
            facts: What else is known of the end.
        """
        steps = {"first_step": first_step, "last_step": last_step}
        known = {name: step for name, step in steps.items() if step is not None}
        ending: dict[str, Any] = {"ended": time.time(), "outcome": outcome, "exit_code": exit_code, **known, **facts}
        if self._began is not None:  # the wall clock may have been set meanwhile
            ending["seconds"] = round(time.monotonic() - self._began, 3)
        if notices := posted(self.directory):
            ending["notices"] = notices
        try:
            write_json(self.directory / _ATTEMPT_FILE, {**_read_record(self.directory), **ending})
        except OSError as error:
            console.warning(f"why attempt {self.number} ended cannot be written down: {error}")
        finally:
            if self._lock is not None:
                self._lock.release()


def _is(owner: Owner, number: int, token: str | None) -> bool:
    return owner.attempt == number and token in (None, owner.token)


def _read_record(attempt: Path) -> dict[str, Any]:
    try:
        return read_json_object(attempt / _ATTEMPT_FILE)
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True)
class StartPoint:
    """Where an attempt starts."""

    checkpoint: CheckpointInfo | None
    """None: at step 0, which follows from the config alone."""

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.checkpoint.step if self.checkpoint else 0


def what_to_do(
    run: RunDirectory, store: CheckpointStore, find: Callable[[], CheckpointInfo | None] | None = None
) -> StartPoint:
    """Resume from the newest checkpoint that verifies; start at step 0 only if nothing is lost by it.

    Call it as the owner of the run. Whatever costs steps that were done before is said loudly.

    Args:
        find: Looks for the checkpoint (`checkpoint.discovery.find_latest`); in the run directory alone when not given.

    Raises:
        CheckpointError: the run had checkpoints, and none is there that verifies.
    """
    checkpoint = store.newest(console.warning) if find is None else find()
    start = StartPoint(checkpoint)
    committed = Ledger(run.ledger_path).committed_step
    if checkpoint is None and committed:
        raise CheckpointError(
            f"step {committed} of this run was saved, but its checkpoints are gone; not starting over by itself",
            where=str(store.directory),
            fix="put the checkpoints back, choose another name=..., or move this run aside with --restart",
        )
    if start.step < committed:
        console.warning(f"going back from step {committed} to step {start.step}; the steps between are done again")
    elif checkpoint is None and len(run.attempt_records()) > 1:
        console.warning(f"{run.path} was started before, but has no checkpoint yet: starting again from step 0")
    return start
