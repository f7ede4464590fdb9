"""The card of a version, and what arrives at the Hub and at MLflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headway.core.errors import ConfigError
from headway.models.hub.push import push
from headway.models.versions import ModelVersion, local_folder, resolve
from headway.registry import mirrors
from headway.registry.card import version_card
from headway.registry.mirrors import check_target, hub_upload, send_to_mlflow
from headway.registry.sources import ExportOptions, gathered
from support.hub_server import WRITER, HubServer
from support.registry import PROVEN, add, registry_with, write_model

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


def _header(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---")[1])
    return found


def test_a_card_says_what_is_known_and_na_for_the_rest() -> None:
    evidence = {"ledger": PROVEN, "benchmarks": {"arc": {"acc": 0.25}}, "card": [["parameters", "39.1k"], ["seed", 3]]}
    version = ModelVersion("m", 2, 0.0, "me@here", {}, {"kind": "run", "run": "r"}, evidence, "hf://org/base", "mit")
    card = version_card(version)
    header = _header(card)
    assert header["license"] == "mit" and header["base_model"] == "org/base"
    (result,) = header["model-index"][0]["results"]
    assert result["dataset"]["name"] == "arc" and result["metrics"] == [{"type": "acc", "value": 0.25}]
    for line in ("| parameters | 39.1k |", "| tokens | n/a |", "| ledger | proven |", "| arc | acc | 0.25 |"):
        assert line in card


def test_a_card_of_a_folder_invents_nothing() -> None:
    card = version_card(ModelVersion("m", 1, 0.0, "me@here", {}, {"kind": "folder"}))
    assert set(_header(card)) == {"library_name", "pipeline_tag", "tags"}
    assert "| ledger | n/a |" in card and "| licence | n/a |" in card and card.rstrip().endswith("n/a")


def test_a_hostile_name_stays_in_its_cell() -> None:
    version = ModelVersion("m", 1, 0.0, "x", {}, {"kind": "run", "run": "a|b\n---\n# c"}, {"card": [["a|b", "c\n# d"]]})
    card = version_card(version)
    assert "\n# d" not in card and "\n# c" not in card and card.count("\n---\n") == 1


def test_a_version_arrives_at_the_hub_with_its_card(hub: HubServer, tmp_path: Path) -> None:
    registry = registry_with(tmp_path, licence="mit")
    found = resolve("model@1", registry)
    upload = hub_upload(found.version, local_folder(found), "hf://org/model")
    push(upload, private=True)
    sent = hub.files("org/model")
    assert _header(sent.pop("README.md").decode())["license"] == "mit"
    assert sent.keys() - {".gitattributes"} == found.version.files.keys()


def test_a_model_of_the_hub_is_registered_at_its_commit(hub: HubServer, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.commit("org/theirs", {**files, "README.md": b"---\nlicense: apache-2.0\n---\n", "modeling.py": b"1 / 0"})
    registry = registry_with(tmp_path, versions=0)
    with gathered("hf://org/theirs", ExportOptions()) as found:
        version = add(registry, found.folder, licence=found.licence, parent=found.parent)
        assert found.source["repository"] == "org/theirs" and len(found.source["commit"]) == 40
    assert version.licence == "apache-2.0" and "modeling.py" not in version.files


@pytest.mark.parametrize("target", ["me/model", "mlflow:", "s3://bucket", ""])
def test_what_is_no_mirror_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="no mirror"):
        check_target(target)


class _Mlflow:
    """As much of MLflow's client as a mirror needs, with what it was told."""

    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.aliases: dict[str, str] = {}

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1")

    def search_runs(self, experiments: list[str], wanted: str, max_results: int) -> list[Any]:
        return [run for run in self.runs if all(value in wanted for value in [run.tags["headway.manifest_sha256"]])]

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
        self.runs.append(SimpleNamespace(tags=tags, outputs=None, info=SimpleNamespace(run_id=run_name)))
        return self.runs[-1]

    def set_terminated(self, run: str) -> None:
        pass


def test_a_version_is_sent_to_mlflow_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a verified copy, so that nothing is written into the registry."""
    registry = registry_with(tmp_path)
    before = sorted(path for path in (tmp_path / "registry").rglob("*"))
    client, copies, wanted = _Mlflow(), [], []

    def log_model(client: Any, run: Any, folder: Path, step: int) -> str:
        copies.append(sorted(path.name for path in folder.iterdir()))
        assert not folder.is_relative_to(tmp_path / "registry")
        run.outputs = SimpleNamespace(model_outputs=[SimpleNamespace(model_id="m-1")])
        return "m-1"

    def register_model(client: Any, run: Any, model: Any, model_id: str) -> str:
        wanted.append((model.name, model.alias, model.source, model.tags["headway.version"], model_id))
        return "7"

    monkeypatch.setattr(mirrors, "log_model", log_model)
    monkeypatch.setattr(mirrors, "register_model", register_model)
    monkeypatch.setattr(mirrors, "open_client", lambda uri, what: client)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    found = resolve("model@1", registry)
    assert [send_to_mlflow(found, "theirs", "champion") for _ in range(2)] == ["models:/theirs/7"] * 2
    assert copies == [sorted(found.version.files)]
    assert wanted == [("theirs", "champion", "models:/m-1", "model@1", "m-1")] * 2
    assert sorted(path for path in (tmp_path / "registry").rglob("*")) == before
