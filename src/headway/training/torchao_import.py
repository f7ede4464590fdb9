"""Importing torchao without what it says about kernels for other machines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from headway.core.errors import ConfigError


@contextmanager
def importing_torchao(what: str, where: str, instead: str) -> Iterator[None]:
    """Around the imports.

    Args:
        what: Which value of the config needs it.
        where: Its key.
        instead: A value that does not.

    Raises:
        ConfigError: torchao is not installed.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    except ImportError:
        raise missing_torchao(what, where, instead) from None
    finally:
        logging.disable(before)


def missing_torchao(what: str, where: str, instead: str) -> ConfigError:
    """The error where it is not installed; arguments as above."""
    return ConfigError(
        f"{what} needs torchao, which is not installed",
        where=where,
        fix=f"pip install 'headway[torchao]', or {where}={instead}",
    )
