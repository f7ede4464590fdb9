"""`headway config show|check|schema`."""

from __future__ import annotations

from typing import Annotated

import typer

from headway.cli.common import ConfigArgument, JsonOption, OverridesArgument, load, print_json
from headway.core.format import format_count


def register(app: typer.Typer) -> None:
    """Add the verb."""
    group = typer.Typer(no_args_is_help=True)
    group.command("show", help=SHOW)(show)
    group.command("check", help=CHECK)(check)
    group.command("schema", help=SCHEMA)(schema)
    app.add_typer(group, name="config", help="Show, check and document configs.")


SHOW = """Print the complete config: what a file, its bases, the overrides and the defaults come to.

[bold]Examples[/bold]

  headway config show configs/quickstart.yaml
  headway config show quickstart model.preset=10m --json
"""

CHECK = """Check a config; exit code 2 and every problem with its line when it is wrong.

[bold]Examples[/bold]

  headway config check configs/quickstart.yaml
  headway config check configs/quickstart.yaml train.tokens=2B
"""

SCHEMA = """Print the JSON Schema, for editors, or the reference in Markdown.

[bold]Examples[/bold]

  headway config schema > headway.schema.json
  headway config schema --markdown > docs/config-reference.md
"""


def show(config: ConfigArgument, overrides: OverridesArgument = None, as_json: JsonOption = False) -> None:
    """The verb."""
    from headway.config import dump_config

    loaded = load(config, overrides)
    if as_json:
        print_json(loaded.model_dump(mode="json"))
    else:
        print(dump_config(loaded), end="")


def check(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """The verb."""
    from headway.config import resolve_lanes

    loaded = load(config, overrides)
    train, grid = loaded.train, resolve_lanes(loaded, loaded.parallel.workers)
    assert train.steps is not None
    tokens = train.steps * train.tokens_per_step
    print(
        f"{config}: ok\n"
        f"  run       {loaded.run_directory}\n"
        f"  training  {train.steps:,} steps of {train.global_batch_rows} rows of {train.sequence_length} tokens:"
        f" {format_count(tokens)} tokens\n"
        f"  grid      {grid.lanes} lanes of {grid.micro_batches} micro-batches of {grid.micro_batch} rows,"
        f" {loaded.parallel.workers} workers\n"
        f"  promise   determinism {loaded.determinism}"
    )


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="The reference in Markdown instead.")] = False,
) -> None:
    """The verb."""
    from headway.config import Config
    from headway.config.reference import reference

    if markdown:
        print(reference())
    else:
        print_json(Config.model_json_schema())
