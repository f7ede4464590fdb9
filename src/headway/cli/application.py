"""The verbs of the `headway` command. Each is one thin file that imports nothing heavy before the verb runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
import typer.core

from headway.core.console import print_line
from headway.core.format import printable

if TYPE_CHECKING:
    from typer.models import CommandInfo, TyperInfo

#: Each verb with the folder of its file, in the order of `headway --help`.
VERBS = {
    "quickstart": "start",
    "doctor": "start",
    "config": "start",
    "data": "data",
    "tokenizer": "data",
    "train": "training",
    "launch": "training",
    "runs": "runs",
    "top": "runs",
    "ui": "runs",
    "report": "runs",
    "checkpoints": "runs",
    "ledger": "runs",
    "track": "runs",
    "dashboards": "runs",
    "alerts": "runs",
    "models": "models",
    "eval": "models",
    "benchmark": "models",
    "generate": "models",
    "chat": "models",
    "export": "models",
    "merge": "models",
    "compress": "models",
    "push": "models",
    "plan": "measure",
    "profile": "measure",
    "bench": "measure",
    "verify": "measure",
    "chaos": "measure",
    "prices": "cost",
    "cost": "cost",
    "spot": "cost",
}


#: The title under which `headway --help` lists the verbs of a folder.
_PANELS = {
    "start": "Start",
    "data": "Data",
    "training": "Train",
    "runs": "Runs and checkpoints",
    "models": "Trained models",
    "measure": "Plan, measure, verify",
    "cost": "Cost",
}


class InOrder(typer.core.TyperGroup):
    """A group that lists verbs in the order of `VERBS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List the verbs for the help page."""
        return list(VERBS)

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
    from headway.config.loading.complaints import OURS, known_keys

    known = dict.fromkeys(known_keys())
    if name in known or name in OURS:
        return [OURS.get(name, name)]
    keys = [key for key in known if key.rpartition(".")[2] == name]
    return keys if len(keys) <= 4 else []


def _version(wanted: bool) -> None:
    if wanted:
        from headway import __version__

        print_line(f"headway {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Define the options before the verb."""


def application(verbs: Iterable[str] = VERBS) -> typer.Typer:
    """Build the command with these verbs."""
    app = typer.Typer(
        name="headway",
        cls=InOrder,
        help="Turns text into trained language models on whatever machines you have, and never loses ground.",
        epilog="Start here: headway quickstart",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    for verb in verbs:
        import_module(f"headway.cli.{VERBS[verb]}.{verb}").register(app)
    added: list[CommandInfo | TyperInfo] = [*app.registered_commands, *app.registered_groups]
    for info in added:
        info.rich_help_panel = _PANELS[VERBS[str(info.name or getattr(info.callback, "__name__", ""))]]
    return app


def wanted(words: Sequence[str]) -> Iterable[str]:
    """Return the verb that a command line names, or all verbs if it names none.

    Loading only one verb saves a tenth of the time of a short command.
    """
    first = next((word for word in words if not word.startswith("-")), None)
    return (first,) if first in VERBS else VERBS
