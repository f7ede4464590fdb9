"""The list `track`: the trackers that a run's metrics are sent to."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from headway.config.base import FUNCTION_PATTERN, LocalPath, Section, conflict

#: Trackers by their name in the config.
TRACKERS = ("mlflow", "opentelemetry", "tensorboard", "trackio", "wandb")
#: Where MLflow can be: a server, or a store that the full package opens itself.
_MLFLOW_SCHEMES = (
    "http", "https", "databricks", "databricks-uc", "uc", "sqlite", "postgresql", "mysql", "mssql", "file",
)  # fmt: skip
#: Names of projects of Trackio, which drops other characters: `my.model` and `mymodel` would be one.
TRACKIO_PATTERN = r"^[A-Za-z0-9_-]+$"
#: Endings of names of projects that would share a file of Trackio with another project.
_TRACKIO_RESERVED = (
    "_system", "_configs", "_traces", "_artifacts", "_artifact_versions", "_artifact_aliases", "_artifact_links",
)  # fmt: skip


# `register` is also a method of the metaclass of all sections, so each class names it, and pydantic warns for nothing.
warnings.filterwarnings("ignore", 'Field name "register"', UserWarning)
RegisteredName = Annotated[str, Field(pattern=r"^[^/:\s]+$")] | None


class ModelUpload(Section):
    """What a tracker gets of the model of a run that has finished ([tracking.md](tracking.md#models))."""

    log_model: bool = False
    """When the run has finished, the follower exports its newest checkpoint and logs that folder."""
    only: Literal["card"] | None = None
    """`card`: log the model card, and no weights."""
    register: RegisteredName = None
    """Name of the registered model of which it becomes a version."""
    alias: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")] = "newest"
    """Name that points to that version from then on."""
    limit_gib: Annotated[float, Field(gt=0.0)] = 20.0
    """A larger model is not logged; a warning says so."""

    @field_validator("alias")
    @classmethod
    def _check_alias(cls, alias: str) -> str:
        if re.fullmatch("latest|v[0-9]+", alias):
            raise ValueError("trackers give this name themselves: choose another one")
        return alias

    @model_validator(mode="after")
    def _check_is_logged(self) -> Self:
        for key in ("only", "register"):
            if getattr(self, key) is not None and not self.log_model:
                raise conflict(f"{key} says what to do with a model that is not logged", key, "log_model")
        return self


class MlflowConfig(ModelUpload):
    """An MLflow server. Credentials come from `MLFLOW_TRACKING_USERNAME`, `MLFLOW_TRACKING_PASSWORD` or
    `MLFLOW_TRACKING_TOKEN`."""

    uri: str | None = None
    """For example `https://mlflow.example.org`; `MLFLOW_TRACKING_URI` when not given."""
    experiment: Annotated[str, Field(min_length=1)] | None = None
    """Made if it does not exist; `MLFLOW_EXPERIMENT_NAME` when not given, else `headway`."""
    register: RegisteredName = None
    """Name of the registered model of which the logged one becomes a version."""

    @field_validator("uri")
    @classmethod
    def _check_uri(cls, uri: str | None) -> str | None:
        return _checked(uri, mlflow_uri_problem)


class OpentelemetryConfig(Section):
    """A collector of OpenTelemetry, by OTLP over HTTP. Credentials come from `OTEL_EXPORTER_OTLP_HEADERS`."""

    endpoint: str | None = None
    """For example `http://127.0.0.1:4318`, to which `/v1/metrics` is added; `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` or
    `OTEL_EXPORTER_OTLP_ENDPOINT` when not given, else `http://localhost:4318`."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        return _checked(endpoint, http_problem)


class TensorboardConfig(Section):
    """Event files for TensorBoard."""

    folder: LocalPath | None = None
    """Folder of the run's event files; `tensorboard` in the run directory when not given."""


class TrackioConfig(Section):
    """Trackio: its store on this machine, or a server of yours. The token comes from `TRACKIO_WRITE_TOKEN`."""

    project: Annotated[str, Field(pattern=TRACKIO_PATTERN)] = "headway"
    """The project."""
    server: str | None = None
    """For example `https://trackio.example.org`; `TRACKIO_SERVER_URL` when not given, else the store of this machine
    in `TRACKIO_DIR`."""

    @field_validator("project")
    @classmethod
    def _check_project(cls, project: str) -> str:
        if project.startswith("registry-") or project.endswith(_TRACKIO_RESERVED):
            raise ValueError("Trackio keeps this name for itself: give another one")
        return project

    @field_validator("server")
    @classmethod
    def _check_server(cls, server: str | None) -> str | None:
        return _checked(server, http_problem)


class WandbConfig(ModelUpload):
    """Weights & Biases. The key comes from `WANDB_API_KEY`, or from `wandb login`."""

    project: Annotated[str, Field(min_length=1)] | None = None
    """`WANDB_PROJECT` when not given, else `headway`."""
    entity: Annotated[str, Field(min_length=1)] | None = None
    """`WANDB_ENTITY` when not given, else that of the key's owner."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes to `tracking/wandb` in the run directory, for `wandb sync`. `WANDB_MODE` when not given, else
    `online`."""
    register: RegisteredName = None
    """Name of the collection in W&B's registry of models to which the artifact is linked."""


class OwnTrackerConfig(Section):
    """A tracker of your own ([extending/tracker.md](extending/tracker.md))."""

    sink: Annotated[str, Field(pattern=FUNCTION_PATTERN)]
    """`package.module:Class`, importable from the working directory."""
    options: dict[str, Any] = {}
    """Arguments of the class."""


class TrackConfig(Section):
    """One tracker ([tracking.md](tracking.md)): `mlflow`, `opentelemetry`, `tensorboard`, `trackio`, `wandb` or
    `package.module:Class`, alone or with its keys, as in `{mlflow: {experiment: tiny}}`."""

    mlflow: MlflowConfig | None = None
    """Sends to an MLflow server."""
    opentelemetry: OpentelemetryConfig | None = None
    """Sends to a collector of OpenTelemetry."""
    tensorboard: TensorboardConfig | None = None
    """Writes event files."""
    trackio: TrackioConfig | None = None
    """Writes to the store of Trackio, or sends to its server."""
    wandb: WandbConfig | None = None
    """Sends to Weights & Biases."""
    own: OwnTrackerConfig | None = None
    """Sends through a class of yours; `package.module:Class` is short for it."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """Expand the short forms: a name, and a section that is empty or has a class as its key."""
        if isinstance(value, str):
            if re.match(FUNCTION_PATTERN, value):
                return {"own": {"sink": value}}
            if value not in TRACKERS:
                raise _unknown(value)
            return {value: {}}
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((name, keys),) = value.items()
            if isinstance(name, str) and re.match(FUNCTION_PATTERN, name):
                return {"own": {"sink": name, "options": keys or {}}}
            return {name: {} if keys is None and name in TRACKERS else keys}
        return value

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise conflict("an item of the list is one tracker" + (f", not {' and '.join(given)}" if given else ""))
        return self

    @model_serializer(mode="plain")
    def _only_given(self) -> dict[str, Any]:
        return {name: section.model_dump(mode="json") for name, section in self if section is not None}

    @property
    def name(self) -> str:
        """Its key here, or the class of a tracker of the user's own."""
        return self.own.sink if self.own is not None else next(name for name, section in self if section is not None)

    @property
    def settings(self) -> Section:
        """The section that is given."""
        found: Section = next(section for _, section in self if section is not None)
        return found


def _unknown(name: str) -> PydanticCustomError:
    known = (*TRACKERS, "package.module:Class")
    wanted = f"Input should be {', '.join(known[:-1])} or {known[-1]}"
    return PydanticCustomError("choice", "{wanted}", {"wanted": wanted, "names": TRACKERS})


def mlflow_uri_problem(uri: str) -> str | None:
    """Describe what is wrong with the address of an MLflow server; None if nothing is."""
    scheme, colon, _ = uri.partition(":")
    scheme = scheme.partition("+")[0]
    if not colon:
        return None if uri in ("databricks", "databricks-uc") else "this is no address: http://HOST:PORT is one"
    if scheme not in _MLFLOW_SCHEMES:
        near = get_close_matches(scheme, _MLFLOW_SCHEMES, n=1)
        return f"an address does not begin with '{scheme}:'" + (f"; did you mean {near[0]}:?" if near else "")
    return http_problem(uri) if scheme in ("http", "https") else None


def http_problem(url: str) -> str | None:
    """Describe what is wrong with the address of a server; None if nothing is."""
    scheme, _, rest = url.partition(":")
    if scheme not in ("http", "https"):
        return "this is no address: http://HOST:PORT is one"
    host = rest.removeprefix("//").partition("/")[0].rpartition("@")[2]  # credentials are found elsewhere
    if not rest.startswith("//") or not host or " " in url:
        return "this address names no host: http://HOST:PORT does"
    port = host.rpartition(":")[2]
    if ":" in host and not host.endswith("]") and not (port.isdecimal() and int(port) < 65536):
        return "the port of this address is no number below 65536"
    return None


def _checked(address: str | None, problem: Callable[[str], str | None]) -> str | None:
    found = None if address is None else problem(address)
    if found is not None:
        raise ValueError(found)
    return address


def tensorboard_folder(settings: TensorboardConfig, run: Path) -> Path:
    """Return the folder of a run's event files."""
    return settings.folder or run / "tensorboard"
