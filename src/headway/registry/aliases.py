"""Changes of aliases: each follows the one before it, by a compare-and-set on the next number of its history."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from headway.core.errors import ConfigError, HeadwayError
from headway.core.process.faults import fault_point
from headway.models.versions import AliasChange, ModelVersion, Registry
from headway.models.versions.records import is_alias
from headway.registry.gate import Check
from headway.registry.who import who


def check_alias(alias: str) -> None:
    """Check that a text may name an alias.

    Raises:
        ConfigError: It may not.
    """
    if not is_alias(alias):
        raise ConfigError(f"'{alias}' is no alias: it begins with a letter", where="ALIAS", fix="prod, candidate, ...")


def put_change(registry: Registry, change: AliasChange) -> None:
    """Make the change of an alias that was decided knowing the one before it (`next_change`).

    Raises:
        ConfigError: Another writer was faster, so the decision may no longer hold.
    """
    registry.check_conditional_put(change.name)
    fault_point("registry.alias")
    if registry.put_change(change):
        return
    other = registry.present(change.name, change.alias)
    by = "another writer" if other is None else f"{other.by}, to version {other.number}"
    raise ConfigError(
        f"{change.name}@{change.alias} was changed meanwhile, by {by}",
        where=registry.url,
        fix="run the same command again, which compares with the version that it names now",
    )


def next_change(
    before: AliasChange | None,
    name: str,
    alias: str,
    version: ModelVersion | None,
    *,
    checks: Mapping[str, Any] | None = None,
    forced: str | None = None,
) -> AliasChange:
    """Return the change that follows another one.

    Args:
        before: The change that holds now; None if there is none.
        name: Of the model.
        alias: The alias.
        version: What it names from now on; None removes it.
        checks: What was checked.
        forced: Why it is set although a check failed.
    """
    number = None if version is None else version.number
    sha256 = None if version is None else version.sha256
    change = 1 if before is None else before.change + 1
    previous = None if before is None else before.sha256
    return AliasChange(name, alias, change, number, sha256, time.time(), who(), dict(checks or {}), forced, previous)


def refusal(name: str, alias: str, checks: list[Check]) -> HeadwayError:
    """Return the error for a version that does not pass the gate."""
    failed = "; ".join(f"{check.name}: {check.what}" for check in checks if not check.passed)
    return ConfigError(
        f"{name} does not become {alias}: {failed}",
        where="the gate of an alias",
        fix=f"correct what it names; or headway registry alias {name} {alias} --force REASON, which is recorded",
    )
