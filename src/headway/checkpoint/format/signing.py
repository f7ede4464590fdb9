"""Signed manifests: proof that the owner of a key made a checkpoint, and that nothing in it has changed.

A manifest holds the hash of every file and tensor, so its signature covers the whole checkpoint. The signature is in
the context as `signature`, and covers the manifest without it. The key selects the algorithm: an Ed25519 key in PEM
(RFC 8032; verification needs only the public key), or any other text, which is a secret for HMAC-SHA256 (RFC 2104).

If a key is in the environment, all readers refuse manifests without a valid signature by it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from headway.core.credentials.keys import key_text
from headway.core.errors import ConfigError, needing

VARIABLE = "HEADWAY_SIGNING_KEY"
SIGNATURE = "signature"
#: Characters of the shortest secret accepted; shorter ones can be guessed. 32 random bytes in hexadecimal have 64.
_SHORTEST_SECRET = 16


class Key(Protocol):
    """A key that signs and verifies."""

    algorithm: str
    name: str
    """Identifies the key without revealing it."""

    def sign(self, data: bytes) -> bytes:
        """Return the signature of some bytes."""
        ...

    def verify(self, data: bytes, signature: bytes) -> bool:
        """Return whether a signature of some bytes was made with this key."""
        ...


class _Secret:
    algorithm = "hmac-sha256"

    def __init__(self, text: str) -> None:
        if len(text) < _SHORTEST_SECRET:
            raise ConfigError(
                f"the key has {len(text)} characters; it needs at least {_SHORTEST_SECRET}",
                where=VARIABLE,
                fix="for example the output of `openssl rand -hex 32`",
            )
        self._secret = text.encode()
        self.name = hashlib.sha256(b"headway key name" + self._secret).hexdigest()[:16]

    def sign(self, data: bytes) -> bytes:
        return hmac.digest(self._secret, data, "sha256")

    def verify(self, data: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(self.sign(data), signature)


class _Ed25519:
    algorithm = "ed25519"

    def __init__(self, text: str) -> None:
        with needing("cryptography", "crypto", "signing with Ed25519"):
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives import serialization
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
        self._private = self._public = None
        try:
            if "PRIVATE" in text:
                found: Any = serialization.load_pem_private_key(text.encode(), password=None)
                if isinstance(found, Ed25519PrivateKey):
                    self._private, self._public = found, found.public_key()
            else:
                found = serialization.load_pem_public_key(text.encode())
                if isinstance(found, Ed25519PublicKey):
                    self._public = found
        except (ValueError, TypeError, UnsupportedAlgorithm):
            pass
        if self._public is None:
            raise ConfigError(
                "the key is not an Ed25519 key in PEM without a password",
                where=VARIABLE,
                fix="openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out public.pem",
            )
        raw = self._public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.name = hashlib.sha256(raw).hexdigest()[:16]

    def sign(self, data: bytes) -> bytes:
        if self._private is None:
            raise ConfigError("a public key cannot sign", where=VARIABLE, fix="give the private key, or sign: false")
        return self._private.sign(data)

    def verify(self, data: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        assert self._public is not None
        try:
            self._public.verify(signature, data)
        except InvalidSignature:
            return False
        return True


def signing_key() -> Key | None:
    """Return the signing key from the environment; None if there is none.

    Raises:
        ConfigError: The key is not usable, or the package for it is missing.
    """
    text = key_text(VARIABLE)
    if text is None:
        return None
    return _Ed25519(text) if text.startswith("-----BEGIN ") else _Secret(text)


def key_to_sign_with() -> Key:
    """Return the signing key from the environment, which must be able to sign.

    Raises:
        ConfigError: There is no key, or it can only verify.
    """
    key = signing_key()
    if key is None:
        raise ConfigError(
            "checkpoints must be signed, but there is no key",
            where="checkpoint.sign",
            fix=f"set {VARIABLE}, or {VARIABLE}_FILE to the file that holds it",
        )
    key.sign(b"")
    return key


def sign(content: bytes, key: Key) -> dict[str, str]:
    """Return the signature of what a manifest says (`Manifest.content_to_sign`)."""
    return {"algorithm": key.algorithm, "key": key.name, "value": key.sign(content).hex()}


def signature_state(context: Mapping[str, Any]) -> str:
    """Return the state of a loaded manifest's signature, from its context: `none`, `valid`, or `not checked` without a
    key.

    There is no state for a wrong or required but missing signature: such a manifest is not loaded
    (`signature_problem`).
    """
    if context.get(SIGNATURE) is None:
        return "none"
    return "not checked" if signing_key() is None else "valid"


def signature_problem(found: Any, content: Callable[[], bytes]) -> str | None:
    """Return what is wrong with a manifest's signature, in words; None if it is valid, or there is no key.

    Args:
        found: The signature in its context.
        content: What it must be of (`Manifest.content_to_sign`).
    """
    key = signing_key()
    if key is None:
        return None
    if not isinstance(found, dict):
        return f"is not signed, and {VARIABLE} is set"
    if found.get("algorithm") != key.algorithm or found.get("key") != key.name:
        return f"is signed with another key ({found.get('algorithm')} {found.get('key')})"
    try:
        good = key.verify(content(), bytes.fromhex(str(found.get("value"))))
    except ValueError:
        good = False
    return None if good else "has a signature that does not belong to it"
