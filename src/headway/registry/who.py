"""Who acts on a registry, and what was done: in every record, and in the audit log of a registry on this machine."""

from __future__ import annotations

from typing import Any

from headway.core.audit import AUDIT_FILE, AuditLog, check_log, user_name
from headway.core.machine.system import host_name
from headway.models.versions import Registry
from headway.run.directory.audit import record


def who() -> str:
    """Return the user and the machine, as records name them."""
    return f"{user_name()}@{host_name()}"


def audit(registry: Registry, name: str, action: str, **facts: Any) -> None:
    """Add a line to the audit log of a model, `headway audit show REGISTRY/NAME`; an object store has its records only.

    Args:
        registry: The registry.
        name: Of the model.
        action: What was done.
        facts: More about it; credentials are redacted.
    """
    if registry.objects.local:
        record(registry.folder(name), action, **facts)


def audit_problems(registry: Registry, name: str) -> tuple[str, ...]:
    """Return what was changed in the audit log of a model."""
    if not registry.objects.local:
        return ()
    try:
        return check_log(AuditLog(registry.folder(name, AUDIT_FILE)).lines()).problems
    except OSError as error:
        return (f"cannot be read: {error.strerror or error}",)
