"""Secret keys: from the environment, or from a file that it names; never from a config."""

from __future__ import annotations

import os
from pathlib import Path

from headway.core.errors import ConfigError


def key_text(variable: str) -> str | None:
    """The content of an environment variable, or of the file that `<variable>_FILE` names; None when neither is set.

    Raises:
        ConfigError: the file cannot be read, or what is there is empty.
    """
    text, where = os.environ.get(variable), variable
    path = os.environ.get(f"{variable}_FILE")
    if text is None and path is not None:
        where = f"{variable}_FILE={path}"
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the key cannot be read: {error}", where=where, fix="name a readable file") from None
    if text is None:
        return None
    if not text.strip():
        raise ConfigError("the key is empty", where=where, fix="give one, or unset the variable")
    return text.strip()
