"""Records of a registry, references, and folders whose every byte is verified."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from headway.core.errors import CheckpointError, ConfigError
from headway.models.versions import (
    ModelVersion,
    Reference,
    VersionFile,
    is_reference,
    local_folder,
    open_registry,
    resolve,
)
from headway.models.versions.records import BrokenRecord, files_fingerprint
from headway.models.versions.registry import VARIABLE
from headway.registry.aliases import next_change, put_change
from support.registry import registry_with


def _version(**changes: object) -> ModelVersion:
    plain = ModelVersion("model", 3, 1.5, "me@here", {"config.json": VersionFile(2, "a" * 64)}, {"kind": "folder"})
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_a_manifest_is_read_as_it_was_written() -> None:
    version = _version(evidence={"metrics": {"train/loss": 0.1}}, parent="model@2", licence="mit", previous="b" * 64)
    assert ModelVersion.parse(version.render()) == version


def test_the_hash_of_a_manifest_is_of_its_canonical_json() -> None:
    """Computed here by hand, so that other programs can check it."""
    plain = json.loads(_version().render())
    said = plain.pop("sha256")
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert said == hashlib.sha256(text.encode()).hexdigest() == _version().sha256


def test_a_flipped_bit_in_a_manifest_is_found() -> None:
    """Anywhere, but in the spaces between values, which mean nothing."""
    content = _version().render()
    plain = json.loads(content)
    for place in range(len(content)):
        changed = bytes([*content[:place], content[place] ^ 1, *content[place + 1 :]])
        try:
            same = ModelVersion.parse(changed) == _version()
        except BrokenRecord:
            continue
        assert same and json.loads(changed) == plain


@pytest.mark.parametrize(
    "files",
    [
        {"../config.json": {"bytes": 1, "sha256": "a" * 64}},
        {"/etc/passwd": {"bytes": 1, "sha256": "a" * 64}},
        {".hidden": {"bytes": 1, "sha256": "a" * 64}},
        {"a/b": {"bytes": 1, "sha256": "a" * 64}},
        {"config.json": {"bytes": -1, "sha256": "a" * 64}},
        {"config.json": {"bytes": 1, "sha256": "A" * 64}},
        {"config.json": []},
        {f"file-{number}": {"bytes": 1, "sha256": "a" * 64} for number in range(10_001)},
        ["config.json"],
    ],
)
def test_a_manifest_cannot_name_files_elsewhere(files: object) -> None:
    from headway.core.files.hashes import fingerprint

    plain = json.loads(_version().render())
    del plain["sha256"]
    plain["files"] = files
    with pytest.raises(BrokenRecord):
        ModelVersion.parse(json.dumps({**plain, "sha256": fingerprint(plain)}).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 200, b"\xff", b'{"a":1,"a":2}', b"NaN", b'{"sha256": "x"}'])
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(BrokenRecord):
        ModelVersion.parse(content)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("m", Reference("m")),
        ("m@3", Reference("m", number=3)),
        ("my-model.v2@prod", Reference("my-model.v2", alias="prod")),
    ],
)
def test_references(text: str, wanted: Reference) -> None:
    assert Reference.parse(text) == wanted
    assert str(wanted) == text


@pytest.mark.parametrize("text", ["", "@", "m@", "m@0", "m@-1", "../m@1", "a/b@1", "m@../x", "m@1@2", "m@٣", ".m@1"])
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no version"):
        Reference.parse(text)


def test_a_path_that_exists_is_no_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_reference("model@prod") and not is_reference("models/model@prod") and not is_reference("model")
    (tmp_path / "model@prod").mkdir()
    assert not is_reference("model@prod")


def test_a_reference_names_a_number_an_alias_or_the_newest(tmp_path: Path) -> None:
    registry = registry_with(tmp_path, versions=3)
    first = registry.required("model", 1)
    put_change(registry, next_change(None, "model", "prod", first))
    assert [resolve(text, registry).number for text in ("model@2", "model@prod", "model")] == [2, 1, 3]
    assert resolve("model@prod", registry).manifest_hash == first.sha256
    for text, what in (("model@4", "no version 4"), ("model@next", "no alias 'next'"), ("modle", "no version")):
        with pytest.raises(ConfigError, match=what):
            resolve(text, registry)


def test_the_registry_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry_with(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "registry"))
    assert resolve("model").number == 1
    monkeypatch.delenv(VARIABLE)
    monkeypatch.chdir(tmp_path)
    assert resolve("model@1").url == str(
        tmp_path / "registry" / "model" / "files" / resolve("model").version.fingerprint
    )


def test_an_alias_of_a_replaced_version_is_refused(tmp_path: Path) -> None:
    registry = registry_with(tmp_path, versions=2)
    put_change(registry, next_change(None, "model", "prod", registry.required("model", 2)))
    other = replace(registry.required("model", 2), by="somebody@else")
    (tmp_path / "registry/model/versions/00000002.json").write_bytes(other.render())
    with pytest.raises(CheckpointError, match="was replaced"):
        resolve("model@prod", registry)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "add", "link"])
def test_a_folder_is_given_out_only_as_it_was_registered(tmp_path: Path, damage: str) -> None:
    registry = registry_with(tmp_path)
    found = resolve("model@1", registry)
    folder = local_folder(found)
    assert files_fingerprint(found.version.files) == folder.name
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "cut":
        weights.write_bytes(content[:-1])
    elif damage == "remove":
        weights.unlink()
    elif damage == "add":
        (folder / "modeling.py").write_text("print('hello')", encoding="utf-8")
    else:
        weights.rename(tmp_path / "elsewhere")
        weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="model@1 is damaged"):
        local_folder(resolve("model@1", registry))


def test_what_a_killed_writer_left_hidden_harms_nobody(tmp_path: Path) -> None:
    registry = registry_with(tmp_path)
    folder = local_folder(resolve("model@1", registry))
    (folder / ".model.safetensors.0a1b2c3d").write_bytes(b"half")
    assert local_folder(resolve("model@1", registry)) == folder


def test_a_registry_that_is_not_there_is_empty(tmp_path: Path) -> None:
    registry = open_registry(tmp_path / "none")
    assert registry.models() == [] and registry.numbers("model") == []
    assert not (tmp_path / "none").exists()
