"""A config whose data is there and whose model has every size, as the first process of an attempt looks at it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.config import Config
from headway.core.launched import world_size_from_environment

if TYPE_CHECKING:
    from headway.data.store import TokenStore


def completed(config: Config) -> tuple[Config, TokenStore]:
    """The config with the shape of its model filled in, and the data that it names.

    Args:
        config: Resolved.

    Raises:
        HeadwayError: the data is missing or does not fit, or the model cannot be made or cut as the config says.
    """
    # Looked for before torch is imported: a missing store should be said at once.
    from headway.data.remote_store import open_store

    started = world_size_from_environment() is not None  # by an agent, which also says how many are on this machine
    store = open_store(config.data, processes=None if started else config.parallel.workers)
    from headway.config.experts import decoder_problems
    from headway.models.build import complete

    config = config.model_copy(update={"model": complete(config.model, store.vocab_size)})
    for problem in decoder_problems(config):  # of a pretrained shape, which only now is known
        raise problem
    return config, store
