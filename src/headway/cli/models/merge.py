"""`headway merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.core.command_line import DtypeOption, RunArgument, StepOption, writing
from headway.core.console import notice
from headway.core.user_command import suggest_next

HELP = """Merge a trained adapter into its pretrained model, and write the result as a Hugging Face folder.

[bold]Examples[/bold]

headway merge runs/my-adapter
headway merge runs/my-adapter my-model --dtype bf16

`headway export` writes the adapter alone.
"""


def merge(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Folder to write; RUN/merged when not given.")
    ] = None,
    step: StepOption = None,
    dtype: DtypeOption = "fp32",
) -> None:
    """Run `headway merge`."""
    from headway.training.evaluation.inference import export_trained, load_trained

    trained = load_trained(run, step=step)
    folder = output or run / "merged"
    with writing(folder):
        export_trained(trained, folder, dtype, merge=True)
    at = "" if trained.step is None else f" at step {trained.step:,}"
    notice(f"merged {run}{at} into {folder}")
    suggest_next(("chat", folder, "talk to it"), ("push", folder, "ORG/NAME", "send it to the Hub"))
