"""The audit log of a run: a line for each command that changes it, whose end is anchored in the remote tier."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.checkpoint.remote.audit_anchor import anchor_log, audit_place, read_anchors
from headway.checkpoint.run_identity import read_run_id
from headway.config import RemoteConfig, load_resolved
from headway.core.audit import ACKNOWLEDGE, AUDIT_FILE, Anchor, AuditLog, AuditReport, check_log, told_of
from headway.core.console import warning
from headway.core.errors import CheckpointError, HeadwayError

_warned: set[Path] = set()


@dataclass(frozen=True)
class RunAudit:
    """The check of a run's audit log against its anchors."""

    report: AuditReport
    url: str | None
    """Where the anchors are; None for a run without a remote tier."""
    unseen: str
    """What this check cannot see, in words; empty if nothing."""


def record(run: Path, action: str, *, anchors: bool = False, **facts: Any) -> None:
    """Add a line to the audit log of a run. Trouble with it is a warning, once, and never ends what it is about.

    Args:
        run: The run directory.
        action: What is done, in a word or two.
        anchors: Whether to anchor the log in the run's remote tier, for some seconds at most. A training does so when
            it acquires the tier.
        facts: More about it, as JSON values; credentials are redacted.
    """
    try:
        AuditLog(run / AUDIT_FILE).append(action, **facts)
    except OSError as error:
        if run not in _warned:
            _warned.add(run)
            warning(f"the audit log of {run} gets no line for '{action}': {error.strerror or error}")
        return
    remote = _remote_of(run) if anchors else None
    if remote is not None:
        anchor_log(remote, run)


def check_audit(run: Path) -> RunAudit:
    """Check the audit log of a run: that its lines follow one another, and are those that the remote tier vouches for.

    Raises:
        CheckpointError: The remote tier cannot be reached.
        ConfigError: It denies access, or the config of the run cannot be read.
        OSError: The log cannot be read.
    """
    log = AuditLog(run / AUDIT_FILE)
    remote = load_resolved(run / "config.yaml").checkpoint.remote if (run / "config.yaml").exists() else None
    if remote is None:
        unseen = "without a remote tier (checkpoint.remote) nothing shows whether its end was cut, its last line"
        return RunAudit(check_log(log.lines()), None, f"{unseen} removed, or the whole of it written anew")
    found = list(read_anchors(audit_place(remote, run)))
    name = log.name
    report = check_log(log.lines(), [anchor for anchor in found if anchor.log == name])
    others = [anchor for anchor in found if anchor.log != name]
    report = _with_other_logs(report, others, read_run_id(run))
    last = report.anchored or 0
    unseen = ""
    if last < report.head.lines:
        unseen = f"no anchor vouches for what follows line {last}: it could be written anew, and its end be cut"
    return RunAudit(report, f"{remote.url}/{run.resolve().name}", unseen)


def acknowledge_loss(run: Path, reason: str) -> None:
    """Add a line that says that ends of the log which were anchored are lost, and why: `check_audit` then notes them.

    A line that was changed, removed or inserted cannot be acknowledged.

    Args:
        run: The run directory.
        reason: What has happened, for those who read the log later.

    Raises:
        CheckpointError: Nothing that was anchored is missing, or the remote tier cannot be reached.
        ConfigError: as `check_audit`.
        OSError: The log cannot be read, or the line cannot be written.
    """
    lost = check_audit(run).report.lost
    if not lost:
        raise CheckpointError(
            "there is no loss to acknowledge: all that was anchored is there",
            where=str(run / AUDIT_FILE),
            fix=f"headway audit verify {run}",
        )
    AuditLog(run / AUDIT_FILE).append(ACKNOWLEDGE, reason=reason, lost=list(lost))
    remote = _remote_of(run)
    if remote is not None:
        anchor_log(remote, run)


def move_log(old: Path, new: Path) -> None:
    """Move the audit log of a run that was moved aside to the run that takes its name: it is that of the name."""
    with suppress(OSError):
        new.mkdir(parents=True, exist_ok=True)
        if (old / AUDIT_FILE).exists() and not (new / AUDIT_FILE).exists():
            (old / AUDIT_FILE).rename(new / AUDIT_FILE)


def _with_other_logs(report: AuditReport, others: Sequence[Anchor], run_id: str | None) -> AuditReport:
    """Add what anchors of other logs tell: one of the same run is what this log was, or what it should continue."""
    problems = list(report.problems)
    notes = [*report.notes, *told_of(report.acknowledged, others)]
    others = [anchor for anchor in others if anchor.key not in report.acknowledged]
    lost = list(report.lost)
    newest = {anchor.log: anchor for anchor in sorted(others, key=lambda anchor: anchor.head.lines)}
    for log, anchor in newest.items():
        known = f"another log ({log}, {anchor.head.lines} lines, from {anchor.host}) is anchored"
        if run_id is not None and anchor.run == run_id:
            problems.append(f"{known} for this run: this one was written anew, or replaces one that was lost")
            lost += [one.key for one in others if one.log == log]
        else:
            notes.append(f"{known} under this name, as by a launch from another folder")
    return replace(report, problems=tuple(problems), notes=tuple(notes), lost=tuple(lost))


def _remote_of(run: Path) -> RemoteConfig | None:
    """Return where a run keeps remote checkpoints; None if nowhere, or if its config cannot be read."""
    try:
        return load_resolved(run / "config.yaml").checkpoint.remote
    except (HeadwayError, OSError):
        return None
