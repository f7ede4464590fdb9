"""Diagnosis of the end of an attempt: its outcome, and which worker is to blame, in words and for `attempt.json`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from headway.config import Config
from headway.core.coordination.heartbeat import Reading
from headway.core.credentials.secrets import redact
from headway.core.errors import INTERRUPTED, BudgetReached, Cancelled, Preempted, SavesFailed
from headway.run.directory.run_directory import Attempt
from headway.run.session.attempt import final_step
from headway.run.supervisor.error_report import ErrorReport
from headway.run.supervisor.machines.attempt_machines import MachineEnd
from headway.run.supervisor.machines.members import Member
from headway.run.supervisor.restart_policy import AttemptOutcome, frames_of_dump, newest_checkpoint
from headway.run.supervisor.watchdog import Finding, in_words
from headway.run.supervisor.worker_status import AGAIN

#: Kinds of outcomes by the exit code of workers that have saved their state.
SAVED_KINDS = {Preempted.exit_code: "preempted", BudgetReached.exit_code: "budget", Cancelled.exit_code: "cancelled"}
#: The words with which `faulthandler` begins the stack of a process that dies of a fatal error.
_FATAL_ERROR = "Fatal Python error"


@dataclass(frozen=True)
class Evidence:
    """The supervisor's knowledge of an attempt, by which it explains how that ended."""

    config: Config
    attempt: Attempt | None
    """The record; None if the attempt has not begun."""
    readings: Mapping[int, Reading]
    """The last heartbeat of every worker that has begun, by rank."""
    signals: Sequence[int]
    """Signals to stop that have come, in order."""
    host_of: Callable[[int], str | None]
    """Returns the name of a worker's machine; None for the owner's."""

    @property
    def interrupted(self) -> bool:
        """Return whether Ctrl-C came twice, so that nothing is worth waiting for."""
        return self.signals.count(signal.SIGINT) > 1

    def explain_end(self, end: MachineEnd, found: Finding | None) -> AttemptOutcome:
        """Return the outcome that the end of the workers shows, and keep the traceback of a crash.

        Args:
            end: That of the machine whose end says most.
            found: What the watchdog had found before.
        """
        if end.is_good:
            return AttemptOutcome("finished", "finished", 0)
        code = end.code
        reported = end.reported
        # Exit code 0 without a "done" message is no success: it also appears if SIGCHLD is ignored here.
        lost = code == 0
        code = (reported.exit_code if reported is not None else 1) if lost else code
        if self.interrupted and code != 75:
            return AttemptOutcome("error", "interrupted", INTERRUPTED)
        stopping = signal.Signals(self.signals[0]).name if self.signals else None
        if reported is not None and reported.exit_code != 1:
            kind = SAVED_KINDS.get(reported.exit_code, "error")
            if reported.type == SavesFailed.__name__:
                kind = "error"  # the code lets a scheduler start the run again, but nothing is saved
            return _error(kind, reported)
        if stopping is not None and newest_checkpoint(self.config.run_directory) == final_step(self.config):
            return AttemptOutcome("finished", "finished", 0)  # the signal came after the last save
        if stopping is not None and (reported is None or reported.signal):
            what = f"stopped by {stopping} before a checkpoint could be saved; the newest one is intact"
            return AttemptOutcome("preempted", what, 75, str(self.config.run_directory), "run the same command again")
        if found is not None and (reported is None or end.is_consequence):
            return self.blame(found)
        if reported is not None and reported.signal is None:
            self._keep_traceback(reported)
            deliberate = reported.frames is None  # a deliberate error needs no stack
            crash = _error(
                "error", reported, None if deliberate else f"worker {reported.rank} crashed: {reported.what}"
            )
            return replace(crash, facts={"exchanges": exchanges(self.readings)})
        rank = end.rank
        number = end.signal
        how = "cause unknown" if lost and not number else in_words(-number if number else code)
        if self.attempt is None or rank not in self.readings:
            what = f"worker {rank} died ({how}) before its first step"
            return AttemptOutcome("died", what, 1, str(self.config.run_directory), AGAIN, rank=rank, signal=number)
        outcome = self.blame(Finding("died", rank, f"died ({how})", signal=number, suspects=(rank,)))
        return replace(outcome, exit_code=code if code > 1 else 1)

    def explain_loss(self, member: Member, why: str, rank: int) -> AttemptOutcome:
        """Return the outcome of an attempt of which a machine is lost; `rank` is the first of its workers."""
        reading = self.readings.get(rank)
        after = "" if reading is None else f", after step {reading.step}"
        return AttemptOutcome(
            "lost",
            f"{member} is lost{after}: {why}",
            1,
            where=str(self.config.run_directory),
            fix="look at that machine; start the same command on it again, and it is taken in",
            rank=rank,
            step=None if reading is None else reading.step,
            facts={
                "host": member.host,
                "machine": member.number,
                "exchanges": exchanges(self.readings),
            },
        )

    def blame(self, found: Finding) -> AttemptOutcome:
        """Return the outcome of a finding of the watchdog."""
        assert self.attempt is not None, "begun"
        return diagnose(found, self.readings, self.attempt, self.host_of(found.rank))

    def _keep_traceback(self, reported: ErrorReport) -> None:
        if self.attempt is not None and reported.traceback:
            with suppress(OSError):  # a full disk must not hide what went wrong
                (self.attempt.directory / "traceback.txt").write_text(redact(reported.traceback), encoding="utf-8")


def _error(kind: Any, reported: ErrorReport, what: str | None = None) -> AttemptOutcome:
    return AttemptOutcome(
        kind,
        what or reported.what,
        reported.exit_code,
        where=reported.where,
        fix=reported.fix,
        rank=reported.rank,
        step=reported.step,
        error=reported.type,
        frames=tuple(reported.frames or ()),
    )


def diagnose(
    found: Finding, readings: Mapping[int, Reading], attempt: Attempt, host: str | None = None
) -> AttemptOutcome:
    """Return the outcome of an attempt that a worker ended, from the last reports of all workers.

    Args:
        host: The worker's machine, if it is not the owner's.
    """
    assert found.kind != "waits", "more than a warning"
    reading = readings[found.rank]
    host = host or attempt.owner.host
    waiting = [rank for rank in readings if rank not in found.suspects]
    facts: dict[str, Any] = {
        "host": host,
        "phase": str(reading.phase),
        "waits_for": reading.waits_for or None,
        "silent_seconds": round(found.seconds, 3) or None,
        "suspects": list(found.suspects) if len(found.suspects) > 1 else None,
        "waiting_workers": waiting or None,
        "exchanges": exchanges(readings),
    }
    stack = attempt.directory / f"stack-{found.rank}.txt"
    dump = ""
    with suppress(OSError):  # no stack was requested, or the disk is broken
        dump = stack.read_text(encoding="utf-8", errors="replace")
    if found.kind == "died" and _FATAL_ERROR not in dump:
        dump = ""  # an old stack that a warning requested
    after = f" after step {reading.step}, in phase '{reading.phase}'" if found.kind == "died" else ""
    others = _waiting_words(waiting, readings) if found.kind != "died" else ""
    return AttemptOutcome(
        found.kind,
        f"worker {found.rank} on {host} {found.what}{after}{last_exchange(reading)}{others}",
        1,
        where=str(stack if dump else attempt.worker_log(found.rank)),
        fix="run the same command again: it continues from the newest checkpoint",
        rank=found.rank,
        step=reading.step,
        signal=found.signal,
        frames=frames_of_dump(dump),
        facts=facts,
    )


def last_exchange(reading: Reading) -> str:
    """Describe the last exchange of a worker, as the end of a sentence; empty before the first."""
    if not reading.begun.number:
        return ""
    unfinished = "still in it" if reading.waits_for else "not finished"
    return f"; last exchange {reading.begun}, {'finished' if reading.begun == reading.finished else unfinished}"


def exchanges(readings: Mapping[int, Reading]) -> dict[str, Any] | None:
    """Return the last exchange of every worker, by rank, for the record; None if there was none."""
    pages = {str(rank): page for rank, page in sorted(readings.items()) if page.begun.number}
    found = {rank: {"begun": page.begun._asdict(), "finished": page.finished._asdict()} for rank, page in pages.items()}
    return found or None


def _waiting_words(ranks: list[int], readings: Mapping[int, Reading]) -> str:
    """Describe which workers waited, and the exchange if all wait in one."""
    if not ranks:
        return ""
    where = {readings[rank].begun for rank in ranks if readings[rank].waits_for}
    inside = f" in exchange {where.pop()}" if len(where) == 1 else ""
    return f"; worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} waited for it{inside}"
