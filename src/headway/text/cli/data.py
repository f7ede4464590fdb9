"""`headway data`: prepare a token store from text, and inspect it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headway.config.arguments import ConfigArgument, OverridesArgument, load_text
from headway.config.sections.data import vocabulary_problems
from headway.core.command_line import JsonOption, print_json
from headway.core.console import notice, print_line, print_lines, progress
from headway.core.errors import ConfigError, DataError
from headway.core.process.exit import allow_fast_exit
from headway.core.user_command import suggest
from headway.data.feeding.training_rows import row_lengths, training_rows
from headway.data.store import TokenStore
from headway.data.tokenizing.preload import begin_loading_file
from headway.text.cli import importing, inspect, listing, preview
from headway.text.cli.inspect import StoreArgument, open_store
from headway.text.preparing.clusters import find_pool
from headway.text.preparing.prepare import prepare as prepare_store

if TYPE_CHECKING:
    from headway.config import Config
    from headway.text.preparing.clusters import DataPool

data = typer.Typer(no_args_is_help=True, help="Prepare text for training, and inspect the result.")


@data.command()
def prepare(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Parallel processes; the written bytes do not depend on it.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Prepare again even if nothing has changed, with a new vocabulary.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Also hash existing shards, and prepare damaged ones again.")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(
            "--on", metavar="CLUSTER", help="Prepare on the machines of a cluster: ray, slurm, or package.module:NAME."
        ),
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option("--tasks", min=1, help="With --on: Ray tasks at a time, or elements of Slurm's job array."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be read (and submitted), and stop.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Turn text into a token store: read, clean, remove duplicates, tokenize.

    Sources are files (.txt, .jsonl, .csv, also under .gz, .zst, .bz2, .xz; .parquet, .arrow), folders, globs, s3://,
    gs://, az:// and https:// URLs, hf://NAME and python:MODULE:FUNCTION. Only input that is new or changed since
    the last time is processed. An existing store is replaced only when the new one is complete. After an error or a
    kill the same command continues. With --on, the machines of a cluster share the work, --workers are the processes of
    each task, and the store has the same bytes.

    [bold]Examples[/bold]

    headway data prepare run.yaml --workers 8
    headway data prepare run.yaml data.sources=corpus data.bad_documents=skip
    headway data prepare run.yaml --dry-run
    headway data prepare run.yaml --repair
    headway data prepare run.yaml --on ray
    headway data prepare run.yaml --on slurm --tasks 32 --workers 8 --dry-run
    """
    from dataclasses import asdict

    loaded = load_text(config, overrides, trains=False)
    settings = loaded.data
    for problem in vocabulary_problems(loaded.data, loaded.model.from_pretrained):
        raise problem
    pool = _pool(loaded, on, tasks, workers)
    if dry_run:
        listing.list_sources(settings, json, pool)
        return
    begin_loading_file(settings.tokenizer.path, settings.tokenizer.encoder)

    # On a cluster, the option counts the processes of a task; this machine does what cannot travel.
    own = workers if pool is None else None
    run = loaded.run_directory
    report = prepare_store(settings, workers=own, force=force, repair=repair, pool=pool, run=run)
    if report.up_to_date:
        notice("up to date: nothing has changed since the store was made (--force makes it again)")
    if json:
        print_json(asdict(report))
    else:
        print_lines(report.describe())
    if report.trained_tokens is not None:
        for text in _untrained_notices(loaded):
            notice(text)
    if not settings.clean and not any(source.path.startswith("python:") for source in settings.sources):
        allow_fast_exit()


def _untrained_notices(config: Config) -> list[str]:
    """Return a line for each row length of a run about its rows none of whose tokens is trained."""
    try:
        rows = training_rows(config.data, config.train.sequence_length, TokenStore.open(config.data.store))
    except DataError:  # no source fills a row, which is for a run to report
        return []
    lengths = row_lengths(config.data.mixture, config.train.sequence_length)
    return [text for length in lengths if (text := rows.untrained_notice(length))]


def _pool(config: Config, on: str | None, tasks: int | None, workers: int | None) -> DataPool | None:
    """Return the cluster that shares the work, if one does."""
    if on is None:
        if tasks is None:
            return None

        raise ConfigError("--tasks counts those of a cluster", where="--tasks", fix="--on ray | slurm, or --workers")

    return find_pool(on)(config, tasks=tasks, workers=workers or 1)


@data.command()
def verify(store: StoreArgument, overrides: OverridesArgument = None, json: JsonOption = False) -> None:
    """Check every file of a store against the manifest's lengths and SHA-256. Exits with 3 on any damage.

    [bold]Examples[/bold]

    headway data verify data/quickstart
    """
    opened = open_store(store, overrides, check=False)
    with progress("verifying", opened.size_bytes, "B") as bar:
        problems = opened.verify(bar.advance)
    if json:
        print_json({"store": str(opened.path), "fingerprint": opened.fingerprint, "problems": problems})
    if problems:
        raise DataError(
            f"the token store is damaged: {'; '.join(problems)}",
            where=str(opened.path),
            fix=_repair(opened),
        )
    if not json:
        print_line(f"{opened.path}: sound, fingerprint {opened.fingerprint}")


def _repair(store: TokenStore) -> str:
    """Return the fix that repairs a damaged store without touching its intact parts."""
    if not store.at_hand:
        return "remove damaged copies, which are then downloaded again; upload damaged files behind the URL again"
    if "imported" in store.manifest:
        return "headway data import --force, as it was imported"
    return suggest("data prepare", "--repair")


for command in (inspect.inspect, inspect.report, preview.preview):
    data.command()(command)
data.command("import", help=importing.HELP)(importing.import_)
