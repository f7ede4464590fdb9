"""Hashes of files, and of JSON values in their canonical form."""

from __future__ import annotations

import hashlib
import json
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from headway.core.files.foreign import open_regular


def sha256_bytes(data: bytes | memoryview) -> str:
    """Return the SHA-256 of a buffer in hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path, most: int | None = None) -> str:
    """Return the SHA-256 of a file in hex, read in blocks; `most` limits its size in bytes."""
    with open_regular(path, most=most) as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()


def canonical_json(value: Any) -> bytes:
    """Encode a JSON value in its canonical form, for fingerprints: sorted keys, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # A file name may not be valid UTF-8; the invalid bytes are written as JSON escapes.
    return text.encode("utf-8", "backslashreplace")


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of a JSON value's canonical form in hex."""
    return sha256_bytes(canonical_json(value))
