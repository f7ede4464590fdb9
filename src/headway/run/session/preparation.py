"""Whether a run's data has to be prepared before it; the supervisor asks, so this loads no PyTorch."""

from __future__ import annotations

from contextlib import suppress

from headway.config import Config, DataConfig, load_resolved
from headway.config.derived.identity import changed_values
from headway.config.sections.data import vocabulary_problems
from headway.core.console import notice
from headway.core.errors import ConfigError, DataError
from headway.data.made_of import made_of, unknown_code
from headway.data.replacing import check_replaceable
from headway.data.store_manifest import MANIFEST, read_manifest
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.attempt import ACCEPT, RunOptions


def why_prepare(config: Config, options: RunOptions) -> str | None:
    """Return why a run's token store has to be prepared before it; None if it need not be.

    A run that has begun keeps the data that it has, unless it accepts changes. A store behind a URL, or imported from
    another project, is used as it is.

    Raises:
        ConfigError: the store is not what the config says, and other runs use it; or a model comes without the
            tokenizer that the data must be prepared with; or the store of a run is gone, and its config has changed.
    """
    data = config.data
    if data.remote is not None:
        return None
    run = RunDirectory(config.run_directory)
    keeps = run.has_begun() and not options.restart and not options.accept_changes
    try:
        (data.store / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        if keeps:
            _check_same_data(run, data)
        why = "there is no token store yet"
    except OSError:
        return None  # whoever opens it reports that
    else:
        if keeps:
            return None
        differing = check_replaceable(data, config.run_directory)
        if not differing:
            _report_unknown_code(data)
            return None
        why = f"it is not what the config says: {'; '.join(differing)}"
    for problem in vocabulary_problems(config.data, config.model.from_pretrained):
        raise problem
    return why


def _report_unknown_code(data: DataConfig) -> None:
    """Report the cleaning functions that cannot be compared with those that a store was made with."""
    with suppress(DataError):  # of a damaged manifest: reported by whoever opens the store
        manifest = read_manifest(data.store)
        if "imported" not in manifest and (names := unknown_code(data, manifest)):
            notice(
                f"nothing shows whether {data.store} was cleaned with the code that {', '.join(names)} has now;"
                " the store is used as it is"
            )


def _check_same_data(run: RunDirectory, data: DataConfig) -> None:
    """Check that a run whose store is gone would get the same one again."""
    differing = changed_values(made_of(load_resolved(run.config_path).data), made_of(data))
    if differing:
        raise ConfigError(
            f"the run's token store is gone, and the config would prepare another: {'; '.join(differing)}",
            where=f"{run.config_path}, data.store: {data.store}",
            fix=f"restore the store, choose another name=..., or continue with the new values: {ACCEPT}",
        )
