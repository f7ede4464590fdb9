"""Encryption of checkpoints at rest: AES-256-GCM in chunks, so that files of any size need little memory.

    "HWSEAL1\\n" | salt, 32 bytes | chunks: 1 MiB of content encrypted, and its tag of 16 bytes

Every file has a key of its own, derived from the given key and the salt (HKDF-SHA256, RFC 5869). Nonces number the
chunks and mark the last one (the STREAM construction; Hoang, Reyhanitabar, Rogaway and Vizar 2015, section 7). The
file's name is authenticated with each chunk. So chunks can be neither dropped nor moved, and files cannot be swapped.
Any part of a file can be read by itself.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
from pathlib import Path
from typing import Any, Protocol

from headway.core.credentials.keys import key_text
from headway.core.errors import CheckpointError, ConfigError, needing
from headway.core.files.foreign import open_regular

VARIABLE = "HEADWAY_ENCRYPTION_KEY"
#: Suffix of a sealed file's name; the name is authenticated without it.
SEALED = ".sealed"
CHUNK_BYTES = 2**20
_MAGIC = b"HWSEAL1\n"
_SALT_BYTES = 32
_TAG_BYTES = 16
_KEY_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + _SALT_BYTES


class Undecipherable(CheckpointError):
    """Sealed content was changed, or sealed with another key; only a hash can tell which."""


class Readable(Protocol):
    """A stream to read from."""

    def read(self, count: int, /) -> bytes:
        """Return the next `count` bytes; fewer only at the end."""
        ...


class Writable(Protocol):
    """A stream to write to."""

    def write(self, content: bytes, /) -> object:
        """Write all of the content."""
        ...


def encryption_key() -> bytes | None:
    """Return the encryption key from the environment, 32 bytes; None if there is none.

    Raises:
        ConfigError: The key has another length, or is neither hexadecimal nor Base64.
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


def key_to_encrypt_with(where: str) -> bytes:
    """Return the encryption key from the environment, which must be usable here.

    Args:
        where: The config field that asks for encryption, for the error message.

    Raises:
        ConfigError: There is no key, it is not usable, or the package for it is missing.
    """
    key = encryption_key()
    if key is None:
        raise ConfigError(
            "checkpoints must be encrypted, but there is no key",
            where=where,
            fix=f"set {VARIABLE}, or {VARIABLE}_FILE to the file that holds it",
        )
    _cipher(key, bytes(_SALT_BYTES))
    return key


def sealed_size(size: int) -> int:
    """Return the size of a sealed file with `size` bytes of content; even an empty file has one chunk."""
    chunks = max(1, -(-size // CHUNK_BYTES))
    return _HEAD_BYTES + size + chunks * _TAG_BYTES


def content_size(sealed: int) -> int | None:
    """Return the size of the content of a sealed file; None if no content has that sealed size."""
    rest = sealed - _HEAD_BYTES
    chunks = max(1, -(-rest // (CHUNK_BYTES + _TAG_BYTES)))
    size = rest - chunks * _TAG_BYTES
    return size if size >= 0 and sealed_size(size) == sealed else None


def seal(source: Readable, target: Writable, key: bytes, name: str) -> None:
    """Encrypt a stream.

    Args:
        source: Stream of the content.
        target: Stream for the sealed content.
        key: The encryption key.
        name: Name of the file, without folders; needed again to open it.
    """
    salt = os.urandom(_SALT_BYTES)
    target.write(_MAGIC + salt)
    cipher = _cipher(key, salt)
    number = 0
    chunk = source.read(CHUNK_BYTES)
    while True:
        following = source.read(CHUNK_BYTES)
        target.write(cipher.encrypt(_nonce(number, last=not following), chunk, name.encode()))
        if not following:
            return
        chunk = following
        number = number + 1


def unseal(source: Readable, target: Writable, key: bytes, name: str) -> None:
    """Decrypt a stream; if this fails, the caller must discard what was written.

    Raises:
        CheckpointError: The key is wrong, or the content was changed, cut short or swapped.
    """
    opener = _Opener(source.read(_HEAD_BYTES), key, name)
    number = 0
    chunk = source.read(CHUNK_BYTES + _TAG_BYTES)
    while True:
        following = source.read(CHUNK_BYTES + _TAG_BYTES)
        target.write(opener.open(chunk, number, last=not following))
        if not following:
            return
        chunk = following
        number = number + 1


def seal_bytes(content: bytes, key: bytes, name: str) -> bytes:
    """Encrypt small content in memory; see `seal`."""
    target = io.BytesIO()
    seal(io.BytesIO(content), target, key, name)
    return target.getvalue()


def unseal_bytes(content: bytes, key: bytes, name: str) -> bytes:
    """Decrypt small content in memory; see `unseal`."""
    target = io.BytesIO()
    unseal(io.BytesIO(content), target, key, name)
    return target.getvalue()


def unseal_file(source: Path, target: Path, key: bytes, name: str) -> None:
    """Decrypt a file, and flush it to disk."""
    with open_regular(source) as sealed, target.open("wb") as file:
        unseal(sealed, file, key, name)
        file.flush()
        os.fsync(file.fileno())


class SealedFile:
    """The content of a sealed file, with random access: only the requested chunks are read and decrypted.

    Threads may share it.

    Raises:
        CheckpointError: As for `unseal`; `read` raises it too.
        ConfigError: There is no key.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        key = encryption_key()
        if key is None:
            raise ConfigError("it is encrypted, and there is no key", where=str(path), fix=f"set {VARIABLE}")
        self._path = path
        with open_regular(path) as file:
            self._opener = _Opener(file.read(_HEAD_BYTES), key, path.name.removesuffix(SEALED))
            size = content_size(os.fstat(file.fileno()).st_size)
        if size is None:
            raise self._opener.wrong
        self.size = size
        """Size of the content in bytes."""

    def read(self, begin: int, end: int) -> bytearray:
        """Return the content from byte `begin` to byte `end`, exclusive."""
        if not 0 <= begin <= end <= self.size:
            raise self._opener.wrong
        content = bytearray(end - begin)
        last = max(0, -(-self.size // CHUNK_BYTES) - 1)
        with open_regular(self._path) as file:
            numbers = range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES))
            file.seek(_HEAD_BYTES + numbers.start * (CHUNK_BYTES + _TAG_BYTES))
            for number in numbers:
                start = number * CHUNK_BYTES
                opened = memoryview(self._opener.open(file.read(CHUNK_BYTES + _TAG_BYTES), number, number == last))
                first = max(begin, start)
                behind = min(end, start + CHUNK_BYTES)
                content[first - begin : behind - begin] = opened[first - start : behind - start]
        return content


class _Opener:
    """The decryption of one file, chunk by chunk."""

    def __init__(self, head: bytes, key: bytes, name: str) -> None:
        self._name = name
        if len(head) != _HEAD_BYTES or not head.startswith(_MAGIC):
            raise self.wrong
        self._cipher = _cipher(key, head[len(_MAGIC) :])

    @property
    def wrong(self) -> Undecipherable:
        """The error for content that is not as it was sealed."""
        return Undecipherable(
            f"{self._name} cannot be decrypted: it was changed, or sealed with another key",
            where=self._name,
            fix=f"check {VARIABLE}, or use another checkpoint",
        )

    def open(self, chunk: bytes, number: int, last: bool) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            opened: bytes = self._cipher.decrypt(_nonce(number, last), chunk, self._name.encode())
        except InvalidTag:
            raise self.wrong from None
        return opened


def _nonce(number: int, last: bool) -> bytes:
    # A random part is not needed, since each file has its own key.
    return bytes(7) + number.to_bytes(4, "big") + bytes([last])


def _cipher(key: bytes, salt: bytes) -> Any:
    with needing("cryptography", "crypto", "encryption of checkpoints"):
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    derived = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=salt, info=b"headway checkpoint file").derive(key)
    return AESGCM(derived)
