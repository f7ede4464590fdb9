"""The `headway` command: one thin file per verb, nothing heavy imported before a verb runs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
import typer.core

from headway.core.errors import HeadwayError

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


def _version(wanted: bool) -> None:
    if wanted:
        from headway import __version__

        print(f"headway {__version__}")
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


def _wanted(words: Sequence[str]) -> Sequence[str]:
    """The verb that a command line names, for the others take a tenth of a short command to get ready; all when it
    names none."""
    first = next((word for word in words if not word.startswith("-")), None)
    return (first,) if first in VERBS else VERBS


def main() -> None:
    """Entry point; deliberate errors become three lines and an exit code, never a traceback."""
    # What is imported stays: looking through it for garbage again and again would take a tenth of a short command.
    gc.set_threshold(100_000, 20, 20)
    try:
        try:
            application(_wanted(sys.argv[1:]))()
        finally:
            gc.freeze()
            sys.stdout.flush()
    except HeadwayError as error:
        print(error.render(), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # `headway ... | head`: the reader has had enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
