"""What specs of strategies and of optimizers have in common: how a config names them, and how they are found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from headway.config.base import FUNCTION_PATTERN
from headway.core.errors import ConfigError
from headway.core.functions import load_attribute


@dataclass(frozen=True)
class Package:
    """A package that Headway does not depend on."""

    module: str
    """Name to import."""
    title: str
    """Name in messages."""
    extra: str
    """The extra of Headway that has it; else what pip is to install."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a strategy and an optimizer declare alike."""

    name: str
    """Name in the config; a spec from outside is found under `package.module:NAME`, whatever name it gives itself."""
    build: str
    """`package.module:function` that makes it; imported when it is needed, since the config imports no torch."""
    needs: Package | None = None
    """A package that must be installed."""


_Spec = TypeVar("_Spec", bound=Spec)


@dataclass(frozen=True)
class Choices:
    """Marks a key that takes one of these names, for the reference."""

    names: tuple[str, ...]


def choices(names: Iterable[str]) -> tuple[Any, ...]:
    """Return the annotations of a key that takes one of these names, or `package.module:NAME`."""
    known = tuple(names)
    quoted = [f"'{name}'" for name in known]

    def check(value: Any) -> Any:
        if isinstance(value, str) and (value in known or re.match(FUNCTION_PATTERN, value)):
            return value
        wanted = f"Input should be {', '.join(quoted[:-1])} or {quoted[-1]}"
        raise PydanticCustomError("choice", "{wanted}", {"wanted": wanted, "names": known})

    branches = [{"type": "string", "enum": list(known)}, {"type": "string", "pattern": FUNCTION_PATTERN}]
    return BeforeValidator(check), Choices(known), WithJsonSchema({"anyOf": branches})


def resolve_spec(specs: Mapping[str, _Spec], name: str, where: str, kind: type[_Spec]) -> _Spec:
    """Return the spec that a config names: one of Headway's, or one that is imported.

    Args:
        specs: Headway's own, by name.
        name: The value of the key.
        where: The key.
        kind: The type of the spec.

    Raises:
        ConfigError: there is none of this name, or it cannot be imported.
    """
    if name in specs:
        return specs[name]
    if not re.match(FUNCTION_PATTERN, name):
        raise ConfigError(f"there is no '{name}'", where=where, fix=f"one of {', '.join(specs)}")
    _, found = load_attribute(name, where, kind.__name__)
    if not isinstance(found, kind):
        raise ConfigError(
            f"{name} is no {kind.__name__}, but a {type(found).__name__}",
            where=where,
            fix=f"name a headway.config.{kind.__name__}",
        )
    return replace(found, name=name)
