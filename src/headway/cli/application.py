"""The verbs of the `headway` command: one thin file each, nothing heavy imported before one runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import typer
import typer.core

from headway.core.console import print_line
from headway.core.format import printable

#: The order of `headway --help`: from text to model to what comes after.
VERBS = (
    "quickstart",
    "doctor",
    "config",
    "data",
    "tokenizer",
    "models",
    "plan",
    "profile",
    "bench",
    "train",
    "eval",
    "generate",
    "export",
    "checkpoints",
    "runs",
    "ledger",
    "report",
    "verify",
    "chaos",
)


class InOrder(typer.core.TyperGroup):
    """Lists verbs and groups of verbs in the order of `VERBS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names for the help page."""
        return list(VERBS)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Understand the words up to the verb. What is said of others is fit for a terminal."""
        with _printable_messages():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. `--train.steps=50` and `--steps 50` are answered with what overrides look like."""
        try:
            with _printable_messages():
                return super().invoke(ctx)
        except Exception as error:
            # Told by what it knows: depending on typer's version it is of click, or of typer's own copy of it.
            name = getattr(error, "option_name", None)
            verb = getattr(getattr(error, "ctx", None), "command", None)
            if name and hasattr(error, "message") and any(p.name == "overrides" for p in getattr(verb, "params", ())):
                keys = _keys_meant(name.lstrip("-").replace("-", "_"))
                if keys:
                    error.message += f". Overrides have no dashes: {' or '.join(f'{key}=VALUE' for key in keys)}"
            raise


@contextmanager
def _printable_messages() -> Iterator[None]:
    """Names of files come to the command line as others have given them: `headway runs compare runs/*`."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = printable(message)  # type: ignore[attr-defined]
        raise


def _keys_meant(name: str) -> list[str]:
    """Keys of the config that an option may stand for: that very one, or few that are called so, by us or by others."""
    if "." in name:
        return [name]
    from headway.config.complaints import OURS, known_keys

    known = dict.fromkeys(known_keys())
    if name in known or name in OURS:
        return [OURS.get(name, name)]
    keys = [key for key in known if key.rpartition(".")[2] == name]
    return keys if len(keys) <= 3 else []


def _version(wanted: bool) -> None:
    if wanted:
        from headway import __version__

        print_line(f"headway {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options before the verb."""


def application(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """The command with these verbs."""
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
        import_module(f"headway.cli.{verb}").register(app)
    return app


def wanted(words: Sequence[str]) -> Sequence[str]:
    """The verb that a command line names, for the others take a tenth of a short command to get ready; all when it
    names none."""
    first = next((word for word in words if not word.startswith("-")), None)
    return (first,) if first in VERBS else VERBS
