"""The sinks by their names in the config, and what can be checked about them before a run begins.

Nothing here imports a tracker's library, NumPy or torch: the process that starts attempts calls it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from headway.config.base import Section
from headway.config.checks.contradictions import combined
from headway.config.loading.complaints import complaints
from headway.config.loading.document import parse
from headway.config.sections.track import (
    MlflowConfig,
    OpentelemetryConfig,
    OwnTrackerConfig,
    TensorboardConfig,
    TrackConfig,
    TrackioConfig,
    WandbConfig,
)
from headway.core.credentials.secrets import redact
from headway.core.errors import ConfigError, HeadwayError, missing_extra
from headway.core.functions import load_attribute
from headway.core.process.command import module_command
from headway.tracking import mlflow_sink, opentelemetry_sink, tensorboard_sink, trackio_sink, wandb_sink
from headway.tracking.sink import Sink, SinkSpec

#: How long a class of the user's own may take to be imported and made.
_CHECK_SECONDS = 120.0


@dataclass(frozen=True)
class Target:
    """A tracker with everything that the environment says about it."""

    name: str
    """As in the config."""
    place: str
    """Where it sends: a cursor holds for this place only."""

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
        raise combined(complaints(tree, error, model), reference=None) from None


def resolve(config: TrackConfig, where: str) -> Target:
    """Return where a tracker sends, by the config and the environment.

    Raises:
        ConfigError: that is not known, or has credentials in it.
    """
    return Target(config.name, _spec(config).place(config.settings, where))


def make_sink(config: TrackConfig, run: Path, where: str) -> Sink:
    """Make the sink of a tracker.

    Raises:
        ConfigError: its class cannot be imported or made, or something is missing.
    """
    return _spec(config).make(config.settings, run, where)


def _spec(config: TrackConfig) -> SinkSpec:
    return SINKS[type(config.settings)]


def _own(settings: OwnTrackerConfig, run: Path, where: str) -> Sink:
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
        spec = _spec(config)
        if spec.library is not None:
            _check_installed(*spec.library, config.name)
        spec.check(config.settings, where)


def _check_installed(module: str, package: str, extra: str, name: str) -> None:
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around the module is not there
        is_there = False
    if not is_there:
        raise missing_extra(package, extra, f"the tracker {name}")


def _check_module(settings: OwnTrackerConfig, where: str) -> None:
    """Import the class of a tracker in a process of its own: it may load what must not be copied into workers."""
    import subprocess

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


#: The sinks by their section of the config.
SINKS: dict[type[BaseModel], SinkSpec] = {
    MlflowConfig: mlflow_sink.SPEC,
    OpentelemetryConfig: opentelemetry_sink.SPEC,
    OwnTrackerConfig: SinkSpec(lambda settings, where: "", _own, _check_module),
    TensorboardConfig: tensorboard_sink.SPEC,
    TrackioConfig: trackio_sink.SPEC,
    WandbConfig: wandb_sink.SPEC,
}
