"""Writes on a mounted file system, where a name exists only with its whole content."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


def create_file(path: Path, content: bytes) -> None:
    """Create a file atomically: a hard link to a complete temporary file, which fails if the name exists."""
    temporary = _write_temporary(path, content)
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, in place of an existing one."""
    _write_temporary(path, content).replace(path)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, in place of an existing one."""
    temporary = _write_temporary(target, b"")
    try:
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_temporary(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return temporary
