"""The sink for MLflow. Only a follower's process imports the client: it takes seconds, 200 MB and threads.

The server's run is found by a tag that holds the run's id, so a kill between its making and the cursor makes no second
one. A batch that may have arrived in part is compared with the last step that the server has of each metric.
"""

from __future__ import annotations

import base64
import importlib.util
import os
import re
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.config.sections.track import MlflowConfig, ModelUpload, mlflow_uri_problem
from headway.core.credentials.secrets import redact
from headway.core.errors import ConfigError, missing_extra
from headway.core.files.hashes import fingerprint
from headway.core.mlflow_model import RegisteredModel, log_model, open_client, register_model
from headway.tracking.servers import address_from, ask_server
from headway.tracking.sink import (
    Batch,
    Description,
    LostRun,
    Point,
    Refused,
    RunModel,
    SinkSpec,
    Status,
    TrackedRun,
    Unreachable,
)

RUN_TAG = "headway.run_id"
GENERATION_TAG = "headway.generation"
#: Beginning of the tag that holds the value that a parameter has since a change.
_NOW = "headway.now."
_DEFAULT_EXPERIMENT = "headway"
_CARD_FOLDER = "model-card"
_CREDENTIALS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
#: Limits of the API (`mlflow.utils.validation`): metrics, parameters and tags in a request, and characters in a value.
_METRICS = 1000
_PARAMETERS = 100
_TAGS = 100
_CHARACTERS = 6000
_NAME_CHARACTERS = 250
#: Groups of metrics that MLflow shows as metrics of the system.
_SYSTEM = ("memory/", "gpu/", "health/gpu_", "health/memory_", "health/disk_", "health/cpu_")
_NOT_ALLOWED = re.compile(r"[^\w.\- :/]")


class MlflowSink:
    """Sends a run to an MLflow server.

    Args:
        uri: Address of the server.
        experiment: Its experiment, made if it does not exist.
        upload: What it gets of the run's model.
    """

    def __init__(self, uri: str, experiment: str, upload: ModelUpload | None = None) -> None:
        self._uri = uri
        self._experiment = experiment
        self.upload = upload or ModelUpload()
        self._client: Any = None
        self._run: str = ""
        self._started = 0
        self._latest: dict[str, int] = {}
        self._is_recovering = False
        self._kept: dict[str, Any] = {}

    def open(self, run: TrackedRun, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Find the server's run by its tag, or make it."""
        self._client = open_client(self._uri, "the tracker mlflow")
        with self._answering():
            self._kept = dict(state)
            known = state.get("run")
            found = self._run_of(str(known)) if known else self._find(run)
            # Nothing is known of what was sent: the cursor is new, or gone. The server may be ahead of the file, so
            # this holds for later sessions too.
            self._is_recovering = bool(state.get("recovering")) or (not known and found is not None)
            if found is None:
                found = self._make(run)
            self._run = found.info.run_id
            self._started = found.info.start_time or 0
            self._latest = self._latest_steps()
            self._kept = {**self._kept, "run": self._run, "recovering": self._is_recovering}
        return self._kept

    def describe(self, description: Description) -> Mapping[str, Any]:
        """Send parameters, tags, data and files that the server has not yet."""
        with self._answering():
            run = self._client.get_run(self._run)
            self._send_parameters(description, run.data)
            tags = _values(_tags(description))
            self._send_tags({name: text for name, text in tags.items() if run.data.tags.get(name) != text})
            self._send_datasets(description, run.inputs)
            self._send_files(description)
        return self._kept

    def send(self, batch: Batch) -> Mapping[str, Any]:
        """Send the points that the server has not yet."""
        with self._answering():
            points = self._missing(batch) if batch.uncertain or self._is_recovering else list(batch.points)
            for start in range(0, len(points), _METRICS):
                metrics = [_metric(point) for point in points[start : start + _METRICS]]
                self._client.log_batch(self._run, metrics=metrics, synchronous=True)
        return self._kept

    def flush(self) -> Mapping[str, Any]:
        """Return the state: every request has been answered."""
        return self._kept

    def set_status(self, status: Status, ended: float | None) -> None:
        """Set the status of the server's run; one that runs again has no end."""
        with self._answering():
            if status == "running":
                self._client.update_run(self._run, status="RUNNING")
            else:
                # A clock may have been set back, and earlier versions sent a start that is too late.
                moment = None if ended is None else max(int(1000 * ended), self._started)
                self._client.set_terminated(self._run, status.upper(), moment)

    def close(self) -> None:
        """Forget the client; requests leave no connection that must be closed."""
        self._client = None

    def log_model(self, folder: Path) -> str:
        """Log a model from an export, for `mlflow.transformers.load_model`, and return its address."""
        with self._answering():
            return f"models:/{log_model(self._client, self._client.get_run(self._run), folder)}"

    def send_model(self, model: RunModel) -> Mapping[str, Any]:
        """Log the model of the finished run, and register it."""
        with self._answering():
            _send_model(self._client, self._client.get_run(self._run), model, self.upload)
        return self._kept

    # The run -------------------------------------------------------------------------------------------------------

    def _run_of(self, run: str) -> Any:
        found = self._client.get_run(run)
        if found.info.lifecycle_stage != "active":
            raise Refused(
                "the run was deleted in MLflow",
                where=f"{redact(self._uri)}, run {run}",
                fix=f"mlflow runs restore --run-id {run}, or remove the run's folder `tracking` to send it anew",
            )
        return found

    def _find(self, run: TrackedRun) -> Any:
        """Return the oldest run with this id; remove others, which a request that timed out has made too."""
        text = f"tags.`{RUN_TAG}` = '{run.id}' and tags.`{GENERATION_TAG}` = '{run.generation}'"
        found = self._client.search_runs([self._experiment_id()], text, max_results=100)
        found = sorted(found, key=lambda one: (one.info.start_time or 0, one.info.run_id))
        for other in found[1:]:
            if not other.data.metrics:
                self._client.delete_run(other.info.run_id)
        return found[0] if found else None

    def _make(self, run: TrackedRun) -> Any:
        tags = {RUN_TAG: run.id, GENERATION_TAG: str(run.generation), "mlflow.source.name": "headway train"}
        if run.generation:
            tags["headway.first_step"] = str(run.first_step)
            first = self._find(TrackedRun(run.id, run.name, run.path))
            if first is not None:
                tags["mlflow.parentRunId"] = first.info.run_id
        started = None if run.started is None else int(1000 * run.started)
        return self._client.create_run(self._experiment_id(), started, tags, run.title)

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except Exception:
                found = self._client.get_experiment_by_name(self._experiment)  # another run may have made it since
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise Refused(
                f"the experiment '{self._experiment}' was deleted in MLflow",
                where=redact(self._uri),
                fix=f"mlflow experiments restore --experiment-id {found.experiment_id}, or name another one",
            )
        return str(found.experiment_id)

    # What it has -----------------------------------------------------------------------------------------------------

    def _latest_steps(self) -> dict[str, int]:
        """Return the highest step that the server has of each metric."""
        found = self._client.get_run(self._run).data
        # `metrics` of the data has values only; the steps are in the message behind it.
        return {metric.key: int(metric.step) for metric in found._metric_objs}

    def _missing(self, batch: Batch) -> list[Point]:
        """Return the points of a batch that the server has not.

        Steps of a metric mostly rise, and arrive in their order: then the last one shows how far it came. Where they do
        not rise, as for events of repeated steps, the metric's history shows it.
        """
        running = dict(batch.highest)
        histories: dict[str, set[int]] = {}
        found = []
        for point in batch.points:
            key = metric_name(point.name)
            rises = point.step > running.get(point.name, -1)
            running[point.name] = max(point.step, running.get(point.name, -1))
            if point.step > self._latest.get(key, -1):
                found.append(point)
            elif not rises:
                if key not in histories:
                    history = self._client.get_metric_history(self._run, key)
                    histories[key] = {int(metric.step) for metric in history}
                if point.step not in histories[key]:
                    found.append(point)
        return found

    # The description -------------------------------------------------------------------------------------------------

    def _send_parameters(self, description: Description, there: Any) -> None:
        """Send parameters. They never change at the server: a value that has changed since becomes a tag."""
        from mlflow.entities import Param

        wanted = _values(description.parameters)
        missing = [Param(name, text) for name, text in wanted.items() if name not in there.params]
        for start in range(0, len(missing), _PARAMETERS):
            self._client.log_batch(self._run, params=missing[start : start + _PARAMETERS], synchronous=True)
        changed = {}
        for name, text in {**_values(description.defaults), **wanted}.items():
            tag = f"{_NOW}{name}"[:_NAME_CHARACTERS]
            known = there.tags.get(tag, there.params.get(name))
            if known is not None and known != text:
                changed[tag] = text
        self._send_tags(changed)

    def _send_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        found = [RunTag(name, text) for name, text in tags.items()]
        for start in range(0, len(found), _TAGS):
            self._client.log_batch(self._run, tags=found[start : start + _TAGS], synchronous=True)

    def _send_datasets(self, description: Description, there: Any) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = there.dataset_inputs if there is not None else ()
        known = {(one.dataset.name, one.dataset.digest) for one in inputs}
        # The digest has at most 36 characters (`mlflow.utils.validation`).
        wanted = [
            DatasetInput(
                Dataset(one.name[:500], one.digest[:36], source_type="headway", source=one.source),
                [InputTag("mlflow.data.context", "training")],
            )
            for one in description.datasets
        ]
        new = [one for one in wanted if (one.dataset.name, one.dataset.digest) not in known]
        if new:
            self._client.log_inputs(self._run, datasets=new)

    def _send_files(self, description: Description) -> None:
        sent = dict(self._kept.get("files") or {})
        for name, text in description.files.items():
            if sent.get(name) != (known := fingerprint(text)[:16]):
                self._client.log_text(self._run, text, name)
                sent[name] = known
                self._kept = {**self._kept, "files": sent}

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn errors of the client into those of the contract."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            raise _explained(error, self._uri) from error
        except (OSError, TimeoutError) as error:  # errors of `requests` are such
            raise Unreachable(_first_line(error)) from error


def _explained(error: Any, uri: str) -> Exception:
    code = error.get_http_status_code()
    text = _first_line(error)
    if error.error_code == "RESOURCE_DOES_NOT_EXIST":
        return LostRun("the run is gone at the server")
    if code in (401, 403):
        return Refused(
            f"MLflow refuses access ({code}): {text}",
            where=redact(uri),
            fix=f"export {_CREDENTIALS}, or MLFLOW_TRACKING_TOKEN",
        )
    if 400 <= code < 500 and code not in (404, 408, 409, 425, 429):
        return Refused(f"MLflow refuses this run ({code}): {text}", where=redact(uri))
    return Unreachable(text)


def _first_line(error: BaseException) -> str:
    text = redact(str(error)).partition("\n")[0]
    return text if len(text) <= 200 else f"{text[:200]}..."


def _tags(description: Description) -> dict[str, str]:
    tags = dict(description.tags)
    if "headway.git.commit" in tags:
        tags["mlflow.source.git.commit"] = tags["headway.git.commit"]
    return tags


def metric_name(name: str) -> str:
    """Return the name of a metric at the server: memory and machines in MLflow's group of system metrics."""
    return _name(f"system/{name}" if name.startswith(_SYSTEM) else name)


def _name(name: str) -> str:
    return _NOT_ALLOWED.sub("_", name)[:_NAME_CHARACTERS]


def _values(texts: Mapping[str, str]) -> dict[str, str]:
    """Return names and values as the server takes them."""
    return {_name(name): text[:_CHARACTERS] for name, text in texts.items()}


def _send_model(client: Any, run: Any, model: RunModel, upload: ModelUpload) -> None:
    """Log a run's model or its card, and register it if that is wanted; what an earlier try has done stays.

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
        source = f"{run.info.artifact_uri}/{_CARD_FOLDER}" if made is None else f"models:/{made}"
        tags = {"headway.step": str(model.step)}
        wanted = RegisteredModel(str(upload.register), upload.alias, source, model.card, tags)
        register_model(client, run, wanted, made)


def _metric(point: Point) -> Any:
    from mlflow.entities import Metric

    return Metric(metric_name(point.name), point.value, int(1000 * point.time), point.step)


def _address(settings: MlflowConfig, where: str) -> tuple[str, str]:
    """Return the server and the experiment."""
    uri = settings.uri or address_from(
        "MLFLOW_TRACKING_URI",
        "the MLflow server",
        problem=mlflow_uri_problem,
        credentials=_CREDENTIALS,
        example="http://HOST:5000",
    )
    if uri is None:
        raise ConfigError(
            "no MLflow server is named",
            where=f"{where}.mlflow.uri, MLFLOW_TRACKING_URI",
            fix="export MLFLOW_TRACKING_URI=http://HOST:5000, or give {mlflow: {uri: http://HOST:5000}}",
        )
    return uri, settings.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or _DEFAULT_EXPERIMENT


def _place(settings: MlflowConfig, where: str) -> str:
    uri, experiment = _address(settings, where)
    return f"{uri}, experiment {experiment}"


def _check(settings: MlflowConfig, where: str) -> None:
    uri, _ = _address(settings, where)
    if settings.register is not None and uri.startswith("file:"):
        raise ConfigError(
            f"a model is registered at a server, and {uri} is a folder",
            where=f"{where}.mlflow.register, {where}.mlflow.uri",
            fix="name a server, {uri: http://HOST:5000}, or leave register out",
        )
    if settings.log_model and settings.only is None and importlib.util.find_spec("transformers") is None:
        raise missing_extra("transformers", "mlflow,hf", "log_model")
    if not uri.startswith(("http://", "https://")):
        return
    request = urllib.request.Request(f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1")
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if user:
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}".encode()
        request.add_header("Authorization", f"Basic {base64.b64encode(pair).decode()}")
    elif token:
        request.add_header("Authorization", f"Bearer {token}")
    ask_server(
        request,
        "MLflow server",
        credentials=f"{_CREDENTIALS}, or MLFLOW_TRACKING_TOKEN",
        address=f"{where}.mlflow.uri, or MLFLOW_TRACKING_URI",
    )


SPEC = SinkSpec(
    _place,
    lambda settings, run, where: MlflowSink(*_address(settings, where), settings),
    _check,
    library=("mlflow", "mlflow-skinny", "mlflow"),
)
