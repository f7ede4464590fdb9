"""`train.epochs` as steps over the training rows of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.console import notice
from headway.core.errors import ConfigError
from headway.core.user_command import suggest
from headway.data.feeding.training_rows import training_rows
from headway.data.remote_store import open_store
from headway.data.store_manifest import MANIFEST

if TYPE_CHECKING:
    from headway.config import Config


def in_steps(config: Config) -> Config:
    """Return the config with `train.epochs` as steps over the training rows of its store.

    Args:
        config: Resolved. Without `train.epochs` it is returned unchanged.

    Raises:
        ConfigError: the data are not prepared yet.
        DataError: the store cannot be read.
    """
    if config.train.epochs is None:
        return config
    if config.data.remote is None and not (config.data.store / MANIFEST).is_file():
        raise ConfigError(
            f"train.epochs={config.train.epochs:g} counts passes over the prepared data, and {config.data.store} is not"
            " prepared yet",
            where="train.epochs",
            fix=suggest("data prepare"),
        )
    length = config.train.sequence_length
    rows = sum(training_rows(config.data, length, open_store(config.data), config.segments).counts(length))
    train = config.train.over(rows)
    notice(f"train.epochs={config.train.epochs:g} over {rows:,} rows are {train.steps:,} steps")
    return config.model_copy(update={"train": train})
