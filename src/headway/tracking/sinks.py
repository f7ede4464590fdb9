"""The sinks by their names in the config, and what can be checked about them before a run begins.

Nothing here imports a tracker's library, NumPy or torch: the process that starts attempts calls it.
"""

from __future__ import annotations

import base64
import importlib.util
import netrc
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from headway.config.base import Section
from headway.config.checks import combined
from headway.config.complaints import complaints
from headway.config.document import parse
from headway.config.track import (
    MlflowConfig,
    OwnTrackerConfig,
    TensorboardConfig,
    TrackConfig,
    WandbConfig,
    mlflow_uri_problem,
    tensorboard_folder,
)
from headway.core.console import warning
from headway.core.errors import ConfigError, HeadwayError, missing_extra
from headway.core.functions import load_attribute
from headway.core.secrets import credential_in, redact

if TYPE_CHECKING:
    from headway.tracking.sink import Sink

_DEFAULT_NAME = "headway"
#: How long a server may take for the question whether it takes the credentials.
_ASK_SECONDS = 3.0
#: How long a class of the user's own may take to be imported and made.
_CHECK_SECONDS = 120.0


@dataclass(frozen=True)
class Target:
    """A tracker with everything that the environment says about it."""

    name: str
    """As in the config."""
    place: str
    """Where it sends: a cursor holds for this place only."""
    config: TrackConfig

    @property
    def label(self) -> str:
        """Name and place, for people."""
        return f"{self.name} ({redact(self.place)})" if self.place else self.name


class _Chosen(Section):
    track: list[TrackConfig]


def parse_trackers(texts: Sequence[str]) -> list[TrackConfig]:
    """Parse values of `--to`: each is an item of `track` in YAML.

    Raises:
        ConfigError: one is not an item of `track`.
    """
    if not texts:
        return []
    tree = parse("track:\n" + "".join(f"- {text}\n" for text in texts), "--to", lines=False)
    try:
        return _Chosen.model_validate(tree.plain()).track
    except ValidationError as error:
        model: type[BaseModel] = _Chosen
        raise combined(complaints(tree, error, model)) from None


def resolve(config: TrackConfig, where: str) -> Target:
    """Return where a tracker sends, by the config and the environment.

    Raises:
        ConfigError: that is not known, or has credentials in it.
    """
    settings = config.settings
    if isinstance(settings, MlflowConfig):
        uri, experiment = _mlflow(settings, where)
        return Target(config.name, f"{uri}, experiment {experiment}", config)
    if isinstance(settings, TensorboardConfig):
        return Target(config.name, str(tensorboard_folder(settings, Path())), config)
    if isinstance(settings, WandbConfig):
        project, entity, mode = _wandb(settings)
        return Target(config.name, f"{mode}, {entity or 'own'}/{project}", config)
    return Target(config.name, "", config)


def make_sink(config: TrackConfig, run: Path, where: str) -> Sink:
    """Make the sink of a tracker.

    Raises:
        ConfigError: its class cannot be imported or made, or something is missing.
    """
    settings = config.settings
    if isinstance(settings, MlflowConfig):
        from headway.tracking.mlflow_sink import MlflowSink

        return MlflowSink(*_mlflow(settings, where))
    if isinstance(settings, TensorboardConfig):
        from headway.tracking.tensorboard_sink import TensorboardSink

        return TensorboardSink(tensorboard_folder(settings, run))
    if isinstance(settings, WandbConfig):
        from headway.tracking.wandb_sink import WandbSink

        project, entity, mode = _wandb(settings)
        return WandbSink(project, entity, "offline" if mode == "offline" else "online")
    return _own(settings, where)


def _own(settings: OwnTrackerConfig, where: str) -> Sink:
    _, found = load_attribute(settings.sink, where, "class")
    methods = ("open", "describe", "send", "flush", "set_status", "close")
    missing = [name for name in methods if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(
            f"{settings.sink} is no sink: it has no {', '.join(missing)}",
            where=where,
            fix="give it the methods of headway.tracking.Sink (docs/extending/tracker.md)",
        )
    try:
        sink: Sink = found(**settings.options)
    except HeadwayError:
        raise
    except Exception as error:  # it is the user's code
        raise ConfigError(f"{settings.sink} cannot be made: {error}", where=where, fix="correct its options") from error
    return sink


def check_trackers(configs: Sequence[TrackConfig]) -> None:
    """Check the trackers of a run before its first step: what is missing, and credentials where that is cheap.

    A server that does not answer is a warning: it costs no step, and gets everything later.

    Raises:
        ConfigError: something is wrong.
    """
    seen: dict[tuple[str, str], str] = {}
    for number, config in enumerate(configs):
        where = f"track.{number}"
        target = resolve(config, where)
        if (before := seen.setdefault((target.name, target.place), where)) != where:
            raise ConfigError(
                f"two trackers send to the same place: {target.label}",
                where=f"{before}, {where}",
                fix="remove one of them",
            )
        settings = config.settings
        if isinstance(settings, MlflowConfig):
            _check_installed("mlflow", "mlflow-skinny", "mlflow", config.name)
            _ask_mlflow(_mlflow(settings, where)[0], where)
        elif isinstance(settings, TensorboardConfig):
            _check_installed("tensorboard", "tensorboard", "tensorboard", config.name)
        elif isinstance(settings, WandbConfig):
            _check_installed("wandb", "wandb", "wandb", config.name)
            _check_wandb_key(settings, where)
        else:
            _check_module(settings, where)


def _check_installed(module: str, package: str, extra: str, name: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise missing_extra(package, extra, f"the tracker {name}")


def _check_module(settings: OwnTrackerConfig, where: str) -> None:
    """Import the class of a tracker in a process of its own: it may load what must not be copied into workers."""
    import subprocess

    from headway.core.module_command import module_command

    try:
        done = subprocess.run(
            module_command("headway.tracking.check_own", settings.model_dump_json(), where),
            capture_output=True, text=True, check=False, timeout=_CHECK_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{settings.sink} is not made within {_CHECK_SECONDS:.0f} s",
            where=where,
            fix="wait for nothing in its constructor: connect in `open`",
        ) from None
    if done.returncode:
        what, _, fix = done.stdout.strip().partition("\n")
        raise ConfigError(what or f"{settings.sink} cannot be made", where=where, fix=fix or "correct it")


def _mlflow(settings: MlflowConfig, where: str) -> tuple[str, str]:
    uri, named = settings.uri, f"{where}.mlflow.uri"
    if uri is None:
        uri, named = os.environ.get("MLFLOW_TRACKING_URI"), "MLFLOW_TRACKING_URI"
        if not uri:
            raise ConfigError(
                "no MLflow server is named",
                where=f"{where}.mlflow.uri, MLFLOW_TRACKING_URI",
                fix="export MLFLOW_TRACKING_URI=http://HOST:5000, or give {mlflow: {uri: http://HOST:5000}}",
            )
        if (what := credential_in(uri)) is not None:
            raise ConfigError(
                f"the address of the MLflow server has a credential in it: {what}",
                where=named,
                fix="remove it, and export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            )
        if (problem := mlflow_uri_problem(uri)) is not None:
            raise ConfigError(problem, where=named, fix="export MLFLOW_TRACKING_URI=http://HOST:5000")
    experiment = settings.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or _DEFAULT_NAME
    return uri, experiment


def _ask_mlflow(uri: str, where: str) -> None:
    """Ask a server whether it takes the credentials; warn if it does not answer."""
    if not uri.startswith(("http://", "https://")):
        return
    request = urllib.request.Request(f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1")
    user, token = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_TOKEN")
    if user:
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}".encode()
        request.add_header("Authorization", f"Basic {base64.b64encode(pair).decode()}")
    elif token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_ASK_SECONDS):
            return
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise ConfigError(
                f"the MLflow server refuses access ({error.code})",
                where=redact(uri),
                fix="export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
            ) from None
        if error.code in (404, 405):
            raise ConfigError(
                f"this is no MLflow server: it answers {error.code}",
                where=redact(uri),
                fix=f"correct the address: {where}.mlflow.uri, or MLFLOW_TRACKING_URI",
            ) from None
        why = f"it answers {error.code}"
    except (OSError, ValueError) as error:
        why = str(getattr(error, "reason", error))
    warning(f"the MLflow server at {redact(uri)} does not answer now ({why}); it gets everything when it does")


def _wandb(settings: WandbConfig) -> tuple[str, str | None, str]:
    environment = os.environ
    project = settings.project or environment.get("WANDB_PROJECT") or _DEFAULT_NAME
    return (
        project,
        settings.entity or environment.get("WANDB_ENTITY"),
        settings.mode or environment.get("WANDB_MODE") or "online",
    )


def _check_wandb_key(settings: WandbConfig, where: str) -> None:
    if _wandb(settings)[2] == "offline" or os.environ.get("WANDB_API_KEY"):
        return
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0]
    try:
        known = netrc.netrc(os.environ.get("NETRC")).authenticators(host.partition(":")[0])
    except (OSError, netrc.NetrcParseError):
        known = None
    if known is None:
        raise ConfigError(
            "there is no key for Weights & Biases",
            where=f"WANDB_API_KEY, {where}.wandb",
            fix="wandb login, or export WANDB_API_KEY=..., or {wandb: {mode: offline}}",
        )
