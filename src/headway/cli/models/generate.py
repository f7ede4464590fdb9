"""`headway generate`."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from headway.core.command_line import StepOption, TemperatureOption, TopPOption, as_utf8
from headway.core.console import exact_results, print_line, print_prompt, print_text

HELP = """Continue a text with a trained model, and print tokens as they are sampled.

On a terminal the prompt is bold, or ends with a bar. headway chat talks to a model.

[bold]Examples[/bold]

headway generate runs/quickstart --prompt "def main("
headway generate runs/quickstart -p "import " --temperature 0 -n 50
echo "class Parser:" | headway generate runs/quickstart --prompt -
"""


def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Run directory or Hugging Face folder.")],
    *,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to continue; - reads standard input.")] = "",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Maximum number of tokens to generate.")
    ] = 128,
    temperature: TemperatureOption = 0.8,
    top_p: TopPOption = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of sampling; equal seeds give equal texts.")] = 0,
    step: StepOption = None,
) -> None:
    """Run `headway generate`."""
    from headway.training.evaluation.inference import continue_text, load_trained

    if prompt == "-":
        text = as_utf8(sys.stdin.buffer.read().decode(errors="surrogateescape"), "standard input")
    else:
        text = as_utf8(prompt, "--prompt")
    pieces = continue_text(
        load_trained(model, step=step, device="auto"),
        text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    first = next(pieces, "")  # print the prompt only after it proved usable
    with exact_results():
        print_prompt(text)
        for piece in chain((first,), pieces):
            print_text(piece)
        print_line()
