"""`headway data preview`: the exact rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headway.config import resolve_grid
from headway.config.arguments import ConfigArgument, OverridesArgument, load_text
from headway.core.command_line import JsonOption, print_json, print_table
from headway.core.console import exact_results, print_line
from headway.core.format import UNKNOWN, counted, printable
from headway.data.epochs import in_steps
from headway.data.remote_store import open_store

if TYPE_CHECKING:
    from headway.data.feeding.preview import RowView, StepView

#: Marks the end of a document within a row.
_END = " ⏹ "


def preview(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    step: Annotated[int, typer.Option("--step", "-s", min=0, help="The step, counted from 0.")] = 0,
    rows: Annotated[int, typer.Option("--rows", "-r", min=0, help="Rows to show of each lane; 0 shows all.")] = 4,
    characters: Annotated[int, typer.Option("--characters", min=1, help="Longest text to show of a row.")] = 200,
    json: JsonOption = False,
) -> None:
    """Show the exact rows of a step, lane by lane, decoded, with their sources.

    Also shows the share of each source: as configured, in the step, and so far. ⏹ marks the end of a document, ⟦ ⟧ what
    is trained of conversations. With --json, texts are complete and tokens are listed.

    [bold]Examples[/bold]

    headway data preview run.yaml --step 1200
    headway data preview run.yaml --step 1200 --rows 1 --characters 60
    headway data preview run.yaml data.mixture.temperature=2 --json
    """
    from dataclasses import asdict

    from headway.data.feeding.preview import preview_step
    from headway.data.feeding.token_feed import TokenFeed

    settings = in_steps(load_text(config, overrides))
    grid = resolve_grid(settings, settings.parallel.workers)
    store = open_store(settings.data)
    feed = TokenFeed.of(settings.row_settings, grid, store)
    steps = settings.train.steps or 0
    view = preview_step(feed, store, settings.data.packing, steps, step=step, rows=rows or None)
    with exact_results():
        if json:
            print_json(asdict(view))
        else:
            _print(view, characters)


def _print(view: StepView, characters: int) -> None:
    lane_size = f"{counted(view.micro_batches, 'micro-batch')} of {counted(view.micro_batch, 'row')}"
    size = f"{counted(view.lanes, 'lane')} of {lane_size}"
    named = f"step {view.step:,} of {view.steps:,} (which training calls step {view.step + 1:,})"
    print_line(f"{named}: {size} of {view.sequence_length:,} tokens")
    if len(view.sources) > 1:
        print_line(f"shares of steps {view.first_step:,} to {view.last_step - 1:,}:")
    table = [
        [
            source.name,
            f"{source.asked:.2%}",
            f"{source.step:.2%}",
            UNKNOWN if source.so_far is None else f"{source.so_far:.2%}",
            f"{source.epochs:.3f}",
        ]
        for source in view.sources
    ]
    print_table(["SOURCE", "ASKED", "THIS STEP", "SO FAR", "EPOCHS"], table, numeric=range(1, 5))
    in_lane = view.micro_batches * view.micro_batch
    for lane in range(view.lanes):
        shown = [row for row in view.rows if row.lane == lane]
        print_line()
        print_line(f"lane {lane}" + (f" ({len(shown)} of {in_lane} rows)" if len(shown) < in_lane else ""))
        for row in shown:
            print_line(f"  {_place(row)}")
            print_line(f"    {_shortened(_END.join(row.marked or row.documents), characters)}")


def _place(row: RowView) -> str:
    place = "" if row.first_token is None else f", tokens from {row.first_token:,} on"
    padding = f", {row.padding:,} tokens of padding" if row.padding else ""
    return f"{row.micro_batch}.{row.row} {row.source}: epoch {row.epoch}, row {row.source_row:,}{place}{padding}"


def _shortened(text: str, characters: int) -> str:
    """Shorten a text to one line; keep both ends of a long one, since documents mostly end within a row."""
    text = printable(text)
    if len(text) <= characters:
        return text
    head = (characters - 1) * 2 // 3
    tail = characters - 1 - head
    return f"{text[:head]}…{text[len(text) - tail :]}"
