"""`headway eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from headway.core.command_line import JsonOption, StepOption, print_json
from headway.core.console import print_line

HELP = """Compute loss and perplexity of a trained model on held-out text.

[bold]Examples[/bold]

headway eval runs/quickstart
headway eval runs/quickstart --step 200 --rows 1000
headway eval exported-model --store data/quickstart
"""


def eval_(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Run directory or Hugging Face folder.")],
    *,
    step: StepOption = None,
    store: Annotated[Path | None, typer.Option(help="Token store; the run's own when not given.")] = None,
    split: Annotated[Literal["train", "validation"], typer.Option(help="Split of the store.")] = "validation",
    rows: Annotated[int | None, typer.Option(min=1, help="Maximum number of rows; all when not given.")] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per row; as in training when not given, or 1,024 for an exported model."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run `headway eval`."""
    from headway.training.evaluation.inference import evaluate_trained

    result = evaluate_trained(
        model, step=step, store_path=store, split=split, rows=rows, sequence_length=sequence_length
    )
    if as_json:
        print_json(result)
    else:
        at = "" if result["step"] is None else f" at step {result['step']:,}"
        print_line(
            f"{model}{at}: loss {result['loss']:.4f}, perplexity {result['perplexity']:,.2f},"
            f" {result['tokens']:,} tokens"
        )
        if (replay := result.get("replay")) is not None:
            print_line(f"replayed sources: loss {replay['loss']:.4f}, perplexity {replay['perplexity']:,.2f}")
