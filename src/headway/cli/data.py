"""`headway data`: from text files to the token store, and looking into it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.common import ConfigArgument, JsonOption, OverridesArgument, load, print_json, print_table

if TYPE_CHECKING:
    from headway.config.schema import DataConfig
    from headway.data.store import TokenStore

data = typer.Typer(no_args_is_help=True, help="Prepare text for training, and look into what was prepared.")

StoreArgument = Annotated[
    Path, typer.Argument(metavar="STORE|CONFIG", help="Token store, or YAML file of a run.", show_default=False)
]


@data.command()
def prepare(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes; the bytes written do not depend on it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Do it even when nothing has changed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be read, and stop.")] = False,
    json: JsonOption = False,
) -> None:
    """Turn text files (.txt, .jsonl, .parquet, .csv, plain or under .gz, .zst) into a token store.

    An existing store is replaced only when the new one is whole; when nothing has changed it is left as it is.

    [bold]Examples[/bold]

    headway data prepare run.yaml --workers 8
    headway data prepare run.yaml data.sources=corpus data.bad_documents=skip
    headway data prepare run.yaml --dry-run
    """
    from dataclasses import asdict

    from headway.core.console import notice
    from headway.data.prepare import prepare as prepare_store

    settings = load(config, overrides).data
    if dry_run:
        _list_sources(settings, json)
        return
    report = prepare_store(settings, workers=workers, force=force)
    if report.up_to_date:
        notice("up to date: nothing has changed since the store was made (--force makes it anew)")
    if json:
        print_json(asdict(report))
    else:
        print(report.describe())


def _list_sources(settings: DataConfig, json: bool) -> None:
    from headway.core.format import format_bytes
    from headway.data.sources import find_sources

    sources = find_sources(settings.sources)
    if json:
        print_json(
            [
                {
                    "name": source.name,
                    "ignored_files": source.ignored,
                    "files": [
                        {"path": str(f.path), "format": f.format, "compression": f.compression, "bytes": f.bytes}
                        for f in source.files
                    ],
                }
                for source in sources
            ]
        )
        return
    rows = [
        [source.name, ".".join(filter(None, (f.format, f.compression))), format_bytes(f.bytes), str(f.path)]
        for source in sources
        for f in source.files
    ]
    print_table(["SOURCE", "FORMAT", "SIZE", "FILE"], rows, numeric=[2])
    for source in sources:
        size = format_bytes(sum(file.bytes for file in source.files))
        ignored = f", {source.ignored} of unknown format ignored" if source.ignored else ""
        files = "1 file" if len(source.files) == 1 else f"{len(source.files):,} files"
        print(f"{source.name}: {files}, {size}{ignored}")
    print(f"would be written to {settings.store}")


@data.command()
def inspect(store: StoreArgument, overrides: OverridesArgument = None, json: JsonOption = False) -> None:
    """Show documents, tokens, bytes per token and document lengths, per source and split, and a sample.

    [bold]Examples[/bold]

    headway data inspect data/quickstart
    headway data inspect run.yaml --json
    """
    from headway.data.inspect import describe_store, sample_text

    opened = _open(store, overrides)
    facts = describe_store(opened)
    if json:
        print_json({**facts, "sample": sample_text(opened)})
        return
    vocabulary = facts["tokenizer"]
    print(f"{facts['store']}: {vocabulary['vocab_size']:,} token ids as {facts['dtype']},", end=" ")
    print(f"documents end with {vocabulary['end_of_text']}, fingerprint {facts['fingerprint'][:16]}\n")
    _print_sources(facts["sources"])
    print()
    _print_splits(facts["splits"])
    print(f"\nfirst training document:\n{sample_text(opened)}")


def _print_sources(sources: list[dict[str, Any]]) -> None:
    headers = ["SOURCE", "FILES", "DOCUMENTS", "TOKENS", "CHARACTERS", "BYTES/TOKEN", "SKIPPED", "EMPTY"]
    rows = []
    for source in sources:
        counts = [source[key] for key in ("files", "documents", "tokens", "characters")]
        ratio = f"{source['bytes_per_token']:.2f}" if source["tokens"] else "n/a"
        left_out = [f"{source['skipped']:,}", f"{source['empty']:,}"]
        rows.append([source["name"], *(f"{count:,}" for count in counts), ratio, *left_out])
    print_table(headers, rows, numeric=range(1, 8))


def _print_splits(splits: list[dict[str, Any]]) -> None:
    percentiles = list(splits[0]["length_percentiles"])
    headers = ["SPLIT", "SOURCE", "DOCUMENTS", "TOKENS", *(f"P{percentile}" for percentile in percentiles)]
    rows = [
        [
            part["split"],
            part["source"],
            f"{part['documents']:,}",
            f"{part['tokens']:,}",
            *(f"{length:,}" for length in part["length_percentiles"].values()),
        ]
        for part in splits
    ]
    print("tokens per document at percentiles:")
    print_table(headers, rows, numeric=range(2, len(headers)))


@data.command()
def verify(store: StoreArgument, overrides: OverridesArgument = None, json: JsonOption = False) -> None:
    """Check every file of a store against the manifest's lengths and SHA-256. Exits with 3 on any damage.

    [bold]Examples[/bold]

    headway data verify data/quickstart
    """
    from headway.core.console import progress
    from headway.core.errors import DataError

    opened = _open(store, overrides, check=False)
    with progress("verifying", opened.size_bytes, "B") as bar:
        problems = opened.verify(bar.advance)
    if json:
        print_json({"store": str(opened.path), "fingerprint": opened.fingerprint, "problems": problems})
    if problems:
        raise DataError(
            f"the token store is damaged: {'; '.join(problems)}",
            where=str(opened.path),
            fix="headway data prepare CONFIG --force",
        )
    if not json:
        print(f"{opened.path}: sound, fingerprint {opened.fingerprint}")


def _open(path: Path, overrides: list[str] | None, *, check: bool = True) -> TokenStore:
    """The store in a folder, or the one of a config."""
    from headway.data.store import TokenStore

    return TokenStore.open(path if path.is_dir() else load(path, overrides).data.store, check=check)


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.add_typer(data, name="data")
