"""Opening of a checkpoint location by its URL, with the key that its objects may be sealed with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.checkpoint.format.sealing import encryption_key, key_to_encrypt_with
from headway.checkpoint.remote.objects import Objects
from headway.checkpoint.remote.sealed_objects import SealedObjects
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.config import RemoteConfig


def place_settings(remote: RemoteConfig) -> dict[str, Any]:
    """Return the part of `checkpoint.remote` that `place_of` needs, as JSON values."""
    return remote.model_dump(mode="json", include={"url", "options", "encrypt"})


def place_of(settings: Mapping[str, Any], name: str, **options: Any) -> Objects:
    """Open the folder of all generations of a run, by the config's `checkpoint.remote`.

    On a mounted file system, the folder of that URL must exist already.
    """
    url = f"{settings['url']}/{name}"
    encrypt = bool(settings.get("encrypt"))
    return open_place(url, settings.get("options"), encrypt, within=True, **options)


def open_place(
    url: str, storage: Mapping[str, Any] | None = None, encrypt: bool | None = None, **options: Any
) -> Objects:
    """Open the objects below a URL.

    Args:
        url: The folder, with a scheme.
        storage: Options for `fsspec`.
        encrypt: Whether new checkpoint objects are sealed; if None, they are if there is a key. With a key, sealed
            objects can be read in any case.
        options: Options for `Objects`.

    Raises:
        ConfigError: The URL cannot be used, or there is no key to encrypt with.
    """
    key = key_to_encrypt_with("checkpoint.remote.encrypt") if encrypt else _key_to_read_with(encrypt)
    if key is None:
        return Objects(url, storage, **options)
    sealed = SealedObjects(url, storage, **options)
    sealed.key = key
    sealed.seals = encrypt is not False
    return sealed


def _key_to_read_with(encrypt: bool | None) -> bytes | None:
    """Return the key from the environment; None if it is unusable and nothing is to be encrypted.

    The error is reported later, for a checkpoint that cannot be read without the key.
    """
    try:
        return encryption_key()
    except ConfigError:
        if encrypt is None:
            raise
        return None
