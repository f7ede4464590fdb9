"""A model in MLflow: logged with its signature, and as a version of a registered model with an alias.

Each step looks first whether an earlier try, which was killed, has done it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError, needing

#: Characters that stores keep of the description of a version.
_DESCRIPTION = 5000
#: Set for the client, if the user has not: one request takes at most this long, and callers try again themselves.
_VARIABLES = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}


@dataclass(frozen=True)
class RegisteredModel:
    """What a version of a registered model shall be."""

    name: str
    alias: str | None
    """The alias that points to it then; None changes no alias."""
    source: str
    """Where its files are, as MLflow names it."""
    description: str
    tags: Mapping[str, str]
    """They tell this version from the others of a run."""


def open_client(uri: str, what: str) -> Any:
    """Return MLflow's client of a server.

    Raises:
        ConfigError: the package is missing, which `what` needs.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"  # a request that is repeated unseen could arrive twice
    with needing("mlflow-skinny", "mlflow", what):
        from mlflow import MlflowClient
    return MlflowClient(tracking_uri=uri)


def log_model(client: Any, run: Any, folder: Path, step: int | None = None) -> str:
    """Log the model in a folder that `headway export` wrote, as one that a run made, and return its id.

    Args:
        client: MLflow's.
        run: The server's run.
        folder: The export.
        step: Of the weights; the last one that the server has when not given.

    Raises:
        ConfigError: a package is missing, or it is no exported model.
    """
    with needing("transformers", "mlflow,hf", "a model in MLflow"):
        import mlflow.transformers
        from mlflow.entities import LoggedModelOutput
        from mlflow.models import ModelSignature
        from mlflow.types import ColSpec, Schema
        from transformers import AutoModelForCausalLM, AutoTokenizer
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "this is no exported model: it has no config.json",
            where=str(folder),
            fix="headway export RUN DIR writes one, and headway merge RUN DIR where the run trains an adapter",
        )
    parts = {
        "model": AutoModelForCausalLM.from_pretrained(folder),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
    }
    text = Schema([ColSpec("string")])
    # Named here: MLflow would look for packages for images and sound, too.
    needs = [f"{package}=={version(package)}" for package in ("torch", "transformers", "safetensors")]
    with tempfile.TemporaryDirectory(prefix="headway-model-", dir=folder.parent) as scratch:
        saved = Path(scratch) / "model"
        mlflow.transformers.save_model(
            parts, saved, task="text-generation", pip_requirements=needs, signature=ModelSignature(text, text)
        )
        # Not by `log_model` of MLflow, which would set the status of the run.
        made = client.create_logged_model(run.info.experiment_id, "model", run.info.run_id)
        client.log_model_artifacts(made.model_id, str(saved))
        client.finalize_logged_model(made.model_id, "READY")
        if step is None:
            step = max((int(metric.step) for metric in run.data._metric_objs), default=0)
        client.log_outputs(run.info.run_id, [LoggedModelOutput(made.model_id, step)])
    return str(made.model_id)


def register_model(client: Any, run: Any, wanted: RegisteredModel, model_id: str | None = None) -> str:
    """Make a version of a registered model, unless there is one of the same run, source and tags; return its number.

    Args:
        client: MLflow's.
        run: The server's run.
        wanted: Name, alias and content.
        model_id: Id of the logged model; None if the version holds something else.
    """
    from mlflow.exceptions import MlflowException

    name = wanted.name
    run_id = run.info.run_id
    tags = dict(wanted.tags)
    with suppress(MlflowException):  # it exists; where it is something else, the next request says so
        client.create_registered_model(name)
    found = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
    known = [one for one in found if tags.items() <= one.tags.items() and one.source == wanted.source]
    this = known[0] if known else client.create_model_version(
        name, wanted.source, run_id, tags, description=wanted.description[:_DESCRIPTION], model_id=model_id
    )  # fmt: skip
    if wanted.alias is not None:
        client.set_registered_model_alias(name, wanted.alias, this.version)
    return str(this.version)
