"""Models of the Hub: found, pinned and explained; a stand-in hub serves them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.config import Config, ModelConfig, SourceConfig
from headway.core.errors import ConfigError, DataError
from headway.core.hub import or_on_hub
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.models.build import complete
from headway.models.hub.folder import open_folder, pinned_source, weights_fingerprint
from headway.text.reading.sources import find_sources
from support.chat import chat_tokenizer
from support.hub_server import HubServer

constants = pytest.importorskip("huggingface_hub.constants")
FILES = {"config.json": '{"model_type": "llama"}', "model.safetensors": "weights", "run.py": "code", "a.bin": "pickle"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer()
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield server
    server.close()


def test_a_model_of_the_hub_is_pinned_and_only_what_it_needs_is_fetched(hub: HubServer) -> None:
    first = hub.commit("org/model", FILES)
    pinned = pinned_source("hf://org/model@main")
    assert pinned == f"hf://org/model@{first}"
    hub.commit("org/model", {"model.safetensors": "newer"})
    folder = open_folder(pinned)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_text() == "weights"
    assert (open_folder(pinned, with_code=True) / "run.py").is_file()


def test_what_is_in_the_cache_needs_no_network(hub: HubServer) -> None:
    pinned = pinned_source(f"hf://org/model@{hub.commit('org/model', FILES)}")
    folder = open_folder(pinned)
    hub.refusals[:] = [0] * 50
    assert open_folder(pinned) == folder


@pytest.mark.parametrize(
    ("source", "words"),
    [("hf://org/none", "there is no such model"), ("hf://org/model@none", "no such revision")],
)
def test_what_the_hub_does_not_have_is_explained(hub: HubServer, source: str, words: str) -> None:
    hub.commit("org/model", FILES)
    with pytest.raises(ConfigError, match=words):
        open_folder(source)


def test_without_network_the_error_names_a_way(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="cannot be reached") as raised:
        open_folder("hf://org/model")
    assert "name that folder" in str(raised.value)


@pytest.mark.parametrize("source", ["hf://", "hf:/org/model", "hf://org/model@", "hf://a/b/c"])
def test_a_wrong_name_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="hf://organisation/name"):
        Config.model_validate({"model": {"from_pretrained": source}})


def test_the_fingerprint_is_that_of_what_decides_the_model(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "known.json"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(content)

    def now(with_code: bool = False) -> str:
        return weights_fingerprint(folder, with_code=with_code, cache=cache)

    before = now()
    assert now() == before and cache.is_file()
    (folder / "README.md").write_text("other words")
    (folder / "run.py").write_text("other code")
    assert now() == before
    with_code = now(with_code=True)
    (folder / "run.py").write_text("third code")
    assert now(with_code=True) != with_code != before
    (folder / "model.safetensors").write_text("weighty")  # of the same size
    assert now() != before


def test_weights_are_hashed_once_where_the_cache_has_no_place_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run directory is made after the examination, whose process workers are copies of."""
    folder, cache = tmp_path / "model", tmp_path / "run" / "known.json"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(content)
    before = weights_fingerprint(folder, with_code=False, cache=cache)
    monkeypatch.setattr("headway.models.hub.folder.sha256_file", lambda path: pytest.fail(f"{path} is read again"))
    assert weights_fingerprint(folder, with_code=False, cache=cache) == before
    cache.parent.mkdir()
    assert weights_fingerprint(folder, with_code=False, cache=cache) == before and cache.is_file()


def test_a_tokenizer_of_the_hub_is_fetched_without_the_weights(hub: HubServer, tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    hub.commit("org/model", {**FILES, **files})
    loaded = Tokenizer.load("hf://org/model")
    assert loaded.fingerprint == Tokenizer.load(folder).fingerprint
    assert sorted(file.name for file in Path(loaded.where).parent.iterdir()) == sorted(files)
    with pytest.raises(ConfigError, match="there is no such model"):
        Tokenizer.load("hf://org/none")


def test_a_name_of_the_hub_without_its_prefix_is_offered_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model, a tokenizer and a dataset alike; a folder that is only incomplete is none of the Hub's."""
    monkeypatch.chdir(tmp_path)
    offer = "on the Hugging Face Hub its name is hf://Qwen/Qwen3-0.6B"
    for implementation in ("auto", "transformers"):
        model = {"from_pretrained": "Qwen/Qwen3-0.6B", "implementation": implementation}
        with pytest.raises(ConfigError) as caught:
            complete(ModelConfig.model_validate(model), 1)
        assert offer in str(caught.value.fix)
    with pytest.raises(DataError) as missing:
        Tokenizer.load("Qwen/Qwen3-0.6B")
    assert offer in str(missing.value.fix)
    with pytest.raises(DataError) as missing:
        find_sources([SourceConfig(path="Qwen/Qwen3-0.6B")])
    assert offer in str(missing.value.fix)
    (tmp_path / "models").mkdir()
    for name in ("models/mine", "corpus/a.jsonl", "/Qwen/Qwen3-0.6B", "Qwen", "a/b/c", "../Qwen3-0.6B"):
        assert or_on_hub(name) == "", name
