"""`headway train FOLDER`: from a folder of text to a model that answers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from headway.api.start.recipe.corpus import is_text, look
from headway.api.start.recipe.recipe import MINUTES, Dial, plan_run
from headway.api.start.recipe.shapes import MOST_EPOCHS
from headway.config import Config, load_config
from headway.core.console import notice, print_lines
from headway.core.errors import ConfigError
from headway.core.user_command import next_lines, remember_config
from headway.run.directory.run_directory import RunDirectory
from headway.telemetry.record import open_run


def is_folder_of_text(path: Path) -> bool:
    """Return whether a word names text and not a config; a run directory is neither."""
    return is_text(path) and not (path / "config.yaml").is_file()


def config_for(folder: Path, overrides: Sequence[str], dial: Dial, *, restart: bool) -> Config:
    """Return the config of the run on a folder: of the one that has begun, otherwise a new plan, which is printed.

    Raises:
        HeadwayError: there is no text, an override is wrong, or the run of that name has other text.
    """
    named = load_config("laptop", [f"name={look(str(folder)).name}", *overrides])
    run = RunDirectory(named.run_directory)
    remember_config(str(run.config_path), overrides)
    if run.has_begun() and not restart:
        return _begun(run, folder, overrides)
    recipe = plan_run(str(folder), dial, overrides)
    notice("\n".join(recipe.lines))
    return recipe.config


def _begun(run: RunDirectory, folder: Path, overrides: Sequence[str]) -> Config:
    config = load_config(run.config_path, overrides)
    read = [Path(source.path).resolve() for source in config.data.sources]
    if folder.resolve() not in read:
        raise ConfigError(
            f"the run {config.name} is of other text: {', '.join(map(str, read))}",
            where=str(run.path),
            fix=f"name=..., for example headway train {shlex.quote(str(folder))} name={config.name}-2",
        )
    notice(f"{run.path} has begun, and continues as it was planned; --restart plans it anew")
    return config


def finish(config: Config, folder: Path, dial: Dial) -> None:
    """Sample from the model, export it, and say which three commands come next."""
    from headway.api.start.recipe.finish import sample_and_export

    run = config.run_directory
    sample_and_export(run, config.data.store, seed=config.seed)
    again = f"headway train {shlex.quote(str(folder))} --minutes {3 * (dial.minutes or MINUTES):g}"
    steps = (
        (f"headway chat {shlex.quote(str(run))}", "talk to it"),
        (f"headway ui {shlex.quote(str(config.runs))}", "see its curves in a browser"),
        (f"{again} name={shlex.quote(config.name)}-longer", "a better one, for longer"),
    )
    if _passes(run) > MOST_EPOCHS - 1:
        more = f"headway train {shlex.quote(str(folder))} name={shlex.quote(config.name)}-more"
        steps = (*steps[:2], (more, "when there is more text in the folder: this one was used up"))
    print_lines(next_lines(steps))


def _passes(run: Path) -> float:
    """Return how often the run went over the source that it repeated most."""
    metrics = open_run(run).metrics
    found = [metrics.last(name) or 0.0 for name in metrics.names if name.startswith("data/epochs/")]
    return max(found, default=0.0)
