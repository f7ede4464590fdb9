"""`headway config new|show|check|explain|schema|presets`."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.api.start.recipe.recipe import plan_run
from headway.cli.start.dial import DepthOption, MinutesOption, SizeOption, dial_of
from headway.config import dump_config, ineffective_settings, resolve_grid
from headway.config.arguments import ConfigArgument, OverridesArgument, load
from headway.config.loading.complaints import suggestion
from headway.config.loading.document import to_yaml
from headway.config.loading.foreign_keys import our_names, sentences
from headway.config.loading.load import presets as known
from headway.config.loading.reference import explain as entries_of
from headway.config.loading.reference import json_schema, reference
from headway.core.command_line import JsonOption, print_json, print_table
from headway.core.console import print_lines, warning
from headway.core.credentials.secrets import redact_values
from headway.core.errors import ConfigError
from headway.core.format import format_count
from headway.data.epochs import in_steps
from headway.data.store_manifest import MANIFEST
from headway.models.facts import count_parameters
from headway.models.shape import embedding_rows

if TYPE_CHECKING:
    from pathlib import Path

    from headway.config import Config


NEW = """Write a config for a folder of text, as headway train FOLDER would make it.

It looks at the files, rehearses the first steps on this machine, and prints YAML with the plan as a comment.

[bold]Examples[/bold]

headway config new my-texts > my.yaml
headway config new my-texts --minutes 60 > my.yaml
headway config new my-texts --size 30M train.sequence_length=2k > my.yaml
"""

SHOW = """Print the complete config that results from a file, its bases, the overrides and the defaults.

[bold]Examples[/bold]

headway config show quickstart
headway config show quickstart model.preset=10m --json
"""

CHECK = """Check a config and summarise it. If it is wrong, print every problem with its line; the exit code is 2.

Makes the checks with which a run starts, before anything is prepared: packages, functions and classes that the config \
names, models, tokenizers, sources, trackers. Devices are left to headway train --dry-run on the machine of the run, \
and so is what lies on the Hub or behind a URL.

[bold]Examples[/bold]

headway config check quickstart
headway config check quickstart train.tokens=2B
headway config check gpu parallel.workers=8 --json
"""

EXPLAIN = """Explain a key of the config: its meaning, type, default and an example.

A section is explained by its keys. Names of other trainers are known too.

[bold]Examples[/bold]

headway config explain train.global_batch
headway config explain schedule
headway config explain per_device_train_batch_size
"""

SCHEMA = """Print the JSON Schema, for editors, or the reference in Markdown.

[bold]Examples[/bold]

headway config schema > headway.schema.json
headway config schema --markdown > docs/config-reference.md
"""


PRESETS = """List the built-in presets, which stand in the place of a file and after `base:`.

[bold]Examples[/bold]

headway config presets
headway config presets --markdown
"""


def new(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of text, or one file of it.")],
    overrides: OverridesArgument = None,
    *,
    minutes: MinutesOption = None,
    size: SizeOption = None,
    depth: DepthOption = None,
) -> None:
    """Run `headway config new`."""
    recipe = plan_run(folder, dial_of(minutes, size, depth), overrides or [])
    plan = "".join(f"# {line}\n" for line in recipe.lines)
    print_lines(plan + to_yaml(redact_values(recipe.values)), end="")


def show(config: ConfigArgument, overrides: OverridesArgument = None, as_json: JsonOption = False) -> None:
    """Run `headway config show`."""
    loaded = load(config, overrides)
    if as_json:
        print_json(loaded.model_dump(mode="json"))
    else:
        print_lines(dump_config(loaded), end="")


def check(config: ConfigArgument, overrides: OverridesArgument = None, as_json: JsonOption = False) -> None:
    """Run `headway config check`."""
    from headway.api.start.checks import check_config

    loaded = load(config, overrides)
    epochs = loaded.train.epochs
    is_counted = epochs is None or loaded.data.remote is not None or (loaded.data.store / MANIFEST).is_file()
    if not is_counted:  # the checks need a length
        loaded = loaded.model_copy(update={"train": loaded.train.over(rows=10**6)})
    loaded = in_steps(loaded)
    check_config(loaded)
    if loaded.task is not None:
        _report_task(loaded, config, as_json)
        return
    train = loaded.train
    model = loaded.model
    workers = loaded.parallel.workers
    grid = resolve_grid(loaded, workers)
    parameters = _parameters(loaded)
    assert train.steps is not None
    facts: dict[str, Any] = {
        "run": str(loaded.run_directory),
        "store": str(loaded.data.store),
        "parameters": parameters,
        "steps": train.steps,
        "tokens": train.batches.tokens_before(train.steps),
        "tokens_per_step": train.tokens_per_step,
        "batches": [{"first_step": first, "rows": rows} for first, rows in train.batches.row_parts()],
        "workers": workers,
        "lanes": grid.lanes,
        "micro_batches": grid.micro_batches,
        "micro_batch": grid.micro_batch,
        "determinism": loaded.determinism,
    }
    length = f"{format_count(facts['tokens'])} tokens: {train.batches.sum_in_words(train.steps)}"
    if not is_counted:
        facts |= {"steps": None, "tokens": None, "epochs": epochs}
        length = f"{epochs:g} epochs, whose steps are counted when the data are prepared"
    if as_json:
        print_json(facts)
        return
    for line in ineffective_settings(loaded, evaluates=loaded.data.validation > 0):
        warning(line)
    several = len(list(train.batches.stretches(0, train.steps))) > 1
    ramp = f"  batches   {train.batches.in_words(train.steps)}\n" if several else ""
    shape = f"from {model.from_pretrained}" if model.from_pretrained else f"{model.layers} layers of width {model.dim}"
    print_lines(
        f"{config}: ok\n"
        f"  run       {facts['run']}\n"
        f"  data      {facts['store']}\n"
        f"  model     {format_count(parameters)} parameters, {shape}\n"
        f"  training  {length}"
        f" ({train.global_batch_rows} rows of {train.sequence_length})\n"
        f"{ramp}"
        f"  grid      workers {workers}, lanes {grid.lanes}, micro-batches per lane {grid.micro_batches},"
        f" rows per micro-batch {grid.micro_batch}{' until memory is tried' if train.micro_batch == 'auto' else ''}\n"
        f"  promise   determinism {loaded.determinism}"
    )


def _report_task(config: Config, file: Path, as_json: bool) -> None:
    assert config.task is not None and config.train.steps is not None, "the caller has looked"
    grid = resolve_grid(config, config.parallel.workers)
    facts: dict[str, Any] = {
        "run": str(config.run_directory),
        "task": config.task.function,
        "steps": config.train.steps,
        "samples": config.train.batches.rows_before(config.train.steps),
        "workers": config.parallel.workers,
        "lanes": grid.lanes,
        "micro_batches": grid.micro_batches,
        "micro_batch": grid.micro_batch,
        "determinism": config.determinism,
    }
    if as_json:
        print_json(facts)
    else:
        print_lines("\n".join([f"{file}: ok", *(f"  {key:<13} {value}" for key, value in facts.items())]))


def _parameters(config: Config) -> int | None:
    """Count the parameters of the model; None when its shape or vocabulary comes from files."""
    trained = None if config.data.tokenizer.path else embedding_rows(config.data.tokenizer.vocab_size)
    vocab_size = config.model.vocab_size or trained
    if vocab_size is None or config.model.dim is None:
        return None
    return count_parameters(config.model, vocab_size).total


def explain(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Dotted name, for example train.steps.")],
) -> None:
    """Run `headway config explain`."""
    name = key.strip().partition("=")[0]
    entries = entries_of(name)
    last = name.rpartition(".")[2]
    if not entries and last in sentences():
        print_lines(f"{name}, elsewhere: {sentences()[last]}\n")
        name = our_names().get(last, "")
        entries = entries_of(name) if name else []
        if not name:
            return
    if not entries:
        raise ConfigError(f"unknown key '{name}'", where=name, fix=suggestion(name))
    for entry in entries:
        print_lines(f"{name}: {entry.meaning}")
        if entry.below:
            rows = [[f"{name}.{child}", _first_sentence_of(f"{name}.{child}")] for child in entry.below]
            print_table(["KEY", "MEANING"], rows)
            continue
        print_lines(
            f"  type     {entry.type}\n  default  {entry.default}\n  example  {name}={shlex.quote(entry.example)}"
        )


def _first_sentence_of(key: str) -> str:
    found = entries_of(key)
    return re.split(r"(?<!al)\. (?=[A-Z`])", found[0].meaning)[0].removesuffix(".") if found else ""


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference in Markdown instead.")] = False,
) -> None:
    """Run `headway config schema`."""
    if markdown:
        print_lines(reference(), end="")
    else:
        print_json(json_schema())


def presets(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of the docs instead.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run `headway config presets`."""
    found = known()
    if as_json:
        print_json(found)
    elif markdown:
        rows = [f"| `{name}` | {use} |" for name, use in found.items()]
        print_lines("\n".join(["| preset | for |", "|---|---|", *rows]))
    else:
        print_table(["PRESET", "FOR"], [[name, use] for name, use in found.items()])


config = typer.Typer(no_args_is_help=True, help="Make, show, check and explain configs.")
for verb, text in ((new, NEW), (show, SHOW), (check, CHECK), (explain, EXPLAIN), (schema, SCHEMA), (presets, PRESETS)):
    config.command(help=text)(verb)
