"""`headway export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.core.command_line import DtypeOption, RunArgument, StepOption, writing
from headway.core.console import notice
from headway.core.user_command import suggest_next

HELP = """Write a trained model as a Hugging Face folder: safetensors, config, tokenizer.

[bold]Examples[/bold]

headway export runs/quickstart
headway export runs/quickstart my-model --step 200 --dtype bf16

Load it with transformers: AutoModelForCausalLM.from_pretrained("my-model").
"""


def export(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Folder to write; RUN/export when not given.")
    ] = None,
    step: StepOption = None,
    dtype: DtypeOption = "fp32",
) -> None:
    """Run `headway export`."""
    from headway.training.evaluation.inference import export_trained, load_trained

    trained = load_trained(run, step=step)
    folder = output or run / "export"
    with writing(folder):
        export_trained(trained, folder, dtype)
    at = "" if trained.step is None else f" at step {trained.step:,}"
    begin = f"; texts begin with {' '.join(trained.begin_of_text)}" if trained.begin_of_text else ""
    notice(f"exported {run}{at} to {folder}{begin}")
    suggest_next(("chat", folder, "talk to it"), ("push", folder, "ORG/NAME", "send it to the Hub"))
