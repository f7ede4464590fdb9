"""Import of torchao without its messages about kernels for other machines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from headway.config.optimizers import TORCHAO
from headway.config.specs import Package
from headway.core.errors import ConfigError
from headway.core.requirements import install_command


@contextmanager
def importing_torchao(what: str, where: str, instead: str) -> Iterator[None]:
    """Silence messages and explain a missing library within a block of imports.

    Args:
        what: The config value that needs torchao.
        where: The key of that value.
        instead: A value that does not need torchao.

    Raises:
        ConfigError: torchao is not installed.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    except ImportError:
        raise missing_package(TORCHAO, what, where, instead) from None
    finally:
        logging.disable(before)


def missing_package(package: Package, what: str, where: str, instead: str) -> ConfigError:
    """Return the error for a missing package; other arguments as in `importing_torchao`."""
    return ConfigError(
        f"{what} needs {package.title}, which is not installed",
        where=where,
        fix=f"{install_command(package.extra)}, or {where}={instead}",
    )
