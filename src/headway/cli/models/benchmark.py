"""`headway benchmark`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.config.arguments import seconds_of
from headway.core.command_line import JsonOption, StepOption, print_json, print_table
from headway.training.evaluation.benchmarks import run_benchmarks, wanted_by_hand

HELP = """Run tasks of lm-eval on a trained model (extra lm-eval).

[bold]Examples[/bold]

headway benchmark runs/quickstart --tasks lambada_openai,hellaswag --download
headway benchmark runs/quickstart --tasks my-task.yaml --step 200 --limit 100
headway benchmark exported-model --tasks my-task.yaml --device cuda:0 --json

A task is a name (`lm-eval ls tasks`) or a YAML file of your own. The model is exported, and measured in a process of
its own. Without --download nothing asks the Hub: data are local files, or in the cache.
"""


def benchmark(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Run directory or Hugging Face folder.")],
    *,
    tasks: Annotated[str, typer.Option(help="Task names or YAML files, separated by commas.")],
    step: StepOption = None,
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of documents per task.")] = None,
    few_shot: Annotated[int | None, typer.Option(min=0, help="Examples before each question.")] = None,
    timeout: Annotated[str | None, typer.Option(help="Stop the tasks after this time, such as '2 h'.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts in a batch.")] = 8,
    download: Annotated[bool, typer.Option("--download", help="Allow fetching data sets from the Hub.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run `headway benchmark`."""
    most = {} if timeout is None else {"timeout_seconds": seconds_of(timeout, "--timeout", "'2 h'")}
    wanted = wanted_by_hand(
        tasks.split(","), device=device, limit=limit, few_shot=few_shot, rows=batch_size, download=download, **most
    )
    found = run_benchmarks(model, step, wanted, device)
    if as_json:
        print_json(found)
        return
    rows = [[task, name, f"{value:.4f}"] for task, values in found["results"].items() for name, value in values.items()]
    print_table(["Task", "Metric", "Value"], rows, numeric=(2,))
