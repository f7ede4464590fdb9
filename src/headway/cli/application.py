"""The verbs of the `headway` command. Each is one thin file that imports nothing heavy before the verb runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
import typer.core

from headway.cli.auditing import recorded
from headway.cli.next_steps import followed
from headway.core.console import print_line
from headway.core.format import printable
from headway.core.startup.loading import without_collecting
from headway.core.version import __version__
from headway.data.tokenizing.preload import begin_loading_named

if TYPE_CHECKING:
    from typer.models import CommandInfo, TyperInfo


class Verb(NamedTuple):
    """Where a verb is, and its line in lists of verbs."""

    #: The package of its file below `headway`.
    package: str
    #: Its line in lists, which is the first line of its help: so that a list loads no verb.
    summary: str
    #: The title of the list that begins with it.
    panel: str | None = None


#: Each verb, in the order of `headway help`.
VERBS = {
    "quickstart": Verb(
        "cli.start",
        "Run a small example from end to end: prepare text, train, evaluate, sample, export, report.",
        "Start",
    ),
    "help": Verb("cli.start", "List all verbs, or show the help of one."),
    "doctor": Verb("lab.cli", "Show what this machine has, what is wrong with it, and what to set."),
    "init": Verb(
        "clouds.cli",
        "Make a project of your own on Headway: configs, parts with tests, Makefile, cards, containers, CI.",
    ),
    "config": Verb("cli.start", "Make, show, check and explain configs."),
    "data": Verb("text.cli", "Prepare text for training, and inspect the result.", "Data"),
    "tokenizer": Verb("cli.models", "Train a tokenizer, inspect, compare or extend one."),
    "train": Verb(
        "cli.start", "Train a language model or a task of your own, or continue a run that was interrupted.", "Train"
    ),
    "launch": Verb("cli.start", "Start a run on a cluster: Slurm, Kubernetes, Ray, SkyPilot or Metaflow."),
    "runs": Verb("cli.runs", "List, show and compare runs.", "Runs and checkpoints"),
    "top": Verb("tracking.cli", "Show all runs of a folder: state, step, loss, speed, cost, last save and alerts."),
    "ui": Verb("tracking.cli", "Show all runs of a folder in a browser: the list, and curves to compare, live."),
    "report": Verb("cli.runs", "Write a run's report: one HTML page with its curves, data, attempts and environment."),
    "checkpoints": Verb("cli.runs", "List, verify, compare, copy, prune and restore checkpoints."),
    "ledger": Verb("cli.runs", "Prove that a run used every row of its plan exactly once, despite all failures."),
    "audit": Verb("cli.runs", "Show and verify who has changed a run, when, and from where."),
    "track": Verb(
        "tracking.cli", "Send runs to trackers: MLflow, TensorBoard, W&B, Trackio, OpenTelemetry, or your own."
    ),
    "dashboards": Verb("tracking.cli", "List or write dashboards of runs for Grafana."),
    "alerts": Verb("tracking.cli", "List or write alert rules of runs for Prometheus."),
    "models": Verb(
        "cli.models", "List the named model shapes with their parameters, costs and sizes.", "Trained models"
    ),
    "eval": Verb("cli.models", "Compute loss and perplexity of a trained model on held-out text."),
    "benchmark": Verb("cli.models", "Run tasks of lm-eval on a trained model (extra lm-eval)."),
    "generate": Verb("cli.models", "Continue a text with a trained model, and print tokens as they are sampled."),
    "chat": Verb("cli.models", "Talk to a trained model; answers are printed as they are sampled."),
    "export": Verb("cli.models", "Write a trained model as a Hugging Face folder: safetensors, config, tokenizer."),
    "merge": Verb(
        "cli.models",
        "Merge a trained adapter into its pretrained model, and write the result as a Hugging Face folder.",
    ),
    "compress": Verb("cli.models", "Quantize or prune a trained model, and show its validation loss before and after."),
    "push": Verb("cli.models", "Send a trained model to the Hugging Face Hub, with a model card from its run."),
    "registry": Verb(
        "registry.cli",
        "Keep versions of trained models with their evidence: a registry in a folder or an object store.",
    ),
    "serve": Verb("serve.cli", "Serve a trained model with OpenAI's interface, and try one version against another."),
    "plan": Verb(
        "lab.cli",
        "Estimate the memory, speed, time and cost of a run on given machines, before paying for them.",
        "Plan, measure, verify",
    ),
    "profile": Verb("lab.cli", "Show where the time of a training step goes, and what to change first."),
    "bench": Verb(
        "lab.cli",
        "Measure a matrix of strategies, numbers of workers, models, precisions, micro-batches and row lengths.",
    ),
    "tune": Verb(
        "lab.cli",
        "Search for good keys of a config: each trial is a run, and a study that is killed decides as if it was not.",
    ),
    "compare": Verb(
        "lab.cli", "Compare runs and models: curves, and the evidence for a difference in loss with its uncertainty."
    ),
    "verify": Verb("lab.cli", "Check that a config is reproducible bit for bit, as its determinism promises."),
    "chaos": Verb(
        "lab.cli", "Kill a training run again and again, and check that its result is as if nothing had happened."
    ),
    "prices": Verb(
        "clouds.cli", "Compare the prices of machines with accelerators between clouds and regions.", "Cost"
    ),
    "cost": Verb("clouds.cli", "Show what a run has cost, and simulate policies on spot machines."),
    "image": Verb("clouds.cli", "Build images, show their layers, and pin what they are built from."),
    "sbom": Verb(
        "clouds.cli", "Write the bill of materials of a wheel: what it installs, in which version, under which licence."
    ),
    "spot": Verb(
        "clouds.cli", "Train while spot machines are cheap: pause above a price, resume below another, grow, and move."
    ),
}

#: Verbs whose command line contains that of another one.
_READS = {"spot": ("launch",)}


#: The verbs of a first week, which `headway -h` shows; `headway help` shows all.
FIRST_WEEK = ("quickstart", "doctor", "config", "data", "train", "runs", "ui", "eval", "chat", "export")


class InOrder(typer.core.TyperGroup):
    """A group that lists verbs in the order of `VERBS`."""

    shown: Sequence[str] = tuple(VERBS)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._completed: set[str] = set()

    def list_commands(self, ctx: Any) -> list[str]:
        """List the verbs, for the help page and for completion."""
        return list(self.shown)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show a first week's verbs on the help page."""
        self.shown = FIRST_WEEK
        super().format_help(ctx, formatter)

    def format_all(self, ctx: Any) -> None:
        """Show all verbs."""
        super().format_help(ctx, ctx.make_formatter())

    def get_command(self, ctx: Any, name: str) -> Any:
        """Find a verb, with words for the values of its options, and with what comes next."""
        command = super().get_command(ctx, name)
        if command is None and name in VERBS:
            return typer.core.TyperCommand(name, help=VERBS[name].summary, rich_help_panel=_panel(name))
        if command is not None and name not in self._completed:
            self._completed.add(name)
            _complete(command, name)
        return command

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the words up to the verb, with control characters in error messages escaped."""
        with _printable_messages():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. For an unknown option such as `--train.steps=50` or `--steps 50`, suggest the override."""
        try:
            with _printable_messages():
                return super().invoke(ctx)
        except Exception as error:
            # Recognised by its attributes: its class is click's or, in some versions of typer, a copy of it.
            name = getattr(error, "option_name", None)
            verb = getattr(getattr(error, "ctx", None), "command", None)
            if name and hasattr(error, "message") and any(p.name == "overrides" for p in getattr(verb, "params", ())):
                keys = _meant_keys(name.lstrip("-").replace("-", "_"))
                if keys:
                    error.message += f". Overrides have no dashes: {' or '.join(f'{key}=VALUE' for key in keys)}"
            raise


def _complete(command: Any, verb: str) -> None:
    """Name the values of options by words, in place of typer's types: `--step STEP`, and nothing for a flag. Let the
    verb begin with its line in the audit log of the run that it changes, and end with what comes next."""
    for name, below in getattr(command, "commands", {}).items():
        _complete(below, f"{verb} {name}")
    if not hasattr(command, "commands"):
        command.callback = recorded(verb, followed(verb, command.callback))
    for option in command.params:
        kind = getattr(option, "type_descriptor", None) or option.type
        has_choices = bool(getattr(kind, "choices", None))
        if option.param_type_name == "option" and option.metavar is None and not has_choices:
            option.metavar = "" if option.is_flag else option.name.rpartition("_")[2].upper()


@contextmanager
def _printable_messages() -> Iterator[None]:
    """Escape control characters in error messages: file names may contain them (`headway runs compare runs/*`)."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = printable(message)  # type: ignore[attr-defined]
        raise


def _meant_keys(name: str) -> list[str]:
    """Return the keys of the config that an option may stand for: its own name, or a name in Headway or elsewhere."""
    if "." in name:
        return [name]
    from headway.config.loading.complaints import known_keys  # not at the top: every command loads this module
    from headway.config.loading.foreign_keys import our_names

    known = dict.fromkeys(known_keys())
    if name in known or name in our_names():
        return [our_names().get(name, name)]
    keys = [key for key in known if key.rpartition(".")[2] == name]
    return keys if len(keys) <= 4 else []


def _version(wanted: bool) -> None:
    if wanted:
        print_line(f"headway {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Define the options before the verb."""


def begin_loading(words: Sequence[str]) -> None:
    """Begin what `headway data prepare` waits for longest, its vocabulary, before the code of the verb loads."""
    named = [word for word in words if not word.startswith("-")]
    if named[:2] == ["data", "prepare"] and len(named) > 2 and "--dry-run" not in words:
        begin_loading_named(Path(named[2]), named[3:])


def application(verbs: Iterable[str] = VERBS) -> typer.Typer:
    """Build the command with these verbs."""
    app = typer.Typer(
        name="headway",
        cls=InOrder,
        help="Turns text into trained language models on whatever machines you have, and never loses ground.",
        epilog="Start here: headway train FOLDER, with a folder of text. All verbs: headway help",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    with without_collecting():
        modules = {verb: import_module(f"headway.{VERBS[verb].package}.{verb}") for verb in verbs}
    for verb, module in modules.items():
        found = getattr(module, verb, None) or getattr(module, f"{verb}_")  # `eval_`: Python has an `eval`
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb)
        else:
            app.command(verb, help=getattr(module, "HELP", None))(found)
    added: list[CommandInfo | TyperInfo] = [*app.registered_commands, *app.registered_groups]
    for info in added:
        info.rich_help_panel = _panel(str(info.name or getattr(info.callback, "__name__", "")))
    return app


def _panel(verb: str) -> str:
    """Return the title under which a verb is listed: that of the last verb up to it that begins a list."""
    title = "Commands"
    for name, known in VERBS.items():
        title = known.panel or title
        if name == verb:
            break
    return title


def wanted(words: Sequence[str]) -> Iterable[str]:
    """Return the verbs that a command line runs: lists of all verbs need none loaded."""
    named = [word for word in words if not word.startswith("-")]
    asked = named[:2] if named[:1] == ["help"] else named[:1]
    loaded = [name for name in asked if name in VERBS]
    return [*loaded, *(read for name in loaded for read in _READS.get(name, ()))]
