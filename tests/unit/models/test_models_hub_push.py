"""Models are sent to a stand-in hub by the Hub's own client, in one commit, and nothing else is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.core.errors import CheckpointError, ConfigError
from headway.models.hub.folder import open_folder
from headway.models.hub.push import Upload, push
from support.hub_server import STRANGER, WRITER, HubServer

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer()
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "tokenizer.json").write_text("{}")
    (path / ".env").write_text("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345")
    (path / "notes.json").write_text("mine")
    (path / "README.md").write_text("# old")
    return path


def test_a_model_arrives_in_one_commit_and_nothing_else(hub: HubServer, folder: Path) -> None:
    upload = Upload.of(folder, "org/model", "# card\n")
    assert list(upload.left_out) == [".env", "notes.json"]
    address = push(upload, private=True)
    assert "/org/model/commit/" in address and hub.is_private("org/model") and hub.commits("org/model") == 2
    sent = hub.files("org/model")
    assert sent.pop("README.md") == b"# card\n"
    assert sent == {
        ".gitattributes": b"",
        **{name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors", "tokenizer.json")},
    }
    fetched = open_folder("hf://org/model")
    assert (fetched / "model.safetensors").read_bytes() == b"weights"


def test_weights_of_earlier_commits_are_removed_and_other_files_stay(hub: HubServer, folder: Path) -> None:
    hub.commit("org/model", {"model-00001-of-00002.safetensors": "old", "notes.txt": "theirs"})
    push(Upload.of(folder, "org/model", None), private=False)
    sent = hub.files("org/model")
    assert "model-00001-of-00002.safetensors" not in sent and sent["notes.txt"] == b"theirs"
    assert sent["README.md"] == b"# old"  # without a run, the folder's own card


def test_a_model_takes_the_place_of_an_adapter_and_the_other_way_round(hub: HubServer, folder: Path) -> None:
    hub.commit("org/model", {"adapter_config.json": "{}", "adapter_model.safetensors": "old", "sub/config.json": "{}"})
    push(Upload.of(folder, "org/model", None), private=False)
    names = {"README.md", "config.json", "model.safetensors", "sub/config.json", "tokenizer.json"}
    assert hub.files("org/model").keys() - {".gitattributes"} == names
    for name, new in (("config.json", "adapter_config.json"), ("model.safetensors", "adapter_model.safetensors")):
        (folder / name).rename(folder / new)
    push(Upload.of(folder, "org/model", None), private=False)
    assert not hub.files("org/model").keys() & {"config.json", "model.safetensors"}


def test_a_newline_at_the_end_of_the_token_is_no_part_of_it(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", f"{WRITER}\n")
    push(Upload.of(folder, "org/model", None), private=True)
    assert "model.safetensors" in hub.files("org/model")


def test_a_public_repository_does_not_get_a_private_model(hub: HubServer, folder: Path) -> None:
    hub.commit("org/model", {"a": "b"})
    with pytest.raises(ConfigError, match="is public"):
        push(Upload.of(folder, "org/model", None), private=True)
    assert hub.commits("org/model") == 1


@pytest.mark.parametrize(
    ("token", "words", "fix"),
    [
        ("", "there is no token", "export HF_TOKEN"),
        ("hf_unknown", "does not accept the token", "HF_TOKEN"),
        (STRANGER, "may not write", "HF_TOKEN"),
    ],
)
def test_without_a_token_that_may_write_nothing_is_sent(
    token: str, words: str, fix: str, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match=words) as caught:
        push(Upload.of(folder, "org/model", None), private=True)
    assert fix in str(caught.value.fix) and len(caught.value.render().splitlines()) == 3
    assert not token or token not in caught.value.render()


def test_without_network_the_error_says_so(folder: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="cannot be reached") as caught:
        push(Upload.of(folder, "org/model", None), private=True)
    assert len(caught.value.render().splitlines()) == 3
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.close()
    with pytest.raises(ConfigError, match="cannot be reached"):
        push(Upload.of(folder, "org/model", None), private=True)


def test_what_is_no_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="organisation/name"):
        Upload.of(folder, "model", None)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="no exported model"):
        Upload.of(folder, "org/model", None)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        Upload.of(folder, "org/model", None)
