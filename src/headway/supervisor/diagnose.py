"""Who is to blame for the end of an attempt, and all that is known of it: for people in words, for `attempt.json` in
fields."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headway.core.heartbeat import Reading
from headway.runs.run_directory import Attempt
from headway.supervisor.restart_policy import Ending, frames_of_dump
from headway.supervisor.watchdog import Finding

#: What `faulthandler` begins the stack with when a process dies of an error of its own.
_OF_DEATH = "Fatal Python error"


def blame(found: Finding, readings: Mapping[int, Reading], attempt: Attempt) -> Ending:
    """The ending that a worker has brought about, by what it and the others told last."""
    assert found.kind != "waits", "more than a warning"
    reading, host = readings[found.rank], attempt.owner.host
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
    with suppress(OSError):  # it was not asked for, or the disk is broken
        dump = stack.read_text(encoding="utf-8", errors="replace")
    if found.kind == "died" and _OF_DEATH not in dump:
        dump = ""  # a warning's, of what it did long before
    after = f" after step {reading.step}, in phase '{reading.phase}'" if found.kind == "died" else ""
    others = _who_waited(waiting, readings) if found.kind != "died" else ""
    return Ending(
        found.kind,
        f"worker {found.rank} on {host} {found.what}{after}{last_exchange(reading)}{others}",
        1,
        where=str(stack if dump else attempt.worker_log(found.rank)),
        fix="run the same command again: it goes on from the newest checkpoint",
        rank=found.rank,
        step=reading.step,
        signal=found.signal,
        frames=frames_of_dump(dump),
        facts=facts,
    )


def last_exchange(reading: Reading) -> str:
    """How far a worker came in its exchanges, to be added to what is said of it; nothing before the first."""
    if not reading.begun.number:
        return ""
    unfinished = "still in it" if reading.waits_for else "not finished"
    return f"; last exchange {reading.begun}, {'finished' if reading.begun == reading.finished else unfinished}"


def exchanges(readings: Mapping[int, Reading]) -> dict[str, Any] | None:
    """The same of every worker, for the record, by rank."""
    pages = {str(rank): page for rank, page in sorted(readings.items()) if page.begun.number}
    told = {rank: {"begun": page.begun._asdict(), "finished": page.finished._asdict()} for rank, page in pages.items()}
    return told or None


def _who_waited(ranks: list[int], readings: Mapping[int, Reading]) -> str:
    """With the exchange, where all wait in the same one."""
    if not ranks:
        return ""
    where = {readings[rank].begun for rank in ranks if readings[rank].waits_for}
    inside = f" in exchange {where.pop()}" if len(where) == 1 else ""
    return f"; worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} waited for it{inside}"
