"""Audit logs: files of JSON lines that say who has done what, when and from where, each line bound to those before it.

    {"number":2,"time":...,"user":"...","host":"...","action":"train",...,"previous":"<A>","sha256":"<B>"}

`sha256` is the hash of the line up to itself, `previous` that of the line before. So a line that was changed, removed
or inserted is found. An end that was cut, and a log that was written anew, are found only by an anchor: number and hash
of a line, kept at another place (`headway.checkpoint.remote.audit_anchor`).
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from headway.core.credentials.secrets import redact_values
from headway.core.files.atomic import append_bytes, ends_with_newline, sync_folder
from headway.core.files.foreign import LINE_BYTES, as_number, open_regular, parse_json
from headway.core.files.locks import lock_file
from headway.core.machine.system import host_name
from headway.core.process.waiting import wait_until

#: The log of a run, in its directory.
AUDIT_FILE = "audit.jsonl"
#: How long a writer waits for others. A line takes milliseconds.
_PATIENCE_SECONDS = 5.0
#: Action of a line by which a person says that ends of the log were lost, and why.
ACKNOWLEDGE = "audit acknowledge"
_EMPTY = "0" * 64
_SEALED = re.compile(rb'(.+),"sha256":"([0-9a-f]{64})"\}', re.DOTALL)
_HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Head:
    """The end of a log: its number of lines, and the hash of the last one."""

    lines: int = 0
    sha256: str = _EMPTY


@dataclass(frozen=True)
class Anchor:
    """The head that a log had at some time, as another place keeps it."""

    log: str
    """Name of the log (`AuditLog.name`)."""
    head: Head
    time: float
    host: str
    run: str | None = None
    """Id of the run that the log was of, if it had one."""

    @property
    def key(self) -> str:
        """Log, number of lines and hash, as the anchor is named where it is kept."""
        return f"{self.log}/{self.head.lines:08d}-{self.head.sha256[:16]}"


@dataclass(frozen=True)
class AuditReport:
    """What a check of a log has found."""

    head: Head
    problems: tuple[str, ...]
    """What was changed, cut or written anew; empty for an intact log."""
    notes: tuple[str, ...]
    """What cannot be told, or explains itself."""
    anchored: int | None = None
    """Lines up to which the anchors vouch for the log; None without an anchor of it."""
    lost: tuple[str, ...] = ()
    """Keys of the anchors that saw another log, which no line of this one acknowledges."""
    acknowledged: Mapping[str, str] = field(default_factory=dict)
    """Who has acknowledged the loss of what an anchor saw, when and why, by the key of the anchor."""


class AuditLog:
    """An audit log, which any number of processes and machines may append to.

    Args:
        path: The file; the first line makes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, action: str, **facts: Any) -> Head:
        """Add a line about something that this process does: user, host and time come with it, credentials do not.

        Args:
            action: What is done, in a word or two: `train`, `checkpoints prune`.
            facts: More about it, as JSON values.

        Raises:
            OSError: The line cannot be written, or other processes hold the log.
        """
        with self._locked() as file:
            before = _head_of(file)
            who = {"time": time.time(), "user": user_name(), "host": host_name(), **_came_from()}
            record = redact_values({**who, "action": action, **facts})
            record = {"number": before.lines + 1, **record, "previous": before.sha256}
            body = json.dumps(record, ensure_ascii=False, separators=(",", ":"))[:-1].encode("utf-8", "replace")
            digest = hashlib.sha256(body).hexdigest()
            # A kill during a write may have left a line without its end.
            start = b"" if before.lines == 0 or ends_with_newline(self.path) else b"\n"
            append_bytes(file, start + body + f',"sha256":"{digest}"}}\n'.encode(), flush=True)
            if before.lines == 0:
                sync_folder(self.path.parent)
            return Head(before.lines + 1, digest)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines without their ends; none if there is no file."""
        with suppress(FileNotFoundError), open_regular(self.path) as file:
            yield from _lines(file)

    @property
    def name(self) -> str | None:
        """The name that anchors know the log by, from its first line; None for an empty log."""
        first = next(self.lines(), None)
        return None if first is None else _after(Head(), first).sha256[:16]

    def head(self) -> Head:
        """Return the end of the log."""
        with suppress(FileNotFoundError), open_regular(self.path) as file:
            return _head_of(file)
        return Head()

    def _locked(self) -> BinaryIO:
        taken: list[BinaryIO] = []

        def take() -> bool:
            with suppress(BlockingIOError):
                taken.append(lock_file(self.path))
            return bool(taken)

        if not wait_until(take, _PATIENCE_SECONDS):
            raise BlockingIOError("other processes hold it")
        return taken[0]


def check_log(lines: Iterable[bytes], anchors: Iterable[Anchor] = ()) -> AuditReport:
    """Check that the lines of a log follow one another, and are those that anchors vouch for.

    Args:
        lines: The lines, without their ends.
        anchors: Anchors of this log.
    """
    known = sorted(anchors, key=lambda anchor: anchor.head.lines)
    wanted = {anchor.head.lines for anchor in known}
    heads: dict[int, str] = {}
    problems: list[str] = []
    notes: list[str] = []
    head = Head()
    acknowledged: dict[str, str] = {}
    is_chained = False
    for line in lines:
        number = head.lines + 1
        record = _record(line)
        if record is None and is_chained and line.startswith(b"{") and line.endswith(b"}"):
            problems.append(f"line {number} was written by something else, or was changed")
        elif record is None:
            notes.append(f"line {number} has no hash: it is older than the chain, or its writing was cut off")
        else:
            is_chained = True
            problems += _breaks(line, record, head)
            acknowledged |= _acknowledged(record)
        head = _after(head, line)
        if number in wanted:
            heads[number] = head.sha256
    agree = [anchor for anchor in known if heads.get(anchor.head.lines) == anchor.head.sha256]
    lost = [anchor for anchor in known if anchor not in agree and anchor.key not in acknowledged]
    other = [anchor for anchor in lost if anchor.head.lines in heads]
    beyond = [anchor for anchor in lost if anchor.head.lines > head.lines]
    notes += told_of(acknowledged, [anchor for anchor in known if anchor not in agree])
    if other:
        where = f"line {other[0].head.lines} is not the one that {_told(other[0])}"
        problems.append(f"{where}: the log was written anew from there on, or before")
    if beyond:
        what = f"the log ends after line {head.lines}, and line {beyond[-1].head.lines} {_told(beyond[-1])}"
        problems.append(f"{what}: its end was cut, or lost with a disk")
    anchored = agree[-1].head.lines if agree else None
    return AuditReport(head, tuple(problems), tuple(notes), anchored, tuple(a.key for a in lost), acknowledged)


def told_of(acknowledged: Mapping[str, str], anchors: Iterable[Anchor]) -> list[str]:
    """Return what was acknowledged about anchors, in words: each acknowledgement with the last line that is lost."""
    last: dict[str, int] = {}
    for anchor in anchors:
        if (words := acknowledged.get(anchor.key)) is not None:
            last[words] = max(anchor.head.lines, last.get(words, 0))
    return [f"what was anchored up to line {line} is lost: {words}" for words, line in last.items()]


def _acknowledged(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of the anchors whose loss a line acknowledges, each with who did so, when and why."""
    lost = record.get("lost")
    if record.get("action") != ACKNOWLEDGE or not isinstance(lost, list):
        return {}
    when = as_number(record.get("time")) or 0.0
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    by = f"acknowledged at {at} by {record.get('user')}@{record.get('host')} ({record.get('reason')})"
    return {key: by for key in lost if isinstance(key, str)}


def user_name() -> str:
    """Return the name of the user by the process's own number, not by what the environment says."""
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # as in a container
        return str(number)


def _came_from() -> dict[str, str]:
    """Return where a person came from: the address of the ssh client, and the user before sudo."""
    address = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    before = os.environ.get("SUDO_USER", "")
    return {key: value[:64] for key, value in (("from", address), ("sudo_user", before)) if value}


def _breaks(line: bytes, record: Mapping[str, Any], head: Head) -> Iterator[str]:
    """Yield how a line does not continue the log that ends with a head."""
    number = head.lines + 1
    match = _SEALED.fullmatch(line)
    if match is None or hashlib.sha256(match[1]).hexdigest() != match[2].decode():
        yield f"line {number} was changed"
    if record["previous"] != head.sha256:
        yield f"line {number} does not continue the line before it: lines were removed, inserted or changed before it"
    elif record["number"] != number:
        yield f"line {number} has the number {record['number']}"


def _record(line: bytes) -> Mapping[str, Any] | None:
    """Parse a line of the chain; None if it is not one."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("number"), int):
        return None
    hashes = (record.get("previous"), record.get("sha256"))
    return record if all(isinstance(one, str) and _HASH.fullmatch(one) for one in hashes) else None


def _after(head: Head, line: bytes) -> Head:
    """Return the head after one more line. A line without a hash counts with all that is before it."""
    record = _record(line)
    if record is not None:
        return Head(head.lines + 1, str(record["sha256"]))
    return Head(head.lines + 1, hashlib.sha256(head.sha256.encode() + line).hexdigest())


def _head_of(file: BinaryIO) -> Head:
    """Return the end of an open log; usually its last line says it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LINE_BYTES))
    last = file.read(LINE_BYTES).rstrip(b"\n").rpartition(b"\n")[2]
    record = _record(last)
    if record is not None:
        return Head(int(record["number"]), str(record["sha256"]))
    head = Head()
    with os.fdopen(file.fileno(), "rb", closefd=False) as buffered:
        buffered.seek(0)
        for line in _lines(buffered):
            head = _after(head, line)
    return head


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines; one that is too long comes in parts, none of which is a line of the chain."""
    is_part = False
    while line := file.readline(LINE_BYTES):
        if not is_part or line != b"\n":  # the end of a line whose parts were yielded is none
            yield line.removesuffix(b"\n")
        is_part = not line.endswith(b"\n")


def _told(anchor: Anchor) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(anchor.time))
    return f"was anchored at {when} from {anchor.host}"
