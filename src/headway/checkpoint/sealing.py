"""Encryption of what leaves the machine: AES-256-GCM in chunks, so that files of any size take little memory.

    "HWSEAL1\\n" | salt, 32 bytes | chunks: 1 MiB of content encrypted, and its tag of 16 bytes

Every file has a key of its own, derived from the given one and the salt (HKDF-SHA256, RFC 5869). Chunks are numbered in
their nonces, the last one is marked (the STREAM construction, Hoang, Reyhanitabar, Rogaway and Vizar 2015, section 7),
and the file's name is authenticated with each: chunks can be neither left out nor moved, and files not exchanged.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
from pathlib import Path
from typing import IO, Any

from headway.core.errors import CheckpointError, ConfigError, missing_extra
from headway.core.keys import key_text

VARIABLE = "HEADWAY_ENCRYPTION_KEY"
CHUNK_BYTES = 2**20
_MAGIC, _SALT_BYTES, _TAG_BYTES, _KEY_BYTES = b"HWSEAL1\n", 32, 16, 32
_HEAD_BYTES = len(_MAGIC) + _SALT_BYTES


def encryption_key() -> bytes | None:
    """The key of the environment, 32 bytes; None when there is none.

    Raises:
        ConfigError: it has another length, or is neither hexadecimal nor Base64.
    """
    text = key_text(VARIABLE)
    if text is None:
        return None
    try:
        key = bytes.fromhex(text) if len(text) == 2 * _KEY_BYTES else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(
            f"the key must be {_KEY_BYTES} bytes in hexadecimal or Base64",
            where=VARIABLE,
            fix="for example the output of `openssl rand -hex 32`",
        )
    return key


def sealed_size(size: int) -> int:
    """Bytes that `size` bytes become; a file without content has one chunk too."""
    chunks = max(1, -(-size // CHUNK_BYTES))
    return _HEAD_BYTES + size + chunks * _TAG_BYTES


def content_size(sealed: int) -> int | None:
    """Bytes that are inside so many sealed ones; None when that cannot be."""
    rest = sealed - _HEAD_BYTES
    chunks = max(1, -(-rest // (CHUNK_BYTES + _TAG_BYTES)))
    size = rest - chunks * _TAG_BYTES
    return size if size >= 0 and sealed_size(size) == sealed else None


def seal(source: IO[bytes], target: IO[bytes], key: bytes, name: str) -> None:
    """Encrypt a stream.

    Args:
        name: The file's, without folders; to be given again when it is opened.
    """
    salt = os.urandom(_SALT_BYTES)
    target.write(_MAGIC + salt)
    cipher, number = _cipher(key, salt), 0
    chunk = source.read(CHUNK_BYTES)
    while True:
        following = source.read(CHUNK_BYTES)
        target.write(cipher.encrypt(_nonce(number, last=not following), chunk, name.encode()))
        if not following:
            return
        chunk, number = following, number + 1


def unseal(source: IO[bytes], target: IO[bytes], key: bytes, name: str) -> None:
    """Decrypt a stream; what is written is to be thrown away when this fails.

    Raises:
        CheckpointError: the key is another one, or what is there was changed, cut short or exchanged.
    """
    from cryptography.exceptions import InvalidTag

    wrong = CheckpointError(
        f"{name} cannot be decrypted: it was changed, or sealed with another key",
        where=name,
        fix=f"check {VARIABLE}, or use another checkpoint",
    )
    head = source.read(_HEAD_BYTES)
    if len(head) != _HEAD_BYTES or not head.startswith(_MAGIC):
        raise wrong
    cipher, number = _cipher(key, head[len(_MAGIC) :]), 0
    chunk = source.read(CHUNK_BYTES + _TAG_BYTES)
    while True:
        following = source.read(CHUNK_BYTES + _TAG_BYTES)
        try:
            target.write(cipher.decrypt(_nonce(number, last=not following), chunk, name.encode()))
        except InvalidTag:
            raise wrong from None
        if not following:
            return
        chunk, number = following, number + 1


def seal_bytes(content: bytes, key: bytes, name: str) -> bytes:
    """The same for something small."""
    target = io.BytesIO()
    seal(io.BytesIO(content), target, key, name)
    return target.getvalue()


def unseal_bytes(content: bytes, key: bytes, name: str) -> bytes:
    """The same for something small."""
    target = io.BytesIO()
    unseal(io.BytesIO(content), target, key, name)
    return target.getvalue()


def unseal_file(source: Path, target: Path, key: bytes, name: str) -> None:
    """Decrypt a file, and flush it to disk."""
    with source.open("rb") as sealed, target.open("wb") as file:
        unseal(sealed, file, key, name)
        file.flush()
        os.fsync(file.fileno())


def _nonce(number: int, last: bool) -> bytes:
    # No random part is needed: the key belongs to this one file.
    return bytes(7) + number.to_bytes(4, "big") + bytes([last])


def _cipher(key: bytes, salt: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        raise missing_extra("cryptography", "crypto", "encryption of remote checkpoints") from None
    derived = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=salt, info=b"headway checkpoint file").derive(key)
    return AESGCM(derived)
