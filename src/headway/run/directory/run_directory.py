"""A run directory: its files, and its attempts."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import socket
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.checkpoint.save.fence import Fence, fenced
from headway.checkpoint.save.writer_locks import wait_for_writers
from headway.core import console
from headway.core.audit import AUDIT_FILE
from headway.core.coordination.lease import OWNER_FILE, seconds_run
from headway.core.coordination.owner import Owner, read_owner
from headway.core.coordination.preemption_board import posted
from headway.core.credentials.secrets import redact_arguments
from headway.core.errors import CheckpointError, fix_for
from headway.core.files.atomic import remove_unfinished, sync_folder, write_json
from headway.core.files.foreign import as_number, read_json_object
from headway.core.files.paths import is_there
from headway.core.files.reserve import RESERVE_BYTES, free_reserve, take_reserve
from headway.core.format import format_bytes
from headway.core.process.waiting import wait_until
from headway.run.directory.audit import record
from headway.run.directory.ownership import OwnerLock

_ATTEMPT_FILE = "attempt.json"
#: Keys of an attempt's record: the price of its machines, and how many attempts of the same command came before it.
PRICE_KEY = "usd_per_hour"
RESTARTS_KEY = "restarts"
#: Key of `attempt.json` on several machines: fingerprint of what their common config says about the mathematics.
IDENTITY_KEY = "identity"
#: A key of the record of an attempt that was killed: its last write, in Unix seconds, noted by the next attempt.
LAST_SIGN_KEY = "last_sign"
#: A key of such a record too: for how many seconds the attempt ran until then, by a monotonic clock.
RAN_KEY = "ran"
#: A key of the record of an attempt of the same command as the one before: for how many seconds the command held the
#: machines between the two, by a monotonic clock.
HELD_KEY = "held_seconds"
#: A run directory was copied if its files are newer than its attempt by this much; then their times mean nothing.
_COPIED_SECONDS = 300.0
#: What a launch leaves in a run directory before the run begins, next to the audit log: its handle, and its files.
LAUNCH_FILE = "launch.json"
LAUNCH_FOLDER = "launch"
#: Marks a run whose change of keys is not finished.
RESEALING_FILE = ".resealing"
#: How long to wait for writer processes of an earlier attempt to finish their checkpoints.
_WRITERS_SECONDS = 5.0


def command_line() -> str:
    """Return this process's command in shell syntax (`checkpoint.every='3 steps'`), without credentials."""
    return shlex.join(redact_arguments(sys.argv))


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run. Making this object touches nothing on disk."""

    path: Path

    @property
    def config_path(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def record_path(self) -> Path:
        """The provenance of the run: command, code, environment, fingerprints."""
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
        """The HTML report of the run."""
        return self.path / "report.html"

    def claim(self) -> OwnerLock:
        """Lock the run directory for this process, for one attempt or several; make it if needed.

        Raises:
            CheckpointError: The directory is in use, cannot be written, or is not a run directory.
        """
        self.check_usable()
        if (self.path / RESEALING_FILE).exists():
            raise CheckpointError(
                "a change of the keys of its checkpoints is not finished, and some have the old key",
                where=str(self.path),
                fix=f"headway checkpoints reseal {self.path} with both keys",
            )
        try:
            new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            if new:
                sync_folder(self.path.parent)
        except OSError as error:
            raise self._unusable(error) from error
        return OwnerLock.take(self.path)

    def check_usable(self) -> None:
        """Raise an error if the path cannot become a run directory; touch nothing.

        Raises:
            CheckpointError: The path cannot be written, or is a folder that is not a run directory.
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
        self,
        command: str,
        claimed: OwnerLock | None = None,
        started: float | None = None,
        *,
        action: str = "train",
        **facts: Any,
    ) -> Attempt:
        """Begin an attempt, which fences all earlier ones.

        Args:
            command: The command, for the attempt's record.
            claimed: The lock, if this process holds it already and keeps it after the attempt.
            started: Start of the attempt's first process in Unix seconds, if that was earlier.
            action: What the command does, for the audit log, which has a line for the first attempt of a command.
            facts: More facts for the attempt's record.

        Raises:
            CheckpointError: The directory is in use, cannot be written, or is not a run directory.
        """
        lock = claimed or self.claim()
        try:
            # Wait for writers of a killed attempt: the new token fences them, and they could no longer publish.
            wait_for_writers(self.path, _WRITERS_SECONDS)
            self._mark_dead_attempt()
            # Higher than any earlier number, even if its folder or the owner's record is gone.
            last_owner = read_owner(self.path)
            number = max([*self._attempt_numbers(), last_owner.attempt if last_owner else 0, 0]) + 1
            held = self._held_seconds(lock, number - 1)
            owner = Owner.this_process(number)
            began = time.monotonic() - (max(0.0, owner.since - started) if started else 0.0)
            lock.write(owner, began)
            attempt = Attempt(self.path, owner, None if claimed else lock, began)
            attempt.directory.mkdir(parents=True)
            beginning = {"command": command, "pid": owner.pid, "host": owner.host, "started": started or owner.since}
            write_json(attempt.directory / _ATTEMPT_FILE, {"number": number, **beginning, **held, **facts})
        except OSError as error:
            if claimed is None:
                lock.release()
            raise self._unusable(error) from error
        if not facts.get(RESTARTS_KEY):
            record(self.path, action, attempt=number, command=command)
        try:
            take_reserve(self.path)
        except OSError as error:
            console.warning(
                f"{format_bytes(RESERVE_BYTES)} cannot be reserved in {self.path} ({error.strerror or error}):"
                " if the disk becomes full, records of this run wait in memory"
            )
        return attempt

    def has_begun(self) -> bool:
        """Return whether the run has metrics, a ledger or a checkpoint (damaged or not)."""
        recorded = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
        saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return recorded or saved or (self.ledger_path.exists() and self.ledger_path.stat().st_size > 0)

    def archive(self) -> Path | None:
        """Move the run to `<name>.old-NNN` next to it, so that the name is free.

        Returns:
            The new path; None if there is nothing to move.

        Raises:
            CheckpointError: The run is in use, is not a run, or cannot be moved.
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
            free_reserve(target)
            sync_folder(target.parent)
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            lock.release()
        return target

    def attempt_records(self) -> list[dict[str, Any]]:
        """Return `attempt.json` of every attempt, by number; one without an `outcome` is running, or was killed."""
        return [_read_record(self._attempt_folder(number)) for number in self._attempt_numbers()]

    def _attempt_numbers(self) -> list[int]:
        folders = self.attempts.iterdir() if self.attempts.is_dir() else ()
        return sorted(int(folder.name) for folder in folders if folder.name.isdecimal())

    def _attempt_folder(self, number: int) -> Path:
        return attempt_folder(self.path, number)

    def _held_seconds(self, lock: OwnerLock, before: int) -> dict[str, float]:
        """Return how long this command has held the machines since its last attempt; empty if that was another's."""
        begun = lock.seconds_since(before)
        ran = as_number(_read_record(self._attempt_folder(before)).get("seconds"))
        return {} if begun is None or ran is None else {HELD_KEY: round(max(0.0, begun - ran), 3)}

    def _mark_dead_attempt(self) -> None:
        """Complete the record of the previous attempt; this process holds the lock, so that attempt has ended."""
        numbers = self._attempt_numbers()
        if not numbers:
            return
        folder = self._attempt_folder(numbers[-1])
        record = _read_record(folder)
        if "outcome" not in record:
            console.notice(f"attempt {numbers[-1]} died (process {record.get('pid', 'unknown')})")
            sign = last_sign_of_life(folder, as_number(record.get("started")))
            noted = {} if sign is None else {LAST_SIGN_KEY: sign}
            ran = seconds_run(self.path, numbers[-1], 0.0 if sign is None else self._newest_write(sign))
            noted |= {} if ran is None else {RAN_KEY: round(ran, 3)}
            write_json(folder / _ATTEMPT_FILE, {**record, "number": numbers[-1], "outcome": "died", **noted})
        for place in (self.path, folder):
            remove_unfinished(place)
        for page in folder.glob("heartbeat-*"):  # their links are dangling now, or lead to another process
            page.unlink()

    def _newest_write(self, sign: float) -> float:
        """Return the newest of an attempt's last write to its folder and that to the metrics, in Unix seconds."""
        with suppress(OSError):
            return max(sign, self.metrics_path.stat().st_mtime)
        return sign

    def _check_own_folder(self) -> None:
        known = (self.path / OWNER_FILE).exists() or self.attempts.is_dir()
        of_a_launch = {LAUNCH_FILE, LAUNCH_FOLDER, AUDIT_FILE}
        if not known and any(path.name not in of_a_launch for path in self.path.iterdir()):
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


def last_sign_of_life(folder: Path, started: float | None) -> float | None:
    """Return when an attempt that has not ended last wrote to its folder; None if the files do not show that."""
    times = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    with suppress(OSError):
        began = (folder / _ATTEMPT_FILE).stat().st_mtime
        if started is not None and abs(began - started) < _COPIED_SECONDS:
            return max(times, default=began)
    return None


def attempt_folder(run: Path, number: int) -> Path:
    """Return the folder of an attempt."""
    return run / "attempts" / f"{number:03d}"


def newest_attempt(run: Path) -> Path | None:
    """Return the folder of a run's newest attempt; None before the first one."""
    folders = [path for path in (run / "attempts").glob("*") if path.name.isdecimal()]
    return max(folders, key=lambda path: int(path.name), default=None)


def worker_log(attempt: Path, rank: int) -> Path:
    """Return the path of a worker's log in its attempt's folder."""
    return attempt / f"worker-{rank}.log"


@dataclass(frozen=True)
class Attempt:
    """One start of a run, held by its owner (`RunDirectory.begin_attempt`) or one of its workers (`join`)."""

    run: Path
    owner: Owner
    _lock: OwnerLock | None = field(default=None, repr=False)
    _began: float | None = field(default=None, repr=False, compare=False)
    """Start by the monotonic clock; None in workers that joined."""

    @classmethod
    def join(cls, run: Path, number: int, token: str | None = None, patience_seconds: float = 0.0) -> Attempt:
        """Join an attempt that another process owns.

        Args:
            run: The run directory.
            number: Number of the attempt.
            token: The owner's token; None skips the comparison, on the owner's own machine.
            patience_seconds: How long to wait until this machine sees what the owner has written.

        Raises:
            CheckpointError: The run is at another attempt now, or this machine sees another directory.
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
        """Number of the attempt, counted from 1 over the life of the run."""
        return self.owner.attempt

    @property
    def directory(self) -> Path:
        """Folder of the attempt: logs, stacks, and its outcome."""
        return attempt_folder(self.run, self.number)

    def worker_log(self, rank: int) -> Path:
        """Return the path of a worker's log."""
        return worker_log(self.directory, rank)

    def assert_current(self) -> None:
        """Raise an error unless the run still belongs to this attempt; call this before publishing anything.

        Raises:
            CheckpointError: Another attempt has taken over, or the run was moved away.
        """
        self.fence.assert_held()

    @property
    def fence(self) -> Fence:
        """The fence for a process that writes on behalf of this attempt."""
        return Fence(self.run, self.owner)

    def renewing_lease(self) -> AbstractContextManager[None]:
        """Return a block in which readers see that the attempt lives; for the process that began it."""
        return nullcontext() if self._lock is None else self._lock.renewing()

    def withdraw(self) -> None:
        """Remove the attempt's folder and release the run, for an attempt that has done nothing."""
        shutil.rmtree(self.directory, ignore_errors=True)
        free_reserve(self.run)
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
        """Record the outcome of this attempt and release the run; only the attempt's owner may call this.

        A full disk only gives a warning, since the reason for ending matters more.

        Args:
            outcome: The outcome in words.
            exit_code: Exit code of the command.
            first_step: The first step of the attempt.
            last_step: The step after its last one.
            facts: More facts about the end.
        """
        steps = {"first_step": first_step, "last_step": last_step}
        known = {name: step for name, step in steps.items() if step is not None}
        ending: dict[str, Any] = {"ended": time.time(), "outcome": outcome, "exit_code": exit_code, **known, **facts}
        if self._began is not None:  # the wall clock may have been set meanwhile
            ending["seconds"] = round(time.monotonic() - self._began, 3)
        if notices := posted(self.directory):
            ending["notices"] = notices
        free_reserve(self.run)  # a run that has ended needs none, and this record may be what it was for
        try:
            write_json(self.directory / _ATTEMPT_FILE, {**_read_record(self.directory), **ending})
        except OSError as error:
            console.warning(f"the outcome of attempt {self.number} cannot be recorded: {error}")
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
