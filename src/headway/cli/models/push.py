"""`headway push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.core.command_line import DtypeOption, StepOption, print_table
from headway.core.console import notice
from headway.core.files.scratch import scratch_folder
from headway.core.format import format_bytes
from headway.models.hub.folder import is_adapter
from headway.models.hub.push import Upload
from headway.models.hub.push import push as send
from headway.telemetry.model_card import model_card
from headway.telemetry.record import is_run, open_run

HELP = """Send a trained model to the Hugging Face Hub, with a model card from its run.

[bold]Examples[/bold]

headway push runs/quickstart me/my-model
headway push runs/quickstart me/my-model --public --dtype bf16
headway push small-model me/small-model --run runs/quickstart --dry-run

The token comes from the environment variable HF_TOKEN. A new repository is private unless you say --public.
"""


def push(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Run directory or Hugging Face folder.")],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository on the Hub.")],
    *,
    private: Annotated[bool, typer.Option("--private/--public", help="Who may see the repository.")] = True,
    run: Annotated[
        Path | None,
        typer.Option(help="Run that made the folder, for the model card; without it the folder's README.md is sent."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge a run's adapter into its model.")] = False,
    step: StepOption = None,
    dtype: DtypeOption = "fp32",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be sent, and send nothing.")] = False,
) -> None:
    """Run `headway push`."""
    with scratch_folder("headway-push-") as scratch:
        folder = model
        if is_run(model):
            from headway.training.evaluation.inference import export_trained, load_trained

            trained = load_trained(model, step=step)
            folder = scratch / "model"
            step = trained.step
            run = model
            export_trained(trained, folder, dtype, merge=merge)
        card = None
        if run is not None:
            card = model_card(open_run(run), repository, step, is_adapter=is_adapter(folder))
        upload = Upload.of(folder, repository, card)
        print_table(
            ["File", "Size"], [[name, format_bytes(size)] for name, size in sorted(upload.sizes.items())], numeric=(1,)
        )
        if upload.left_out:
            notice(f"not sent: {', '.join(upload.left_out)}")
        if dry_run:
            notice(f"nothing was sent to {repository}")
            return
        notice(f"sent to {send(upload, private=private)}")
