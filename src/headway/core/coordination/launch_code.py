"""The exit code that the lead of a run on several machines leaves for what has launched it.

A launcher sees one code of all machines, such as the highest one (`srun`). The lead's is the run's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.core.console import warning
from headway.core.coordination.launch_variables import CODE_FILE
from headway.core.coordination.launched import machine_number
from headway.core.errors import exit_code_of
from headway.core.files.atomic import atomic_write
from headway.core.files.foreign import read_bytes

#: Longer files are none that `leaving_code` has written.
_MOST_BYTES = 16


@contextmanager
def leaving_code() -> Iterator[None]:
    """Leave the exit code of the command in a block for the launcher, if it asks for that and this machine leads."""
    path = os.environ.get(CODE_FILE)
    found = machine_number(os.environ)
    leads = path is not None and found is not None and found[0] == "0"
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if path is not None and leads:
            _leave(Path(path), exit_code_of(error))


def _leave(path: Path, code: int) -> None:
    try:
        with atomic_write(path, "w") as file:
            file.write(f"{code}\n")
    except OSError as error:
        warning(f"the exit code {code} cannot be left for the launcher: {error}")


def left_code() -> int | None:
    """Return the exit code that the lead of this launch has left; None while there is none."""
    path = os.environ.get(CODE_FILE)
    try:
        text = read_bytes(Path(path), _MOST_BYTES).strip() if path is not None else b""
    except (OSError, ValueError):
        return None
    return int(text) if text.isdigit() and int(text) < 256 else None
