"""Signatures of OpenSSF's model-signing: made, verified, and found wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.models.versions import local_folder, open_registry, resolve
from headway.registry.files import files_to_register
from headway.registry.publish import register
from headway.registry.signing import signature_problem, signed
from headway.registry.sources import Gathered
from support.registry import registry_with, write_model

try:
    import model_signing
except ImportError:
    pytest.skip("there is no model-signing with pyopenssl: pip install '.[sign]'", allow_module_level=True)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key."""
    return _keys(tmp_path / "keys")


def _keys(folder: Path) -> tuple[Path, Path]:
    from cryptography.hazmat.primitives import serialization as coding
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / "key.pem", folder / "public.pem"
    private.write_bytes(key.private_bytes(coding.Encoding.PEM, coding.PrivateFormat.PKCS8, coding.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(coding.Encoding.PEM, coding.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def _signed_version(tmp_path: Path, key: Path) -> Path:
    folder = write_model(tmp_path / "model")
    (folder / "notes.txt").write_text("not registered", encoding="utf-8")
    registry = open_registry(tmp_path / "registry")
    files, _ = files_to_register(folder)
    with signed(files, key) as all_files:
        version, _ = register(registry, "model", Gathered(folder, {"kind": "folder"}), all_files)
    assert version.is_signed
    return local_folder(resolve("model@1", registry))


def test_a_signed_version_verifies_with_its_key_only(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    folder = _signed_version(tmp_path, keys[0])
    assert signature_problem(folder, keys[1]) is None
    problem = signature_problem(folder, _keys(tmp_path / "other")[1])
    assert problem and "this key has not made" in problem


def test_the_program_of_openssf_verifies_it_too(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    folder = _signed_version(tmp_path, keys[0])
    words = ["verify", "key", str(folder), "--signature", str(folder / "model.sig"), "--public_key", str(keys[1])]
    done = subprocess.run([sys.executable, "-m", model_signing.__name__, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("damage", ["file", "signature", "more", "no signature"])
def test_what_was_changed_after_signing_is_found(tmp_path: Path, keys: tuple[Path, Path], damage: str) -> None:
    folder = _signed_version(tmp_path, keys[0])
    if damage == "file":
        (folder / "config.json").write_text("{}", encoding="utf-8")
    elif damage == "signature":
        (folder / "model.sig").write_text('{"mediaType": "x"}', encoding="utf-8")
    elif damage == "more":
        (folder / "vocab.json").write_text("{}", encoding="utf-8")
    else:
        (folder / "model.sig").unlink()
    assert signature_problem(folder, keys[1])


def test_a_version_without_a_signature_is_found(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    folder = local_folder(resolve("model@1", registry_with(tmp_path)))
    assert signature_problem(folder, keys[1]) == "is not signed"


def test_a_file_that_is_no_key_is_refused(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    files, _ = files_to_register(write_model(tmp_path / "model"))
    for key in (tmp_path / "none.pem", tmp_path / "model/config.json", keys[1]):
        with pytest.raises(ConfigError) as caught, signed(files, key):
            pass
        assert caught.value.fix and "openssl" in caught.value.fix
