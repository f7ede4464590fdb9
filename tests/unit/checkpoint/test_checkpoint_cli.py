"""`headway checkpoints list|verify`."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.checkpoint.store import CheckpointStore
from headway.cli.application import application
from headway.core.errors import CheckpointError, ConfigError
from headway.core.storage import client
from support.states import save

app = application(["checkpoints"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (1000, 2000):
        save(store, step)
    return tmp_path / "run"


def invoke(*arguments: object) -> tuple[str, BaseException | None]:
    result = CliRunner().invoke(app, ["checkpoints", *map(str, arguments)])
    return result.stdout, result.exception


def break_newest(run: Path) -> None:
    path = run / "checkpoints" / "step-00002000" / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")


def test_list_shows_each(run: Path) -> None:
    output, _ = invoke("list", run)
    lines = output.splitlines()
    state = CheckpointStore(run / "checkpoints").info(2000).state_sha256
    assert len(lines) == 3
    assert lines[2].split()[0] == "2,000" and state[:12] in lines[2] and lines[2].split()[-2:] == ["1", "2"]


def test_list_as_json(run: Path) -> None:
    output, _ = invoke("list", run / "checkpoints", "--json")
    assert [record["step"] for record in json.loads(output)] == [1000, 2000]
    assert json.loads(output)[0]["context"]["world_size"] == 2


def test_list_goes_on_past_a_broken_manifest(run: Path) -> None:
    (run / "checkpoints" / "step-00001000" / "manifest.json").write_text("{")
    output, error = invoke("list", run, "--json")
    assert error is None
    assert [record["step"] for record in json.loads(output)] == [2000]


def test_list_of_a_run_without_checkpoints(tmp_path: Path) -> None:
    assert invoke("list", tmp_path, "--json") == ("[]\n", None)


def test_list_of_nothing(tmp_path: Path) -> None:
    _, error = invoke("list", tmp_path / "nothing")
    assert isinstance(error, CheckpointError) and "is not a folder" in error.what


def test_verify_good(run: Path) -> None:
    output, error = invoke("verify", run)
    assert error is None
    assert [line.split(":")[0] for line in output.splitlines()] == ["step-00001000", "step-00002000"]
    assert output.count("good") == 2


def test_verify_names_file_and_tensor_and_fails(run: Path) -> None:
    break_newest(run)
    output, error = invoke("verify", run)
    assert isinstance(error, CheckpointError) and error.exit_code == 4
    assert "1 of 2" in error.what and "step-00002000" in str(error.where)
    assert "step-00002000: damaged" in output
    assert "shard-00000.safetensors has changed" in output and "(tensors: model.mask)" in output


def test_verify_one_checkpoint_as_json(run: Path) -> None:
    break_newest(run)
    output, error = invoke("verify", run / "checkpoints" / "step-00001000", "--json")
    assert error is None and json.loads(output)[0]["good"] is True
    output, error = invoke("verify", run / "checkpoints" / "step-00002000", "--json")
    assert isinstance(error, CheckpointError)
    (damage,) = json.loads(output)[0]["damage"]
    assert damage["file"] == "shard-00000.safetensors" and damage["tensors"] == ["model.mask"]


def test_verify_a_folder_of_copies(run: Path, tmp_path: Path) -> None:
    assert invoke("copy", run, tmp_path / "backup")[1] is None
    output, error = invoke("verify", tmp_path / "backup")
    assert error is None and output.count("good") == 2


def test_verify_of_nothing_is_no_success(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "step-00000001"):
        assert isinstance(invoke("verify", path)[1], CheckpointError)


def test_verify_behind_a_url(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    assert invoke("copy", run, f"file://{there}")[1] is None
    output, error = invoke("verify", f"file://{there}")
    assert error is None and output.count("good") == 2
    output, error = invoke("verify", f"file://{there}/step-00002000", "--json")
    (found,) = json.loads(output)
    assert error is None and found["good"] and found["path"] == f"file://{there}/step-00002000"


@pytest.mark.parametrize("what", ["has changed", "bytes", "is missing", "manifest.json"])
def test_damage_behind_a_url_is_told_and_fails(run: Path, tmp_path: Path, what: str) -> None:
    there = tmp_path / "there"
    invoke("copy", run, f"file://{there}")
    path = there / "step-00002000" / "shard-00000.safetensors"
    if what == "has changed":
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    elif what == "bytes":
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "is missing":
        path.unlink()
    else:
        path.with_name("manifest.json").write_text("{")
    output, error = invoke("verify", f"file://{there}")
    assert isinstance(error, CheckpointError) and error.exit_code == 4
    assert "1 of 2" in error.what and f"file://{there}/step-00002000" in str(error.where)
    assert what in output and "step-00001000: good" in output
    if what == "has changed":
        assert "(tensors: model.mask)" in output


def test_a_url_without_checkpoints_is_no_success(tmp_path: Path) -> None:
    assert isinstance(invoke("verify", f"file://{tmp_path}/nothing")[1], CheckpointError)


def no_room(**where: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_is_encrypted_behind_a_url_is_verified_with_the_key_only(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    there = tmp_path / "there"
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", "ab" * 32)
    assert invoke("copy", run, f"file://{there}")[1] is None
    with monkeypatch.context() as patch:
        patch.setattr("headway.checkpoint.remote.sealed_objects.tempfile.NamedTemporaryFile", no_room)
        error = invoke("copy", run, f"file://{tmp_path}/elsewhere")[1]
    assert isinstance(error, CheckpointError) and "cannot be encrypted for upload: No space" in error.what
    path = there / "step-00002000" / "shard-00000.safetensors.sealed"
    assert path.exists() and invoke("verify", f"file://{there}")[1] is None
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    output, error = invoke("verify", f"file://{there}")
    assert isinstance(error, CheckpointError) and "cannot be decrypted" in output
    monkeypatch.delenv("HEADWAY_ENCRYPTION_KEY")
    output, error = invoke("verify", f"file://{there}")
    assert isinstance(error, ConfigError) and error.what == "it is encrypted, and there is no key"


def test_what_a_store_needs_is_given_to_every_verb_that_reaches_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run has it in its config; without it a server of one's own could not be reached by hand."""
    asked: list[dict[str, object]] = []
    reach = client.filesystem

    def note(url: str, options: Mapping[str, Any], purpose: str) -> tuple[Any, str]:
        asked.append(dict(options))
        return reach(url, {}, purpose)

    monkeypatch.setattr(client, "filesystem", note)
    url, given = f"file://{tmp_path}/there", ("--option", "endpoint_url=http://x:1", "--option", "client.retries=3")
    new = tmp_path / "new"
    for words in (
        ("copy", run, url),
        ("copy", url, tmp_path / "back"),
        ("list", url),
        ("verify", url),
        ("restore", new, "--from", url),
    ):
        asked.clear()
        assert invoke(*words, *given)[1] is None, words
        assert asked and all(o == {"endpoint_url": "http://x:1", "client": {"retries": 3}} for o in asked), words
    for words in (("list", run), ("restore", new), ("copy", run, tmp_path / "third")):
        error = invoke(*words, *given)[1]
        assert isinstance(error, ConfigError) and "none is given" in error.what
    error = invoke("list", url, "--option", "endpoint_url")[1]
    assert isinstance(error, ConfigError) and "KEY=VALUE" in error.what
