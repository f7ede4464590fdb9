"""`headway compare`, also as `headway runs compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.core.command_line import JsonOption, check_folder, print_json, print_table, writing
from headway.core.console import notice, print_line, print_lines
from headway.lab.compare import page
from headway.lab.compare.evidence import DOCUMENTS, Margin
from headway.telemetry.runs import difference_rows, result_rows
from headway.training.evaluation.benchmarks import check_installed, wanted_by_hand

if TYPE_CHECKING:
    from headway.lab.compare.compare import Compared

HELP = """Compare runs and models: curves, and the evidence for a difference in loss with its uncertainty.

Each is a run directory, a folder of an exported model, or a group of seeds: a folder of runs, or a pattern in quotes. \
The first is the baseline. All are evaluated on the same documents: those that their store holds out, or --data. \
The page compare.html shows loss curves, differences with 95 % intervals (by document, by source, by benchmark item), \
how many documents a difference needs, and what differs in the configs.

[bold]Examples[/bold]

headway compare runs/a runs/b
headway compare runs/a runs/b --data held-out.jsonl --output a-and-b.html
headway compare "runs/base-seed-*" "runs/wide-seed-*"
headway compare runs/base my-export other-model --data text/ --json
headway compare base/run runs/pr --margin 1% --markdown >> comment.md
headway compare runs/a runs/b --tasks my-task.yaml --limit 500
headway compare runs/a runs/b --curves

Exit codes: 0 compared; 1 --margin: a model is not shown to be non-inferior; 2 to 4 no evidence: the reason is \
printed, with all that could be compared.
"""

#: The page that is written when no file is named.
PAGE = Path("compare.html")


def compare(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Runs, exported models, groups.")],
    *,
    data: Annotated[
        Path | None,
        typer.Option(help="Text (.txt, .md, .jsonl, a folder), or a token store; the runs' own when not given."),
    ] = None,
    documents: Annotated[int, typer.Option(min=2, help="Most documents to evaluate, evenly spaced.")] = DOCUMENTS,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per row; the shortest of the models' when not given.")
    ] = None,
    margin: Annotated[
        str | None,
        typer.Option(help="Check that no model is worse by this: 1% of the baseline's loss, or 0.02 nats per token."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Also compare on items of lm-eval: names or YAML files, separated by commas.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most items per task.")] = None,
    few_shot: Annotated[int | None, typer.Option(min=0, help="Examples before each question.")] = None,
    download: Annotated[bool, typer.Option("--download", help="Allow fetching data sets from the Hub.")] = False,
    curves: Annotated[bool, typer.Option("--curves", help="Evaluate nothing: curves, results and configs.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File of the page; compare.html when not given.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown for a pull request.")] = False,
    json: JsonOption = False,
) -> None:
    """Run `headway compare`."""
    from headway.lab.compare.compare import Wanted, as_json, compare_models
    from headway.parallel.world import pick_device

    check_folder(output)
    benchmarks = None
    if tasks is not None:
        check_installed()
        device = "cuda:0" if pick_device("auto").type == "cuda" else "cpu"
        names = tasks.split(",")
        benchmarks = wanted_by_hand(names, device=device, limit=limit, few_shot=few_shot, download=download)
    wanted = Wanted(data, documents, sequence_length, None if margin is None else Margin.parse(margin), benchmarks)
    compared = compare_models(models, wanted, evaluates=not curves)
    if output is not None:
        with writing(output):
            notice(f"wrote {page.write_page(compared, output)}")
    elif not (json or markdown):
        try:
            notice(f"wrote {page.write_page(compared, PAGE)}")
        except OSError as error:
            notice(f"no page: {PAGE.absolute()}: {error.strerror or error} (--output names another place)")
    if json:
        print_json(as_json(compared))
    elif markdown:
        print_lines(page.markdown(compared))
    else:
        _print(compared)
    asked = data is not None or margin is not None or tasks is not None
    if compared.why_not is not None:
        if asked or compared.can_be_evaluated:
            raise compared.why_not
        notice(f"only what the runs have recorded: {compared.why_not.what} ({compared.why_not.where})")
    if wanted.margin is not None and compared.evidence is not None:
        overall = compared.evidence.overall
        if not all(one.is_non_inferior(wanted.margin) for one in overall):
            raise typer.Exit(1)


def _print(compared: Compared) -> None:
    """Print the tables, and what they show."""
    names = compared.runs.names
    numeric = range(1, len(names) + 1)
    if names:
        print_table(["RESULT", *names], result_rows(compared.runs.summaries), numeric)
        print_line()
    if len(names) > 1:
        if compared.runs.differences:
            print_table(["CONFIG", *names], difference_rows(compared.runs), numeric)
        else:
            print_line("the configs are equal")
        print_line()
    evidence = compared.evidence
    if evidence is None:
        return
    for headers, rows in (
        (page.LOSS_HEADERS, page.loss_rows([*evidence.overall, *evidence.by_source])),
        (page.ITEM_HEADERS, page.item_rows(evidence.items)),
    ):
        if rows:
            print_table([header.upper() for header in headers], rows, range(1, len(headers)))
            print_line()
    for note in evidence.notes:
        print_line(f"- {note}")
    for sentence in page.verdicts(compared):
        print_lines(sentence)
