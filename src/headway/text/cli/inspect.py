"""`headway data inspect` and `headway data report`: the content of a token store, and what was removed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headway.config.arguments import OverridesArgument, load_text
from headway.core.command_line import JsonOption, check_folder, print_json, print_table, writing
from headway.core.console import exact_results, print_line, print_lines
from headway.data import remote_store
from headway.data.feeding.mixture import is_mixed
from headway.data.feeding.segmented import plan_of
from headway.data.feeding.training_rows import training_rows
from headway.data.store import REPORT, TokenStore
from headway.text.inspect import describe_store, fertility, sample_text
from headway.text.report.counts import reasons_text, removed_of, removed_share, split_rows
from headway.text.report.page import write_data_report

# Columns of the table of duplicates, and their names in the report of the search.
_DUPLICATES = {
    "DOCUMENTS": "documents",
    "EQUAL": "exact",
    "SIMILAR": "near",
    "EMPTIED": "emptied",
    "REMOVED": "removed",
    "BYTES": "bytes",
    "BYTES REMOVED": "removed_bytes",
    "PARAGRAPHS": "paragraphs",
    "PARAGRAPHS REMOVED": "paragraphs_removed",
}

# Most reasons that are printed for a step.
_REASONS = 3


StoreArgument = Annotated[Path, typer.Argument(metavar="STORE|CONFIG", help="Token store, or YAML file of a run.")]


def inspect(
    store: StoreArgument,
    overrides: OverridesArgument = None,
    examples: Annotated[int, typer.Option("--examples", min=0, help="Examples per cleaning step.")] = 2,
    json: JsonOption = False,
) -> None:
    """Show what is in a store: documents, tokens, lengths, and what each cleaning step dropped or changed.

    [bold]Examples[/bold]

    headway data inspect data/quickstart
    headway data inspect run.yaml --examples 5
    headway data inspect run.yaml --json
    """
    opened = open_store(store, overrides)
    facts = describe_store(opened)
    if json:
        with exact_results():
            print_json({**facts, "sample": sample_text(opened)})
        return
    vocabulary = facts["tokenizer"]
    print_line(f"{facts['store']}: {vocabulary['vocab_size']:,} token ids as {facts['dtype']},", end=" ")
    begin = f"begin with {' '.join(vocabulary['begin_of_text'])} and " if "begin_of_text" in vocabulary else ""
    print_line(
        f"documents {begin}end with {vocabulary['end_of_text']}, encoded by {facts['encoder'] or 'n/a'},", end=" "
    )
    print_line(f"fingerprint {facts['fingerprint'][:16]}")
    print_line()
    _print_sources(facts["sources"])
    _print_removed(facts["sources"], facts["duplicates"])
    with exact_results():
        for source in facts["sources"]:
            _print_cleaning(source, examples)
    _print_duplicates(facts["duplicates"])
    print_line()
    print_line("tokens per document at percentiles:")
    headers, rows = split_rows(facts["splits"])
    print_table([header.upper() for header in headers], rows, numeric=range(2, len(headers)))
    for part in facts["splits"]:
        if part["without_tokens"]:
            where = f"{part['split']}/{part['source']}"
            print_line(f"{where}: {part['without_tokens']:,} documents for which the tokenizer gave no token")
    print_line()
    print_line("first training document:")
    with exact_results():
        print_lines(sample_text(opened))


def report(
    store: StoreArgument,
    overrides: OverridesArgument = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; report.html in the store when not given.")
    ] = None,
) -> None:
    """Write a store's report: one HTML page with its sources, lengths, cleaning, duplicates and tokenizer.

    Given a config, it also shows the share of training that each source will have. For a mixture, the config must
    give the length of training.

    [bold]Examples[/bold]

    headway data report data/quickstart
    headway data report run.yaml --output data.html
    """
    check_folder(output)
    opened = open_store(store, overrides)
    facts = describe_store(opened)
    asked = {} if store.is_dir() else _asked_shares(store, overrides, opened)
    for source in facts["sources"]:
        split = "train" if source["name"] in opened.sources("train") else "validation"
        if source["name"] in opened.sources(split):
            source["fertility"] = fertility(opened, split, source["name"])
        source["asked_share"] = asked.get(source["name"])
    target = output or opened.path / REPORT
    with writing(target):
        print_line(str(write_data_report(facts, target)))


def _asked_shares(config: Path, overrides: list[str] | None, store: TokenStore) -> dict[str, float]:
    """Return each source's share of the run's rows; empty if it depends on a length that the config leaves open."""
    settings = load_text(config, overrides, trains=False)
    mixed = is_mixed(settings.data)
    steps = settings.train.steps
    if mixed and steps is None:
        return {}
    rows = training_rows(settings.data, settings.train.sequence_length, store, settings.segments)
    plan = plan_of(settings.row_settings, rows)
    # Without a mixture every row is used equally often, and counting them one by one would take long.
    counts = plan.counts(0, steps) if mixed and steps is not None else plan.epoch_rows(0)
    shares = {name: count / max(1, sum(counts)) for name, count in zip(plan.sources, counts, strict=True)}
    return shares | dict.fromkeys(rows.too_short, 0.0)


def _print_sources(sources: list[dict[str, Any]]) -> None:
    headers = ["SOURCE", "FILES", "READ", "DOCUMENTS", "TOKENS", "BYTES/TOKEN", "MALFORMED", "EMPTY"]
    rows = []
    for source in sources:
        counts = [_count(source.get(key)) for key in ("files", "read", "documents", "tokens")]
        ratio = f"{source['bytes_per_token']:.2f}" if source.get("bytes_per_token") else "n/a"
        rows.append([source["name"], *counts, ratio, _count(source.get("skipped")), _count(source.get("empty"))])
    print_table(headers, rows, numeric=range(1, len(headers)))


def _print_removed(sources: list[dict[str, Any]], found: dict[str, Any] | None) -> None:
    """Print what cleaning and deduplication have removed, each as a share of what was read."""
    total = removed_of(sources, found)
    if total is None or not (total.by_cleaning or total.as_duplicates):
        return
    parts = [(source["name"], removed_of([source], found)) for source in sources]
    rows = []
    for name, removed in [*parts, *([("all", total)] if len(parts) > 1 else [])]:
        if removed is not None:
            rows.append([name, f"{removed.read:,}", *(_count(count, share) for count, share in removed.parts)])
    print_line()
    print_line("removed documents:")
    print_table(["SOURCE", "READ", "BY CLEANING", "AS DUPLICATES"], rows, numeric=range(1, 4))


def _print_cleaning(source: dict[str, Any], examples: int) -> None:
    steps = (source.get("clean") or {}).get("steps", [])
    if not steps:
        return

    print_line()
    print_line(f"cleaning of {source['name']}:")
    headers = ["STEP", "IN", "OUT", "DROPPED", "CHANGED", "BYTES IN", "BYTES OUT", "MOST FREQUENT REASONS"]
    rows = []
    for step in steps:
        dropped = step["documents_in"] - step["documents_out"]
        share = dropped / step["documents_in"] if step["documents_in"] else None
        counts = [f"{step['documents_in']:,}", f"{step['documents_out']:,}", _count(dropped, share)]
        rest = [f"{step[key]:,}" for key in ("changed", "bytes_in", "bytes_out")]
        rows.append([step["name"], *counts, *rest, reasons_text(step, _REASONS)])
    print_table(headers, rows, numeric=range(1, 7))
    for step in steps:
        for example in step["examples"][:examples]:
            print_line(f"  {step['name']}, {example['kind']}: {example['reason']}")
            print_line(f"    {example['text']!r}")


def _print_duplicates(found: dict[str, Any] | None) -> None:
    if not found:
        return

    print_line()
    print_line("duplicates:")
    parts = {**found["sources"], **({"all": found["total"]} if len(found["sources"]) > 1 else {})}
    columns = [name for name in _DUPLICATES if "PARAGRAPHS" not in name or found["settings"]["paragraphs"]]
    keys = [_DUPLICATES[column] for column in columns]
    rows = [
        [name, *(_count(counts[key], removed_share(counts, key)) for key in keys)] for name, counts in parts.items()
    ]
    print_table(["SOURCE", *columns], rows, numeric=range(1, len(columns) + 1))
    largest = found["clusters"]["largest"]
    if largest:
        sizes = ", ".join(f"{cluster['documents']:,} ({cluster['share']:.1%})" for cluster in largest)
        print_line(f"clusters of equal or similar documents: {found['clusters']['count']:,}; the largest have {sizes}")


def _count(value: int | None, share: float | None = None) -> str:
    """Format a number, with its share if there is one."""
    return "n/a" if value is None else f"{value:,}" + ("" if share is None else f" ({share:.1%})")


def open_store(path: Path, overrides: list[str] | None, *, check: bool = True) -> TokenStore:
    """Open the store in a folder, or the one of a config."""
    if path.is_dir():
        return TokenStore.open(path, check=check)
    return remote_store.open_store(load_text(path, overrides, trains=False).data, check=check)
