"""`headway compress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from headway.core.command_line import JsonOption, StepOption, print_json, print_table, writing
from headway.core.console import notice
from headway.core.format import format_bytes
from headway.core.user_command import suggest_next

HELP = """Quantize or prune a trained model, and show its validation loss before and after.

[bold]Examples[/bold]

headway compress runs/quickstart small-model --quantize int8
headway compress runs/quickstart small-model --prune 2:4 --json
headway compress my-model small --quantize fp8 --store data/quickstart

Weights of linear layers are kept in 8 or 4 bits through torchao (extras hf and torchao); int4 needs a CUDA
GPU. transformers loads the folder: AutoModelForCausalLM.from_pretrained("small-model").
"""


def compress(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Run directory or Hugging Face folder.")],
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write.")],
    *,
    quantize: Annotated[Literal["int8", "int4", "fp8"] | None, typer.Option(help="Type of the weights.")] = None,
    prune: Annotated[
        Literal["magnitude", "2:4"] | None, typer.Option(help="Set the smallest weights of each matrix to zero.")
    ] = None,
    sparsity: Annotated[
        float, typer.Option(help="Share of weights, from 0 to 1, that --prune magnitude sets to zero.")
    ] = 0.5,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Type of weights that are not quantized.")] = "bf16",
    step: StepOption = None,
    store: Annotated[Path | None, typer.Option(help="Token store; the run's own when not given.")] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of validation rows; all when not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run `headway compress`."""
    from headway.models.hub.compressed import Compression
    from headway.training.evaluation.compression import compress_trained

    wanted = Compression(quantize, prune, sparsity, dtype)
    with writing(output):
        found = compress_trained(model, output, wanted, step=step, store_path=store, rows=rows)
    if as_json:
        print_json(found)
        return
    lines = [
        ("validation loss", "loss", "{:.4f}".format),
        ("perplexity", "perplexity", "{:,.2f}".format),
        ("weights on disk", "bytes", format_bytes),
        (f"weights in {quantize or 'fewer bits'}", "quantized_share", "{:.1%}".format),
        ("weights that are zero", "zero_share", "{:.1%}".format),
    ]
    rows_of_table = [[title, show(found["before"][key]), show(found["after"][key])] for title, key, show in lines]
    print_table(["", "Before", "After"], rows_of_table, numeric=(1, 2))
    notice(f"compressed {model} to {output}")
    suggest_next(("chat", output, "talk to it"), ("push", output, "ORG/NAME", "send it to the Hub"))
