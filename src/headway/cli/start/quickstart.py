"""`headway quickstart`: all steps from text to a trained model, with nothing to download."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from headway.api.training import leave_report, train
from headway.config import load_config
from headway.config.arguments import OverridesArgument
from headway.config.optimizers import DEFAULT_OPTIMIZER
from headway.core.console import notice, print_lines
from headway.core.user_command import remember_config
from headway.telemetry.arithmetic import cpu_multiplies_bf16

if TYPE_CHECKING:
    from headway.config import Config

HELP = """Run a small example from end to end: prepare text, train, evaluate, sample, export, report.

The text is the source code of this Python's standard library, so nothing is downloaded. It takes a few minutes on \
two cores. If it is stopped, the same command continues. The run is in runs/quickstart.

[bold]Examples[/bold]

headway quickstart
headway quickstart train.steps=100 name=tiny
"""

PROMPTS = ("def ", "class ", "import os\n\n")

#: Commands to try next, each with its purpose; `{runs}`, `{run}`, `{store}` and `{overrides}` are those of this run.
#: `{others}` are its overrides without those that the command gives anew.
NEXT = (
    ("headway ui {runs}", "its curves, data and environment in a browser; {run}/report.html is one page of them"),
    ('headway generate {run} --prompt "def main("', "sample from the model"),
    ("headway chat {run}", "type text, and let the model continue it"),
    ("headway eval {run}", "loss on the whole validation split"),
    ("headway runs show {run}", "the run in a few lines"),
    ("headway checkpoints list {run}", "the checkpoints of the run"),
    ("headway verify quickstart{overrides}", "prove that kills do not change a bit"),
    ("headway train quickstart{others} name=longer {store} train.steps=4000", "train for longer"),
)
_GIVEN_ANEW = ("name", "data.store", "train.steps", "train.tokens", "train.epochs")


def quickstart(overrides: OverridesArgument = None) -> None:
    """Run `headway quickstart`."""
    from headway.text.preparing.prepare import prepare

    wanted = [*_without_bf16(), *(overrides or [])]
    remember_config("quickstart", wanted)
    config = load_config("quickstart", wanted)
    _stage(1, "preparing text")
    prepare(config.data)
    _stage(2, "training")

    train(config, own_process=True)
    _after_training(config)
    print_lines("\nDone. What you may want next:")
    for command, purpose in _next_commands(config, wanted):
        print_lines(f"\n  # {purpose}\n  {command}")


def _next_commands(config: Config, overrides: list[str]) -> list[tuple[str, str]]:
    """Fill in the commands of `NEXT` and their purposes, including the overrides of this machine and the user."""
    others = [text for text in overrides if text.partition("=")[0] not in _GIVEN_ANEW]
    values = {
        "runs": shlex.quote(str(config.runs)),
        "run": shlex.quote(str(config.run_directory)),
        "store": shlex.quote(f"data.store={config.data.store}"),
        "overrides": "".join(f" {shlex.quote(text)}" for text in overrides),
        "others": "".join(f" {shlex.quote(text)}" for text in others),
    }
    return [(command.format(**values), purpose.format(**values)) for command, purpose in NEXT]


def _without_bf16() -> list[str]:
    """Return the overrides that say what `train.precision: auto` takes on a CPU that is not faster in bf16, and that
    replace Muon, which is slow in fp32.

    Overrides of the user come later and win.
    """
    import torch

    if torch.cuda.is_available() or torch.backends.mps.is_available() or cpu_multiplies_bf16():
        return []
    notice("this CPU is no faster in bf16: training in fp32, by AdamW")
    return ["train.precision=fp32", f"optimizer.name={DEFAULT_OPTIMIZER}"]


def _after_training(config: Config) -> None:
    from headway.api.start.recipe.finish import export, sample  # loads PyTorch
    from headway.training.evaluation.inference import evaluate_trained, load_trained

    run = config.run_directory
    _stage(3, "evaluating")
    result = evaluate_trained(run)
    notice(
        f"validation loss {result['loss']:.3f}, perplexity {result['perplexity']:,.2f} ({result['tokens']:,} tokens)"
    )
    _stage(4, "sampling")
    trained = load_trained(run)
    sample(run, trained, PROMPTS, seed=config.seed)
    _stage(5, "exporting to Hugging Face format")
    export(run, trained)
    _stage(6, "writing the report")
    leave_report(run)


def _stage(number: int, what: str) -> None:
    notice(f"\n[{number}/6] {what}")
