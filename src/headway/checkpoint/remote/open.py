"""Opening the place behind a URL where checkpoints lie, with the key that they may be sealed with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.checkpoint.format.sealing import encryption_key, key_to_encrypt_with
from headway.checkpoint.remote.objects import Objects
from headway.checkpoint.remote.sealed_objects import SealedObjects
from headway.core.errors import ConfigError


def place_of(settings: Mapping[str, Any], name: str, **options: Any) -> Objects:
    """The folder for all generations of a run, from the config's `checkpoint.remote`, whose own folder has to be there
    where it is one of a mounted file system."""
    url, encrypt = f"{settings['url']}/{name}", bool(settings.get("encrypt"))
    return open_place(url, settings.get("options"), encrypt, within=True, **options)


def open_place(
    url: str, storage: Mapping[str, Any] | None = None, encrypt: bool | None = None, **options: Any
) -> Objects:
    """The objects below a URL.

    Args:
        storage: What `fsspec` needs to reach it.
        encrypt: Whether checkpoints are sealed there; when not given, whether there is a key. With a key, what is
            sealed there can be read in any case.
        options: For `Objects`.

    Raises:
        ConfigError: the URL cannot be used, or there is no key to encrypt with.
    """
    key = key_to_encrypt_with("checkpoint.remote.encrypt") if encrypt else _key_to_read_with(encrypt)
    if key is None:
        return Objects(url, storage, **options)
    sealed = SealedObjects(url, storage, **options)
    sealed.key, sealed.seals = key, encrypt is not False
    return sealed


def _key_to_read_with(encrypt: bool | None) -> bytes | None:
    """The key of the environment. What is wrong with it does not matter where nothing is to be encrypted; of a
    checkpoint that cannot be read without it, that is told."""
    try:
        return encryption_key()
    except ConfigError:
        if encrypt is None:
            raise
        return None
