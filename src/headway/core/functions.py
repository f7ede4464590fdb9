"""Functions, classes and specs that a config names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from headway.core.code_identity import code_identity, compare
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
        raise _missing(module_name, attribute, where, kind) from None


def load_function(name: str, where: str, kind: str = "function") -> tuple[Any, Callable[..., Any]]:
    """Import the module and the function of `package.module:function`, as `load_attribute` does.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    module, function = load_attribute(name, where, kind)
    if not callable(function):
        module_name, _, attribute = name.partition(":")
        raise _missing(module_name, attribute, where, kind)
    return module, function


def identify_function(name: str, where: str) -> str:
    """Import a function and return the identity of its code (`code_identity`).

    Raises:
        ConfigError: the module cannot be imported, or has no such function; or it reads a value that has no identity.
    """
    module, function = load_function(name, where)
    return code_identity(function, module, where)


def compare_function(name: str, before: str, where: str) -> Literal["same", "changed", "unknown"]:
    """Compare the code of a function with the identity that it had.

    A function in a module of the same source is not imported: that module may load much, or need packages that only
    another machine has.

    Returns:
        "unknown": the function cannot be found or identified here; or one of the identities belongs to another version
        of Python, or to the file that started a notebook.
    """
    if _source_hash(name.partition(":")[0]) == before:
        return "same"
    try:
        found = compare(before, identify_function(name, where))
    except ConfigError:
        return "unknown"
    return found if found in ("same", "changed") else "unknown"


def _source_hash(module: str) -> str | None:
    """Return the SHA-256 of the file from which Python would import a module; None if that cannot be told by paths."""
    stem = "/".join(module.split("."))
    folders = [Path(folder) for folder in (*sys.path, ".")]
    files = (folder / name for folder in folders for name in (f"{stem}/__init__.py", f"{stem}.py"))
    source = next((file for file in files if file.is_file()), None)
    return None if source is None else sha256_file(source)


def _missing(module: str, attribute: str, where: str, kind: str) -> ConfigError:
    """Return the error for an attribute that a module does not have."""
    if module == "__main__":
        return ConfigError(
            f"the {kind} __main__:{attribute} exists only in the script or notebook that defines it, and this is"
            " another process",
            where=where,
            fix=f"run that script or notebook again; or move the {kind} into a module of its own, and name it"
            f" package.module:{attribute}",
        )
    return ConfigError(f"the module {module} has no {kind} {attribute}", where=where, fix=f"check the {kind}'s name")


def name_of_function(function: Callable[..., Any], where: str) -> str:
    """Return the `package.module:function` under which `load_function` finds a function.

    Raises:
        ConfigError: it is no function of a module, as a lambda; or another one has taken its name.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)) or "<" in name:
        raise ConfigError(
            f"{name or type(function).__name__} is no function of a module, so a resumed run could not find it",
            where=where,
            fix="define it with `def` at the top of a module",
        )
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise ConfigError(
            f"the name {module}:{name} leads to {'nothing' if found is None else 'something else'}, so a resumed run"
            " could not find this function",
            where=where,
            fix="give the function a name of its own, at the top of a module",
        )
    return f"{module}:{name}"


def find_target(table: Mapping[str, str], name: str, problem: str) -> Any:
    """Return what `--on` names: an entry of a table, or one of your own as `package.module:NAME`.

    Args:
        table: Each name, and where what it stands for is.
        name: The name.
        problem: What to report if there is none of that name.

    Raises:
        ConfigError: there is none of that name.
    """
    module, colon, attribute = table.get(name, name).partition(":")
    try:
        if not colon:
            raise ImportError
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{problem}{f': {error}' if str(error) else ''}",
            where="--on",
            fix=f"--on {' | '.join(table)}, or package.module:NAME",
        ) from None
