"""`headway data import`: token stores of other projects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.core.command_line import JsonOption, print_json, print_table
from headway.core.console import print_line, print_lines
from headway.core.format import format_bytes
from headway.text.importing.store import import_store, plan_import

if TYPE_CHECKING:
    from headway.text.importing.store import ImportPlan, ImportReport

HELP = """Make a token store from files that another project tokenized: megatron, nanogpt (also llm.c) or datatrove.

Ids are checked against the tokenizer's vocabulary. Documents without an end-of-text token get one. The files stay \
unchanged. Each prefix, folder or .ds file becomes a source.

[bold]Examples[/bold]

headway data import megatron web_text --tokenizer tokenizer.json -o data/web
headway data import megatron 0.3 web 0.7 code --tokenizer hf-folder -o blend
headway data import nanogpt openwebtext --tokenizer gpt2.tiktoken -o data/owt
headway data import nanogpt t_*.bin --validation v.bin --tokenizer gpt2 -o fw
headway data import datatrove tokenized/ -o data/fw --validation-share 0.001
headway data import megatron web --tokenizer hf-folder -o data/web --dry-run
"""


def import_(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="megatron, nanogpt or datatrove.")],
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Prefixes, files or folders.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the new store.")],
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="The tokenizer that wrote the ids.")] = None,
    end_of_text: Annotated[
        str | None,
        typer.Option("--end-of-text", help="Token that ends documents, if not the tokenizer's own."),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", help="Name of the source; once for each source, or once for all files."),
    ] = None,
    validation: Annotated[
        list[str] | None,
        typer.Option("--validation", help="Files for validation; may be repeated."),
    ] = None,
    validation_share: Annotated[
        float | None,
        typer.Option(
            "--validation-share",
            min=0.0,
            max=0.99,
            help="Share of documents held out, by a hash of their ids; 0.05 unless there are files for validation.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Type of nanogpt's ids: uint16 or uint32; the one that the vocabulary needs when not given.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing store.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be imported, and stop.")] = False,
    json: JsonOption = False,
) -> None:
    """Run `headway data import`."""
    from dataclasses import asdict

    plan = plan_import(
        kind,
        paths,
        tokenizer=tokenizer,
        end_of_text=end_of_text,
        names=name or (),
        validation=validation or (),
        share=validation_share,
        dtype=dtype,
    )
    if dry_run:
        _list(plan, output, json)
        return
    report = import_store(plan, output, force=force)
    if json:
        print_json(asdict(report))
        return
    print_lines(report.describe())
    _print_next(report)


def _list(plan: ImportPlan, output: Path, json: bool) -> None:
    if json:
        print_json(
            [
                {
                    "source": source,
                    "split": split,
                    "path": str(file.path),
                    "dtype": file.dtype.name,
                    "tokens": file.tokens,
                    "bytes": file.bytes,
                }
                for source, split, file in plan.files
            ]
        )
        return
    rows = [
        [source, split, file.dtype.name, f"{file.tokens:,}", format_bytes(file.bytes), str(file.path)]
        for source, split, file in plan.files
    ]
    print_table(["SOURCE", "SPLIT", "TYPE", "TOKENS", "SIZE", "FILE"], rows, numeric=[3, 4])
    if plan.share:
        print_line(f"{plan.share:g} of the documents would be held out for validation")
    tokenizer = plan.tokenizer
    print_line(f"would be written to {output} as {tokenizer.dtype.name}, documents ended by {tokenizer.end_of_text}")


def _print_next(report: ImportReport) -> None:
    """Print how to train on the store, with the weights of a blend."""
    if not report.weights:
        print_line(f"train on it, for example: headway train quickstart data.store={report.store}")
        return
    import yaml

    # YAML may read a name as a number, so it needs quotes; a weight keeps all its digits.
    sources = [{"name": name, "path": name, "weight": weight} for name, weight in report.weights.items()]
    lines = [yaml.safe_dump(source, default_flow_style=True, sort_keys=False).strip() for source in sources]
    for line in ("train on it with:", "", "data:", f"  store: {report.store}", "  sources:"):
        print_line(line)
    for line in lines:
        print_line(f"    - {line}")
