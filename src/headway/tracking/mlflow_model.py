"""A run's model in MLflow: logged with its signature, and as a version of a registered model with an alias.

Each step looks first whether an earlier try, which was killed, has done it.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headway.config.sections.track import ModelUpload
from headway.core.errors import ConfigError, missing_extra
from headway.tracking.sink import RunModel

_CARD_FOLDER = "model-card"
#: Characters that stores keep of the description of a version.
_DESCRIPTION = 5000


def send(client: Any, run: Any, model: RunModel, upload: ModelUpload) -> None:
    """Log a run's model or its card, and register it if that is wanted.

    Args:
        client: MLflow's.
        run: The server's run.
        model: The model.
        upload: What is wanted of it.

    Raises:
        ConfigError: a package is missing, or the model is an adapter by itself.
    """
    if model.folder is None:
        client.log_text(run.info.run_id, model.card, f"{_CARD_FOLDER}/README.md")
        made = None
    else:
        logged = [one.model_id for one in run.outputs.model_outputs if one.step == model.step] if run.outputs else []
        made = logged[0] if logged else log_model(client, run, model.folder, model.step)
    if upload.register is not None:
        _register(client, run, model, made, upload)


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
    try:
        import mlflow.transformers
        from mlflow.entities import LoggedModelOutput
        from mlflow.models import ModelSignature
        from mlflow.types import ColSpec, Schema
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise missing_extra("transformers", "mlflow,hf", "a model in MLflow") from None
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


def _register(client: Any, run: Any, model: RunModel, made: str | None, upload: ModelUpload) -> None:
    """Make a version of the registered model, unless this step of the run has one, and have the alias point to it.

    Args:
        client: MLflow's.
        run: The server's run.
        model: The run's model.
        made: Id of the logged model; None if the version holds the card.
        upload: Name and alias.
    """
    from mlflow.exceptions import MlflowException

    name, step, run_id = str(upload.register), str(model.step), run.info.run_id
    source = f"{run.info.artifact_uri}/{_CARD_FOLDER}" if made is None else f"models:/{made}"
    with suppress(MlflowException):  # it exists; where it is something else, the next request says so
        client.create_registered_model(name)
    found = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
    known = [one for one in found if one.tags.get("headway.step") == step and one.source == source]
    this = known[0] if known else client.create_model_version(
        name, source, run_id, {"headway.step": step}, description=model.card[:_DESCRIPTION], model_id=made
    )  # fmt: skip
    client.set_registered_model_alias(name, upload.alias, this.version)
