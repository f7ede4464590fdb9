"""Who acts on a registry, and its log of actions: the audit log of a registry that is a folder."""

from __future__ import annotations

import getpass
import os
from typing import Any

from headway.core.machine.system import host_name
from headway.models.versions import Registry


def who() -> str:
    """Return the user and the machine, as records name them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{host_name()}"


def audit(registry: Registry, name: str, action: str, **facts: Any) -> None:
    """Add a line about what was done to a model to its audit log."""
