"""`headway runs`: list runs and show one. `headway runs compare` is `headway compare`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from headway.core.command_line import JsonOption, RunArgument, print_json, print_table, writing
from headway.core.console import notice, print_line, print_lines
from headway.core.format import UNKNOWN, format_bytes, format_count, format_seconds, format_usd
from headway.lab.cli.compare import HELP as COMPARE_HELP
from headway.lab.cli.compare import compare
from headway.run.directory.account import account_of
from headway.run.directory.cancel import request_cancel
from headway.telemetry.catalogue import CATALOGUE, reference
from headway.telemetry.goodput import goodput_of
from headway.telemetry.record import open_run
from headway.telemetry.runs import list_runs, recorded_metrics, result_rows
from headway.telemetry.summary import ago_text, loss_text, summarize, time_text, usd_text
from headway.telemetry.tags import change_tags, read_tags

runs = typer.Typer(no_args_is_help=True, help="List, show and compare runs.")


@runs.command("list")
def list_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that holds run directories.")] = Path("runs"),
    json: JsonOption = False,
) -> None:
    """List the runs in a folder, the most recently active first.

    [bold]Examples[/bold]

    headway runs list
    headway runs list /mnt/shared/runs --json
    """
    found = list_runs(folder)
    if json:
        print_json([asdict(item) for item in found])
    elif not found:
        notice(f"no runs in {folder}")
    else:
        headers = ["RUN", "STATE", "STEP", "LOSS", "VALIDATION", "TOKENS/S", "COST", "ATTEMPTS", "LAST RECORD"]
        rows = [
            [
                run.name,
                run.state,
                _step(run.step, run.total_steps),
                loss_text(run.train_loss),
                loss_text(run.validation_loss),
                format_count(run.tokens_per_second)
                if run.samples_per_second is None
                else f"{format_count(run.samples_per_second)} samples",
                usd_text(run.spent_usd),
                str(run.attempts),
                ago_text(run.updated),
            ]
            for run in found
        ]
        print_table(headers, rows, numeric=range(2, 8))


@runs.command()
def metrics(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Run directory; all metrics without it.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/metrics.md.")] = False,
    json: JsonOption = False,
) -> None:
    """List what a run has recorded: each metric with its last, lowest and highest value.

    Without RUN, list all metrics that runs record: name, unit, kind, meaning, and the name in Prometheus.

    [bold]Examples[/bold]

    headway runs metrics runs/mine
    headway runs metrics
    headway runs metrics --json
    headway runs metrics --markdown > docs/metrics.md
    """
    if run is not None:
        if markdown:
            raise typer.BadParameter("it prints the page of all metrics, without RUN", param_hint="--markdown")
        _print_metrics_of(run, json)
    elif markdown:
        print_lines(reference(), end="")
    elif json:
        print_json(
            [
                {
                    "name": metric.name,
                    "unit": metric.unit.words,
                    "kind": metric.kind.value,
                    "help": metric.help,
                    "source": metric.source,
                    "label": metric.label,
                    "prometheus": metric.prometheus_name,
                }
                for metric in CATALOGUE.values()
            ]
        )
    else:
        rows = [[metric.name, metric.unit.words, metric.kind.value, metric.help] for metric in CATALOGUE.values()]
        print_table(["NAME", "UNIT", "KIND", "MEANING"], rows)


def _print_metrics_of(run: Path, json: bool) -> None:
    found = recorded_metrics(open_run(run))
    if json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        notice(f"{run} has recorded nothing yet")
        return
    headers = ["NAME", "LAST", "AT STEP", "LOWEST", "HIGHEST", "VALUES", "UNIT"]
    rows = [
        [one.name, _number(one.last), f"{one.last_step:,}", _number(one.lowest), _number(one.highest),
         f"{one.values:,}", one.unit or ""]
        for one in found
    ]  # fmt: skip
    print_table(headers, rows, numeric=range(1, 6))


@runs.command()
def show(run: RunArgument, json: JsonOption = False) -> None:
    """Show one run: its results, attempts and checkpoints.

    [bold]Examples[/bold]

    headway runs show runs/quickstart
    """
    record = open_run(run)
    summary = summarize(record)
    good = goodput_of(record)
    cost = account_of(record)
    if cost.is_known:
        summary = replace(summary, spent_usd=cost.total_usd)
    if json:
        attempts = [{**asdict(attempt), "seconds": attempt.seconds} for attempt in record.attempts]
        checkpoints = [asdict(checkpoint) for checkpoint in record.checkpoints]
        time_spent = None if good is None else {**asdict(good), "ratio": good.ratio}
        segments = [segment.model_dump(mode="json") for segment in record.segments]
        lists = {"attempt_list": attempts, "checkpoint_list": checkpoints, "segment_list": segments}
        money = {**asdict(cost), "total_usd": cost.total_usd} if cost.is_known else None
        print_json({**asdict(summary), "goodput": time_spent, "cost": money, **lists})
        return
    print_table(["run", summary.name], result_rows([summary]))
    print_line()
    if good is not None:
        print_line(str(good))
    if cost.is_known:
        print_line(str(cost))
    for segment in record.segments[1:]:
        print_line(f"changed at step {segment.first_step:,}: {'; '.join(segment.changes)}")
    for attempt in record.attempts:
        steps = f"steps {_known(attempt.first_step)} to {_known(attempt.last_step)}"
        usd = cost.attempts_usd.get(attempt.number)
        paid = "" if usd is None else f", {format_usd(usd)}"
        print_line(f"attempt {attempt.number}: {attempt.outcome}, {steps}, {format_seconds(attempt.seconds)}{paid}")
    for checkpoint in record.checkpoints:
        state = checkpoint.state_sha256 or UNKNOWN
        size = format_bytes(checkpoint.bytes)
        print_line(f"checkpoint {checkpoint.step:,}: {size}, {time_text(checkpoint.time)}, state {state[:12]}")


@runs.command()
def cancel(
    run: RunArgument,
    why: Annotated[str, typer.Option("--why", help="Reason, for the run's record.")] = "",
) -> None:
    """Have a run save and end, wherever it trains; its command ends with exit code 7, so no scheduler restarts it.

    A run that has ended is left as it is; the exit code is 0 then too.

    [bold]Examples[/bold]

    headway runs cancel runs/quickstart
    headway runs cancel /mnt/shared/runs/large --why "wrong data"
    """
    ended = request_cancel(run, why)
    if ended is None:
        notice(f"{run} is asked to save and end; headway runs show {run} shows when it has")
    else:
        notice(f"{run} has ended already ({ended}): there is nothing to cancel")


@runs.command()
def tag(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories.")],
    add: Annotated[
        list[str] | None, typer.Option("--add", "-a", metavar="TAG", help="Tag to add; may be given several times.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="TAG", help="Tag to remove; may be given several times.")
    ] = None,
    note: Annotated[
        str | None, typer.Option("--note", "-n", metavar="TEXT", help="Note in place of the present one.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Give runs tags and a note, or print what they have. headway ui shows, filters and groups by them.

    [bold]Examples[/bold]

    headway runs tag runs/mine --add baseline --note "the rate of the paper"
    headway runs tag runs/a runs/b --remove baseline
    headway runs tag runs/mine
    """
    for path in paths:  # all of them, before any is changed
        open_run(path)
    found = {}
    for path in paths:
        if add or remove or note is not None:
            with writing(path):
                found[str(path)] = change_tags(path, add or (), remove or (), note)
        else:
            found[str(path)] = read_tags(path)
    if json:
        print_json([{"run": path, **asdict(tags)} for path, tags in found.items()])
        return
    for name, tags in found.items():
        print_line(f"{name}: {', '.join(tags.tags) or 'no tag'}")
        if tags.note:
            print_lines(tags.note)


def _step(step: int, total: int | None) -> str:
    return f"{step:,}/{total:,}" if total else f"{step:,}"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.6g}"


def _known(value: int | None) -> str:
    return "n/a" if value is None else f"{value:,}"


runs.command(help=COMPARE_HELP)(compare)
