"""`headway ledger`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.core.command_line import JsonOption, RunArgument, print_json, print_table
from headway.core.console import print_line
from headway.core.errors import CheckpointError
from headway.run.directory.ledger_proof import prove

if TYPE_CHECKING:
    from headway.run.directory.ledger_proof import LedgerProof

HELP = """Prove that a run used every row of its plan exactly once, despite all failures.

Reads ledger.jsonl, the config and the token store's manifest. The commits must be contiguous from step 0 to the newest
checkpoint. The rows, computed again, must match the counts of the ledger: in each epoch of each source no row is used
twice, and no row is skipped except by a decision in the ledger. Exit codes: 0 proven, 4 not proven.

[bold]Examples[/bold]

headway ledger runs/quickstart
headway ledger runs/quickstart --json
headway ledger runs/big --every-row
headway ledger /backup/runs/big --store /data/store
"""


_DECIDED = {"skip": "not updated with", "rollback": "left out", "stop": "stopped at"}


def ledger(
    run: RunArgument,
    store: Annotated[Path | None, typer.Option("--store", help="Token store, if it was moved.")] = None,
    every_row: Annotated[
        bool | None,
        typer.Option(
            "--every-row/--counts-only",
            help="Check every row, or only counts; by default every row of at most 100M.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run `headway ledger`."""
    proof = prove(run, store, every_row)
    if json:
        print_json(_plain(proof))
    else:
        _print(proof)
    if proof.problems:
        raise CheckpointError(
            "not proven: " + "; ".join(proof.problems),
            where=str(run / "ledger.jsonl"),
            fix="restore what was changed from a copy; what went wrong while training stays in the ledger",
        )


def _print(proof: LedgerProof) -> None:
    if proof.epochs:
        several = any(epoch.first_step for epoch in proof.epochs)
        headers = ["SOURCE", *(["FROM STEP"] if several else []), "EPOCHS", "ROWS IN PLAN", "USED", "TWICE", "SKIPPED"]
        headers += ["LEFT OUT"] if proof.skipped_ranges else []
        ended = any(epoch.unused for epoch in proof.epochs)
        headers += ["NOT USED"] if ended else []
        rows = [
            [
                epoch.source,
                *([f"{epoch.first_step:,}"] if several else []),
                str(epoch.first_epoch)
                if epoch.first_epoch == epoch.last_epoch
                else f"{epoch.first_epoch} to {epoch.last_epoch}",
                f"{epoch.rows:,}",
                f"{epoch.used:,}",
                f"{epoch.twice:,}",
                f"{epoch.skipped:,}",
                *([f"{epoch.left_out:,}"] if proof.skipped_ranges else []),
                *([f"{epoch.unused:,}"] if ended else []),
            ]
            for epoch in proof.epochs
        ]
        print_table(headers, rows, numeric=range(1, len(headers)))
    for begun in proof.beginnings:
        print_line(f"began at step {begun.step:,} from a checkpoint of run '{begun.run.get('name')}' ({begun.place})")
    for start in proof.segments:
        changes = "; ".join(start.segment.get("changes", ())) or "as the run began"
        print_line(f"segment from step {start.first_step:,} on: {changes}")
    for rollback in proof.rollbacks:
        for commit in rollback.struck:
            steps = f"{_steps(commit.first_step, commit.last_step)} of attempt {commit.attempt}"
            print_line(f"rolled back: {steps} ({rollback.reason})")
    for decision in proof.decisions:
        steps = f"{_steps(decision.first_step, decision.last_step)} by attempt {decision.attempt}"
        print_line(f"{_DECIDED.get(decision.action, decision.action)}: {steps} ({decision.reason})")
    if proof.steps:
        print_line("steps count from 0 here: what training calls step 1 is step 0")
    if not proof.problems:
        print_line(f"proven for steps 0 to {proof.steps - 1:,}, {proof.rows:,} rows:")
        for line in proof.basis:
            print_line(f"  {line}")


def _steps(first: int, end: int) -> str:
    return f"step {first:,}" if end == first + 1 else f"steps {first:,} to {end - 1:,}"


def _plain(proof: LedgerProof) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "run": str(proof.run),
        "run_id": proof.run_id,
        "proven": not proof.problems,
        "problems": proof.problems,
        "steps": proof.steps,
        "rows": proof.rows,
        "checkpoint_step": proof.checkpoint_step,
        "looked_at_rows": proof.looked_at,
        "basis": proof.basis if not proof.problems else [],
        "epochs": [{**asdict(epoch), "sound": epoch.sound} for epoch in proof.epochs],
        "beginnings": [asdict(begun) for begun in proof.beginnings],
        "commits": [asdict(commit) for commit in proof.commits],
        "decisions": [asdict(decision) for decision in proof.decisions],
        "segments": [asdict(start) for start in proof.segments],
        "rollbacks": [asdict(rollback) for rollback in proof.rollbacks],
    }
