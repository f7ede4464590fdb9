"""Registration: files first, then a manifest under a number that nobody else gets; and folders that are refused."""

from __future__ import annotations

import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.core.errors import ConfigError, HeadwayError
from headway.models.versions import local_folder, open_registry, resolve
from headway.registry.files import files_to_register
from headway.registry.verify import verify_model
from support.object_storage import S3Server
from support.registry import PROVEN, add, registry_with, write_model


def test_versions_are_numbered_and_linked(tmp_path: Path) -> None:
    registry = registry_with(tmp_path, versions=3)
    versions = [registry.required("model", number) for number in (1, 2, 3)]
    assert [version.previous for version in versions] == [None, versions[0].sha256, versions[1].sha256]
    assert len({version.fingerprint for version in versions}) == 3
    assert list(verify_model(registry, "model")) == []


def test_the_same_model_is_registered_once(tmp_path: Path) -> None:
    registry = registry_with(tmp_path)
    assert add(registry, tmp_path / "model-0").number == 1
    assert add(registry, tmp_path / "model-0", evidence={"ledger": PROVEN}).number == 2, "more is known of it"
    assert registry.required("model", 1).fingerprint == registry.required("model", 2).fingerprint


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "a b", "-x", "x" * 97, "ä"])
def test_a_name_that_could_be_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no name for a model"):
        add(open_registry(tmp_path / "registry"), write_model(tmp_path / "model"), name)
    assert not (tmp_path / "registry").exists()


def test_a_folder_cannot_register_files_outside_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (tmp_path / "secret.json").write_text("{}", encoding="utf-8")
    (folder / "vocab.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ConfigError, match=r"vocab\.json is a link to a file outside"):
        files_to_register(folder)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    plain = write_model(tmp_path / "plain")
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for path in plain.iterdir():
        path.rename(repository / "blobs" / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    files, _ = files_to_register(snapshot)
    assert sorted(files) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_pickles_and_code_are_never_registered(tmp_path: Path) -> None:
    code = {"pytorch_model.bin": pickle.dumps(print), "modeling.py": b"raise SystemExit", "x.pkl": b""}
    files, left_out = files_to_register(write_model(tmp_path / "model", **code))
    assert sorted(files) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert left_out == ["modeling.py", "pytorch_model.bin", "x.pkl"]
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(HeadwayError, match="never unpickles"):
        files_to_register(tmp_path / "model")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"[" * 100_000),
        ("config.json", b'{"a": 1, "a": 2}'),
        ("config.json", b"[]"),
        ("model.safetensors", b"\xff" * 8 + b"{}"),
        ("model.safetensors", (2**40).to_bytes(8, "little") + b"{}"),
        ("model.safetensors", b""),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
    ],
)
def test_a_hostile_file_is_refused_before_anything_is_written(tmp_path: Path, file: str, content: bytes) -> None:
    folder = write_model(tmp_path / "model")
    (folder / file).write_bytes(content)
    with pytest.raises(HeadwayError) as caught:
        add(open_registry(tmp_path / "registry"), folder)
    assert caught.value.fix and not (tmp_path / "registry").exists()


def test_a_giant_file_and_a_pipe_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    os.truncate(folder / "tokenizer.json", 10 * 2**30)  # a hole, which takes no room
    with pytest.raises(ConfigError, match=r"tokenizer\.json has 10"):
        files_to_register(folder)
    os.truncate(folder / "tokenizer.json", 0)
    os.truncate(folder / "config.json", 10 * 2**30)
    with pytest.raises(HeadwayError, match=r"config\.json has 10"):
        files_to_register(folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        files_to_register(folder)


def test_a_file_that_changes_meanwhile_is_not_registered(tmp_path: Path) -> None:
    from headway.registry.publish import register
    from headway.registry.sources import Gathered

    folder = write_model(tmp_path / "model")
    files, _ = files_to_register(folder)
    registry = open_registry(tmp_path / "registry")

    def touch(_: int) -> None:
        (folder / "config.json").write_text(json.dumps({"other": 1}), encoding="utf-8")

    with pytest.raises(ConfigError, match="changed while it was registered"):
        register(registry, "model", Gathered(folder, {"kind": "folder"}), files, touch)
    assert registry.numbers("model") == []
    assert [finding.kind for finding in verify_model(registry, "model")] == ["leftover"]


def _add_at_once(place: str, folder: Path, writers: int, each: int) -> list[int]:
    models = [[write_model(folder / f"{w}-{n}", 100 * w + n) for n in range(each)] for w in range(writers)]
    begin = threading.Barrier(writers)

    def write(writer: int) -> list[int]:
        registry = open_registry(place)
        begin.wait()
        return [add(registry, model).number for model in models[writer]]

    with ThreadPoolExecutor(writers) as pool:
        return [number for numbers in pool.map(write, range(writers)) for number in numbers]


def test_writers_at_once_get_different_numbers(tmp_path: Path) -> None:
    place = str(tmp_path / "registry")
    numbers = _add_at_once(place, tmp_path, writers=4, each=4)
    assert sorted(numbers) == list(range(1, 17))
    assert list(verify_model(open_registry(place), "model")) == []


def test_an_object_store_holds_a_registry(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers at once, fetching into the cache, and a flipped byte."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = f"{s3.url}/{tmp_path.name}/registry"
    numbers = _add_at_once(place, tmp_path, writers=2, each=2)
    registry = open_registry(place)
    assert sorted(numbers) == [1, 2, 3, 4]
    assert list(verify_model(registry, "model")) == []
    found = resolve("model@2", registry)
    folder = local_folder(found)
    assert folder.is_relative_to(tmp_path / "cache")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # on the disk of the cache
    assert (local_folder(found) / "model.safetensors").read_bytes() == content
    s3.put(f"{tmp_path.name}/registry/model/files/{found.version.fingerprint}/config.json", b"{}")
    s3.put(f"{tmp_path.name}/registry/model/files/{found.version.fingerprint}/more.json", b"{}")
    damage = [finding.what for finding in verify_model(registry, "model")]
    size = found.version.files["config.json"].bytes
    assert damage == ["more.json does not belong to it", f"config.json has 2 bytes instead of {size}"]
    (folder / "config.json").unlink()
    with pytest.raises(HeadwayError, match="model@2"):
        local_folder(found)
