"""Secret keys: from the environment, or from a file that it names; never from a config."""

from __future__ import annotations

import os
from pathlib import Path

from headway.core.errors import ConfigError
from headway.core.foreign import read_given_bytes

#: Keys are much shorter.
_MOST_BYTES = 64 * 1024


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
            text = read_given_bytes(Path(path), _MOST_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(f"the key cannot be read: {reason}", where=where, fix="name a readable file") from None
    if text is None:
        return None
    if not text.strip():
        raise ConfigError("the key is empty", where=where, fix="give one, or unset the variable")
    return text.strip()
