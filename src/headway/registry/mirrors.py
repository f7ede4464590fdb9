"""Mirrors of a version: a repository of the Hugging Face Hub, and a registered model of MLflow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.core.credentials.secrets import redact
from headway.core.errors import ConfigError, HeadwayError
from headway.core.files.scratch import scratch_folder
from headway.core.hub import HUB, is_on_hub
from headway.core.mlflow_model import RegisteredModel, log_model, open_client, register_model
from headway.models.hub.push import Upload
from headway.models.versions import ModelVersion, ResolvedVersion
from headway.registry.card import version_card
from headway.registry.pull import pull_to
from headway.telemetry.record import as_int

MLFLOW = "mlflow:"
#: The experiment whose runs stand for versions.
_EXPERIMENT = "headway-registry"
_VERSION_TAG = "headway.version"
_MANIFEST_TAG = "headway.manifest_sha256"


def check_target(target: str) -> None:
    """Check that a text names a mirror.

    Raises:
        ConfigError: It names none.
    """
    if not is_on_hub(target) and not (target.startswith(MLFLOW) and len(target) > len(MLFLOW)):
        raise ConfigError(
            f"'{target}' is no mirror", where="TARGET", fix="hf://organisation/name, or mlflow:NAME of a model"
        )


def hub_upload(version: ModelVersion, folder: Path, target: str) -> Upload:
    """Return what is sent to a repository of the Hub: the version's files with its card.

    Raises:
        ConfigError: The repository's name is none.
    """
    repository = target.removeprefix(HUB)
    return Upload.of(folder, repository, version_card(version, repository.rpartition("/")[2]))


def send_to_mlflow(found: ResolvedVersion, name: str, alias: str | None) -> str:
    """Send a version to a registered model of MLflow, and return its address there.

    A run of the experiment `headway-registry` stands for the version; a second call finds it and adds nothing.

    Args:
        found: The version.
        name: Of the registered model.
        alias: Points to the version then; None changes no alias.

    Raises:
        ConfigError: A package or the address of the server is missing, or the server refuses.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise ConfigError("the MLflow server is not known", where="MLFLOW_TRACKING_URI", fix="export it with the URL")
    version = found.version
    try:
        client = open_client(uri, "the mirror mlflow")
        tags = {_VERSION_TAG: str(version), _MANIFEST_TAG: version.sha256}
        run = _run_of(client, version, tags)
        model_id = _logged(client, run, found)
        wanted = RegisteredModel(name, alias, f"models:/{model_id}", version_card(version, name), tags)
        number = register_model(client, run, wanted, model_id)
        client.set_terminated(run.info.run_id)
    except HeadwayError:
        raise
    except Exception as error:
        words = redact(" ".join(str(error).split())[:300])
        fix = "check MLFLOW_TRACKING_URI and its credentials; then run the same command again"
        raise ConfigError(f"MLflow does not take the version: {words}", where=redact(uri), fix=fix) from error
    return f"models:/{name}/{number}"


def _logged(client: Any, run: Any, found: ResolvedVersion) -> str:
    """Return the id of the logged model of a run, which is made if there is none, from a verified copy."""
    outputs = run.outputs.model_outputs if run.outputs else []
    if outputs:
        return str(outputs[0].model_id)
    with scratch_folder("headway-mirror-") as scratch:
        folder = pull_to(found, scratch / "model")
        return log_model(client, run, folder, as_int(found.version.source.get("step")) or 0)


def _run_of(client: Any, version: ModelVersion, tags: Mapping[str, str]) -> Any:
    """Return the run that stands for a version, which is made if there is none."""
    found = client.get_experiment_by_name(_EXPERIMENT)
    experiment = found.experiment_id if found is not None else client.create_experiment(_EXPERIMENT)
    runs = client.search_runs([experiment], f"tags.`{_MANIFEST_TAG}` = '{version.sha256}'", max_results=1)
    if runs:
        return runs[0]
    return client.create_run(experiment, tags=tags, run_name=str(version))
