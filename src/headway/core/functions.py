"""Functions, classes and specs that a config names."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.core.errors import ConfigError
from headway.core.files.hashes import sha256_file


def load_attribute(name: str, where: str, kind: str) -> tuple[Any, Any]:
    """Import the module and the attribute of `package.module:attribute`.

    Modules in the working directory are found too. If the attribute comes from there, the directory stays on
    `sys.path`, so that functions can import other modules later.

    Args:
        name: The module and the attribute.
        where: Place in the config, for error messages.
        kind: What the name stands for, for error messages: a function or a class.

    Raises:
        ConfigError: the module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path and module_name.partition(".")[0] not in sys.modules
    if added:
        sys.path.append(here)
    module: ModuleType | None = None
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"the module {module_name} cannot be imported: {type(error).__name__}: {error}",
            where=where,
            fix=f"give package.module:{kind}, importable from the working directory",
        ) from error
    finally:
        if added and not (getattr(module, "__file__", None) or "").startswith(here + os.sep):
            sys.path.remove(here)
    try:
        return module, reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise ConfigError(
            f"the module {module_name} has no {kind} {attribute}", where=where, fix=f"check the {kind}'s name"
        ) from None


def load_function(name: str, where: str, kind: str = "function") -> tuple[Any, Callable[..., Any]]:
    """Import the module and the function of `package.module:function`, as `load_attribute` does.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    module, function = load_attribute(name, where, kind)
    if not callable(function):
        raise ConfigError(
            f"the module {name.partition(':')[0]} has no {kind} {name.partition(':')[2]}",
            where=where,
            fix=f"check the {kind}'s name",
        )
    return module, function


def name_of_function(function: Callable[..., Any], where: str) -> str:
    """Return the `package.module:function` under which `load_function` finds a function.

    Raises:
        ConfigError: it is no function of a module, as a lambda.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)) or "<" in name:
        raise ConfigError(
            f"{name or type(function).__name__} is no function of a module, so a resumed run could not find it",
            where=where,
            fix="define it with `def` at the top of a module",
        )
    return f"{module}:{name}"


def source_hash(module: Any) -> str:
    """Return the SHA-256 of a module's source. Changes of modules that it imports do not show."""
    source = getattr(module, "__file__", None)
    if source is None:
        return f"built into Python {sys.version_info.major}.{sys.version_info.minor}"
    return sha256_file(Path(inspect.getsourcefile(module) or source))
