"""`headway tune`: search for good keys of a config."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.config.arguments import ConfigArgument, OverridesArgument
from headway.core.command_line import DefaultVerb, JsonOption, print_json, print_table, writing
from headway.core.console import notice, print_line
from headway.core.coordination.train_command import check_not_a_worker
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.scratch import scratch_folder
from headway.core.process.signals import STOP_SIGNALS, handled
from headway.core.user_command import remember_config
from headway.lab.tune.journal import Journal
from headway.lab.tune.live import HEADERS, as_json, rows_of, summary_line, watching
from headway.lab.tune.population import POPULATION, PopulationScheduler
from headway.lab.tune.report import write_report
from headway.lab.tune.scheduler import BEGINS, OptunaScheduler, Scheduler
from headway.lab.tune.settings import load_settings
from headway.lab.tune.stop import stop_study
from headway.lab.tune.study import BASE_FILE, Study, new_study, open_study
from headway.lab.tune.trial_run import LOCAL, TrialRun
from headway.lab.tune.tuner import Tuner

HELP = """Search for good keys of a config: each trial is a run, and a study that is killed decides as if it was not.

headway tune CONFIG SPACE [KEY=VALUE ...]: SPACE is a YAML file of keys and their ranges. The same command continues a \
study that was stopped or killed.

[bold]A space[/bold]

optimizer.learning_rate: {log: [1e-5, 1e-2]}
model.layers: {choice: [4, 6, 8]}

[bold]Examples[/bold]

headway tune my.yaml space.yaml --trials 40
headway tune my.yaml space.yaml --stopping asha --sampler random
headway tune my.yaml space.yaml --stopping pbt --at-a-time 4
headway tune my.yaml space.yaml --at-a-time 2 --workers-per-trial 2
headway tune my.yaml space.yaml --on slurm --at-a-time 8 --budget 50
headway tune my.yaml space.yaml --dry-run
headway tune show studies/my
headway tune best studies/my
headway tune report studies/my
headway tune stop studies/my

Watch it with headway top studies or headway ui studies. Options of a study: headway tune run -h.
"""

_RUN_HELP = """Begin a study, or continue it; `run` may be left out.

[bold]Examples[/bold]

headway tune run my.yaml space.yaml --trials 40 --seed 7
headway tune run my.yaml space.yaml train.steps=500 --dir studies/short

Exit codes: 0 all trials have ended, 1 several trials in a row have failed, 2 usage or config, 4 the study cannot be \
used, 6 the budget is spent, 75 stopped (run again).
"""

tune = typer.Typer(cls=DefaultVerb, no_args_is_help=True, help=HELP, subcommand_metavar="CONFIG|COMMAND [ARGS]...")

StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY", help="Folder of the study.")]
#: Trials that a dry run draws.
_SHOWN_TRIALS = 3


@tune.command("run", help=_RUN_HELP)
def run(
    config: ConfigArgument,
    space: Annotated[Path, typer.Argument(metavar="SPACE", help="YAML file of the space.")],
    overrides: OverridesArgument = None,
    *,
    trials: Annotated[int | None, typer.Option(min=1, help="Number of trials in all.")] = None,
    at_a_time: Annotated[int | None, typer.Option(min=1, help="Trials that run together.")] = None,
    workers_per_trial: Annotated[int | None, typer.Option(min=1, help="parallel.workers of every trial.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the study.")] = None,
    objective: Annotated[str | None, typer.Option(help="Metric to minimize.")] = None,
    maximize: Annotated[bool, typer.Option("--maximize", help="Maximize the metric of --objective.")] = False,
    sampler: Annotated[
        str | None,
        typer.Option(help="tpe (the default), random, grid, nsgaii, gp, or another of Optuna's."),
    ] = None,
    stopping: Annotated[str | None, typer.Option(help="none (the default), median, asha, hyperband or pbt.")] = None,
    on: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Where trials run: local, or as for headway launch.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="Best trials whose checkpoints are kept.")] = None,
    budget: Annotated[float | None, typer.Option(metavar="USD", help="Most that all trials cost.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Folder of the study; studies/NAME when not given.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the first trials, stop.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run `headway tune`."""
    wanted = None
    if objective is not None:
        wanted = json.dumps({"metric": objective, "direction": "maximize" if maximize else "minimize"})
    options: dict[str, Any] = {
        "trials": trials,
        "at_a_time": at_a_time,
        "workers_per_trial": workers_per_trial,
        "seed": seed,
        "objective": wanted,
        "sampler.name": sampler,
        "stopping.name": stopping,
        "launcher": on,
        "keep": keep,
        "budget.usd": budget,
    }
    remember_config(str(config), overrides or [])
    study = new_study(config, overrides or [], load_settings(space, options), folder)
    if dry_run:
        _show_first(study, as_json)
        return
    _work(study)
    if as_json:
        _print(study)


def _work(study: Study) -> None:
    """Work on a study until its trials have ended, or it is stopped."""
    from headway.lab.tune.checks import check_study

    check_not_a_worker("tune")
    devices = check_study(study)
    with writing(study.folder):
        study.folder.mkdir(parents=True, exist_ok=True)
        with study.claimed():
            study.save()
            journal = study.open_journal()
            scheduler = _scheduler(study, journal)
            with watching(study, journal, scheduler.total) as watch:
                tuner = Tuner(study, journal, scheduler, watch=watch, device_count=devices)

                def stop(number: int, frame: object) -> None:
                    tuner.stop(f"stopped by {signal.Signals(number).name}")

                with handled(STOP_SIGNALS, stop):
                    try:
                        tuner.run()
                    finally:
                        notice(summary_line(study, journal, scheduler.total, tuner.progress))
            notice(f"report: {write_report(study, journal)}")
            for record in journal.best()[:1]:
                notice(f"best: trial {record.number}, {study.run_of(record.number)}")


def _scheduler(study: Study, journal: Journal) -> Scheduler:
    """Return what decides in a study.

    Raises:
        ConfigError: the study asks for what it cannot do.
    """
    if study.settings.stopping.name == POPULATION:
        return PopulationScheduler(study, journal)
    return OptunaScheduler(study, journal)


def _show_first(study: Study, as_json: bool) -> None:
    """Draw the first trials of a study in memory of a scratch folder, and check their configs."""
    from headway.lab.tune.checks import check_study, checked_by_command

    check_study(study)
    rows: list[dict[str, Any]] = []
    with scratch_folder("headway-tune-") as folder:
        scratch = dataclasses.replace(study, folder=folder)
        scratch.save()
        journal = Journal(folder, study.directions, study.space)
        scheduler = _scheduler(scratch, journal)
        for _ in range(_SHOWN_TRIALS):
            record = scheduler.propose()
            if record is None:
                break
            try:
                words = study.words_of(record.values, record.number)
                problem = checked_by_command(study, words, str(folder / BASE_FILE))
            except ConfigError as error:
                problem = error
            rows.append({"trial": record.number, "values": dict(record.values), "problem": problem and problem.what})
    if as_json:
        print_json({"study": str(study.folder), "trials": scheduler.total, "first": rows})
        return
    print_line(f"{study.folder}: {scheduler.total} trials")
    lines = []
    for row in rows:
        keys = " ".join(f"{key}={value}" for key, value in row["values"].items())
        lines.append([str(row["trial"]), row["problem"] or "ok", keys])
    print_table(["TRIAL", "CHECK", "KEYS"], lines)


@tune.command()
def show(study: StudyArgument, as_json: JsonOption = False) -> None:
    """List the trials of a study.

    [bold]Examples[/bold]

    headway tune show studies/my
    headway tune show studies/my --json
    """
    found = open_study(study)
    if as_json:
        _print(found)
        return
    journal = found.open_journal()
    records = journal.records
    runs = {one.number: TrialRun(one.number, found.run_of(one.number), LOCAL) for one in records}
    for trial in runs.values():
        trial.history.refresh()
    print_table(HEADERS, rows_of(found, records, runs), numeric=(0, 2, 3))


def _print(study: Study) -> None:
    print_json(as_json(study, study.open_journal()))


@tune.command()
def best(study: StudyArgument, as_json: JsonOption = False) -> None:
    """Print the best trial of a study: its value, its run, and the command that trains it again. For a member of a
    population, the run that it began from.

    With several objectives, the trials that no other one dominates.

    [bold]Examples[/bold]

    headway tune best studies/my
    headway tune best studies/my --json
    """
    found = open_study(study)
    chosen = found.open_journal().winners()
    if not chosen:
        raise CheckpointError("no trial is complete yet", where=str(study), fix=f"headway tune show {study} lists them")
    if as_json:
        print_json(
            [
                {
                    "trial": one.number,
                    "objectives": list(one.objectives or ()),
                    "values": dict(one.values),
                    "run": str(found.run_of(one.number)),
                }
                for one in chosen
            ]
        )
        return
    for one in chosen:
        words = [f"{key}={value}" for key, value in one.values.items()]
        print_line(f"trial {one.number}: {', '.join(f'{value:g}' for value in one.objectives or ())}")
        print_line(f"  run    {found.run_of(one.number)}")
        if BEGINS in one.notes:
            parent, step = one.notes[BEGINS]
            print_line(f"  from   {found.run_of(parent)}, step {step:,}")
        else:
            print_line(f"  again  {shlex.join(['headway', 'train', str(found.folder / BASE_FILE), *words])}")


@tune.command()
def report(study: StudyArgument) -> None:
    """Write report.html: importance of keys, parallel coordinates, slices, curves and cost.

    [bold]Examples[/bold]

    headway tune report studies/my
    """
    found = open_study(study)
    with writing(study):
        print_line(str(write_report(found, found.open_journal())))


@tune.command()
def stop(study: StudyArgument) -> None:
    """Save the trials of a study that run, and stop it. The same headway tune continues it.

    [bold]Examples[/bold]

    headway tune stop studies/my
    """
    with writing(study):
        notice(stop_study(open_study(study)))
