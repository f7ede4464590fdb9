"""`headway track`: following runs from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headway.config.sections.track import TrackConfig
from headway.core.console import notice, warning
from headway.core.errors import ConfigError, HeadwayError
from headway.telemetry.record import Run, open_run
from headway.tracking.cursor import CursorFile, cursor_name
from headway.tracking.describe import run_id
from headway.tracking.follow import follow_all, raise_first
from headway.tracking.follower import Waiting, is_live
from headway.tracking.mlflow_sink import MlflowSink
from headway.tracking.sink import TrackedRun
from headway.tracking.sinks import check_trackers, make_sink, parse_trackers, resolve

#: How long `--once`, and the command for a run that has ended, try to reach a tracker.
_PATIENCE_SECONDS = 30.0


def track_runs(runs: Sequence[Path], to: Sequence[str], *, once: bool, model: Path | None) -> None:
    """Send runs to trackers, and follow those that are active.

    Args:
        runs: Run directories.
        to: Items of `track` in YAML; none are those of each run's config.
        once: Send what is there now only.
        model: An export to log to MLflow, too.

    Raises:
        HeadwayError: something is wrong with a run or a tracker, or a tracker did not answer.
    """
    given = parse_trackers(to)
    opened = [open_run(path) for path in runs]
    trackers = {run.path: given or _of_config(run) for run in opened}
    for run in opened:
        check_trackers(trackers[run.path])
    if model is not None and (len(runs) > 1 or not any(one.mlflow for one in trackers[opened[0].path])):
        raise ConfigError(
            "a model is logged to MLflow, for one run", where=f"--model {model}", fix="name one run, and --to mlflow"
        )

    def waiting(path: Path) -> Waiting:
        if once:
            return Waiting(lambda: True, goes_on=lambda: is_live(path), patience_seconds=_PATIENCE_SECONDS)
        return Waiting(lambda: not is_live(path), patience_seconds=_PATIENCE_SECONDS)

    errors = follow_all([(run.path, waiting(run.path)) for run in opened], trackers.__getitem__, warning)
    raise_first(errors)
    for run in opened:
        for number, config in enumerate(trackers[run.path]):
            notice(f"{run.name}: sent to {resolve(config, f'track.{number}').label}")
    if model is not None:
        config = next(one for one in trackers[opened[0].path] if one.mlflow)
        notice(f"logged the model as {_log_model(opened[0], config, model)}")


def _log_model(run: Run, config: TrackConfig, folder: Path) -> str:
    target = resolve(config, "--to")
    cursor = CursorFile(run.path, cursor_name(target.name, target.place))
    try:
        sink = make_sink(config, run.path, "--to")
        assert isinstance(sink, MlflowSink)
        known = cursor.read(run_id(run) or "")
        sink.open(TrackedRun(known.run, run.name, run.path, known.generation), known.state)
        return sink.log_model(folder)
    finally:
        cursor.close()


def _of_config(run: Run) -> list[TrackConfig]:
    items = run.get("track")
    try:
        found = [TrackConfig.model_validate(item) for item in items or []]
    except (TypeError, ValueError) as error:
        raise HeadwayError(
            "the run's trackers cannot be read", where=str(run.path / "config.yaml"), fix="name one with --to"
        ) from error
    if not found:
        raise ConfigError(
            "this run's config names no tracker",
            where=str(run.path / "config.yaml"),
            fix=f"headway track {run.path} --to tensorboard",
        )
    return found
