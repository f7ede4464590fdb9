"""`headway audit`: who has changed a run, and whether the record of that is whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.core.audit import AUDIT_FILE, AuditLog
from headway.core.command_line import JsonOption, RunArgument, print_json, print_table
from headway.core.console import notice, print_line
from headway.core.errors import CheckpointError
from headway.core.files.foreign import as_number, parse_json_lines
from headway.core.format import counted
from headway.run.directory.audit import acknowledge_loss, check_audit
from headway.telemetry.summary import time_text

audit = typer.Typer(no_args_is_help=True, help="Show and verify who has changed a run, when, and from where.")

#: Keys that have a column, or that only the chain needs.
_COLUMNS = frozenset(("number", "time", "user", "host", "from", "sudo_user", "action", "command", "previous", "sha256"))


@audit.command()
def show(
    run: RunArgument,
    last: Annotated[int | None, typer.Option("--last", min=1, help="Only the last N lines.")] = None,
    json: JsonOption = False,
) -> None:
    """List what was done to a run: who, when, from where, and the command.

    [bold]Examples[/bold]

    headway audit show runs/quickstart
    headway audit show runs/quickstart --last 20 --json
    """
    lines = list(parse_json_lines(_log_of(run).lines()))[-(last or 0) :]
    if json:
        print_json(lines)
    elif not lines:
        notice(f"{run} has no audit log: no command has changed it since it was made")
    else:
        print_table(["LINE", "TIME", "WHO", "ACTION", "WHAT"], [_row(line) for line in lines], numeric=(0,))


@audit.command()
def verify(
    run: RunArgument,
    acknowledge: Annotated[
        str | None,
        typer.Option("--acknowledge", metavar="REASON", help="Record that lines were lost, as with a disk, and why."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check that no line of the audit log of a run was changed, removed or added, and that its end was not cut.

    The end, and a log that was written anew, are checked against the run's remote tier; without one the command says
    what cannot be seen. Exit code 4 when the log is not what it was. After the loss of a disk, --acknowledge adds a
    line with your name and reason, and the lost lines are a note from then on; changed lines stay problems.

    [bold]Examples[/bold]

    headway audit verify runs/quickstart
    headway audit verify runs/quickstart --json
    headway audit verify runs/quickstart --acknowledge "the disk failed"
    """
    log = _log_of(run)
    if acknowledge is not None:
        acknowledge_loss(run, acknowledge)
    found = check_audit(run)
    report = found.report
    if json:
        print_json({"run": str(run), "intact": not report.problems, **asdict(found)})
    else:
        print_line(f"{log.path}: {counted(report.head.lines, 'line')}, the last one {report.head.sha256[:16]}")
        if report.anchored is not None:
            print_line(f"anchored at {found.url} up to line {report.anchored}")
        for text in (*report.notes, *([found.unseen] if found.unseen else [])):
            print_line(f"note: {text}")
        for problem in report.problems:
            print_line(f"problem: {problem}")
    if report.problems:
        raise CheckpointError(
            f"the audit log is not what it was: {counted(len(report.problems), 'problem')}",
            where=str(log.path),
            fix="keep a copy of it as it is, and find out who could write there",
        )


def _log_of(run: Path) -> AuditLog:
    if not run.is_dir():
        raise CheckpointError("there is no such run", where=str(run), fix="headway runs list shows the runs")
    return AuditLog(run / AUDIT_FILE)


def _row(line: Mapping[str, Any]) -> list[str]:
    when = time_text(as_number(line.get("time")))
    return [str(line.get("number", "")), when, _who(line), str(line.get("action", "")), _what(line)]


def _who(line: Mapping[str, Any]) -> str:
    who = f"{line.get('user')}@{line.get('host')}"
    if "sudo_user" in line:
        who += f", before sudo {line['sudo_user']}"
    return f"{who} from {line['from']}" if "from" in line else who


def _what(line: Mapping[str, Any]) -> str:
    facts = [f"{key}={value}" for key, value in line.items() if key not in _COLUMNS]
    return "; ".join([*([str(line["command"])] if "command" in line else []), *facts])
