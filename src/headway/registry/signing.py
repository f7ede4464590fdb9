"""Signatures of OpenSSF's model-signing with a key of an elliptic curve (extra `sign`).

A signature is a file of the version, `model.sig`: a bundle of Sigstore that the program `model_signing` verifies too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError, in_one_line, missing_extra
from headway.core.files.paths import link_or_copy
from headway.core.files.scratch import scratch_folder
from headway.models.versions.records import SIGNATURE

_MAKE_KEY = (
    "openssl ecparam -name prime256v1 -genkey -noout -out key.pem; openssl ec -in key.pem -pubout -out public.pem"
)


@contextmanager
def signed(files: Mapping[str, Path], key: Path) -> Iterator[dict[str, Path]]:
    """Sign files, and yield them with their signature, which lives as long as the block.

    Args:
        files: Files by name.
        key: Private key in PEM, without a password.

    Raises:
        ConfigError: The key cannot sign, or the package is missing.
    """
    library = _library()
    check_key(key, "--sign")
    with scratch_folder("headway-signing-") as scratch:
        folder = scratch / "model"
        folder.mkdir()
        for name, path in files.items():
            link_or_copy(path.resolve(), folder / name)
        signature = scratch / SIGNATURE
        try:
            library.signing.Config().use_elliptic_key_signer(private_key=key).sign(folder, signature)
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(f"the key cannot sign: {error}", where=str(key), fix=_MAKE_KEY) from error
        yield {**files, SIGNATURE: signature}


def signature_problem(folder: Path, key: Path) -> str | None:
    """Return what is wrong with the signature of a version's folder, in words; None if this key has made it.

    Args:
        folder: The folder of a version, with its signature.
        key: Public key in PEM.

    Raises:
        ConfigError: The key is none, or the package is missing.
    """
    library = _library()
    check_key(key, "--key")
    signature = folder / SIGNATURE
    if not signature.is_file():
        return "is not signed"
    try:
        verifier = library.verifying.Config().use_elliptic_key_verifier(public_key=key)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the key cannot verify: {error}", where=str(key), fix=_MAKE_KEY) from error
    hashing = library.hashing.Config().set_ignored_paths(paths=[signature], ignore_git_paths=False)
    try:
        verifier.set_hashing_config(hashing).verify(folder, signature)
    except Exception as error:  # a foreign bundle raises whatever its parser raises
        return f"has a signature that this key has not made of these files: {in_one_line(error, 200)}"
    return None


def check_key(key: Path, option: str) -> None:
    """Check that the file of a key is there.

    Raises:
        ConfigError: It is not.
    """
    if not key.is_file():
        raise ConfigError("there is no such key", where=f"{option} {key}", fix=_MAKE_KEY)


def _library() -> Any:
    try:
        import model_signing
        import model_signing.hashing
        import model_signing.signing
        import model_signing.verifying
    except ImportError as error:
        package = "pyopenssl" if error.name == "OpenSSL" else "model-signing"
        raise missing_extra(package, "sign", "signing a model") from None
    return model_signing
