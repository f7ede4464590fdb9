"""Diagnosis of the end of an attempt: which worker is to blame, in words for people, in fields for `attempt.json`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headway.core.coordination.heartbeat import Reading
from headway.runs.run_directory import Attempt
from headway.supervisor.restart_policy import AttemptOutcome, frames_of_dump
from headway.supervisor.watchdog import Finding

#: The words with which `faulthandler` begins the stack of a process that dies of a fatal error.
_FATAL_ERROR = "Fatal Python error"


def diagnose(
    found: Finding, readings: Mapping[int, Reading], attempt: Attempt, host: str | None = None
) -> AttemptOutcome:
    """Return the outcome of an attempt that a worker ended, from the last reports of all workers.

    Args:
        host: The worker's machine, if it is not the owner's.
    """
    assert found.kind != "waits", "more than a warning"
    reading, host = readings[found.rank], host or attempt.owner.host
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
