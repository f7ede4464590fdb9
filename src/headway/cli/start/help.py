"""`headway help`."""

from __future__ import annotations

import typer

from headway.core.console import print_lines

HELP = """List all verbs, or show the help of one.

[bold]Examples[/bold]

headway help
headway help checkpoints
"""


def help_(
    context: typer.Context,
    verb: str | None = typer.Argument(None, metavar="VERB", help="The verb; all when not given."),
) -> None:
    """Run `headway help`."""
    root = context.find_root()
    if verb is None:
        root.command.format_all(root)  # type: ignore[attr-defined]  # of `InOrder`
        return
    command = root.command.get_command(root, verb)  # type: ignore[attr-defined]
    if command is None:
        raise typer.BadParameter(f"there is no verb {verb}: headway help lists them", context)
    print_lines(command.get_help(command.make_context(verb, [], parent=root, resilient_parsing=True)))
