"""`headway merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from headway.cli.common import writing
from headway.core.console import notice

HELP = """Merge a trained adapter into its pretrained model, and write the result as a Hugging Face folder.

[bold]Examples[/bold]

headway merge runs/my-adapter
headway merge runs/my-adapter my-model --dtype bf16

`headway export` writes the adapter by itself.
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("merge", help=HELP)(merge)


def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)],
    output: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Folder to write; RUN/merged when not given.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Checkpoint to use; the newest good one when not given.")] = None,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Type of the weights.")] = "fp32",
) -> None:
    """Run `headway merge`."""
    from headway.training.inference import export_trained, load_trained

    trained = load_trained(run, step=step)
    folder = output or run / "merged"
    with writing(folder):
        export_trained(trained, folder, dtype, merge=True)
    at = "" if trained.step is None else f" at step {trained.step:,}"
    notice(f"merged {run}{at} into {folder}")
