"""Secret keys: read from the environment, or from a file that it names; never from a config."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from headway.core.credentials.secrets import remember
from headway.core.errors import ConfigError
from headway.core.files.foreign import read_given_bytes

#: Largest file that is read; keys are much shorter.
_MOST_BYTES = 64 * 1024


def key_text(variable: str) -> str | None:
    """Read a key from an environment variable, or from the file that `<variable>_FILE` names.

    A file of this user that others may access is refused, as ssh does (ssh(1), FILES). A public key is no secret, so
    its file may have any permissions.

    Returns:
        None when neither variable is set.

    Raises:
        ConfigError: the file cannot be read or others may access it, or the key is empty.
    """
    text = os.environ.get(variable)
    where = variable
    path = os.environ.get(f"{variable}_FILE")
    if text is None and path is not None:
        where = f"{variable}_FILE={path}"
        try:
            text = read_given_bytes(Path(path), _MOST_BYTES).decode("utf-8")
            found = Path(path).stat()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(f"the key cannot be read: {reason}", where=where, fix="name a readable file") from None
        others = stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
        if others and found.st_uid == os.geteuid() and "PUBLIC KEY-----" not in text:
            raise ConfigError(
                f"permissions {stat.S_IMODE(found.st_mode):04o} of the key's file let others use it",
                where=where,
                fix=f"chmod 600 {shlex.quote(path)}; where it cannot be changed, give the key itself in {variable}",
            )
    if text is None:
        return None
    if not text.strip():
        raise ConfigError("the key is empty", where=where, fix="give one, or unset the variable")
    if "PUBLIC KEY-----" not in text:
        remember(text.strip(), variable)
    return text.strip()
