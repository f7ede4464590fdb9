"""The sink for Weights & Biases: at least once, with the same step and value.

Its client hands lines to a process of its own, which buffers them. So points count as arrived when the client has
finished a session; the follower has it finish one every few minutes, and after a kill sends the last ones again. The
server ignores a step that it has.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from headway.config.sections.track import WandbConfig
from headway.core.credentials.secrets import redact
from headway.core.errors import ConfigError, missing_extra
from headway.tracking.cursor import FOLDER
from headway.tracking.sink import Batch, Description, Refused, Sink, SinkSpec, Status, TrackedRun, Unreachable

_DEFAULT_PROJECT = "headway"
#: Set for the client if the user has not.
_VARIABLES = {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_ERROR_REPORTING": "false"}
_CODES: dict[Status, int] = {"running": 0, "finished": 0, "failed": 1, "killed": 1}


class WandbSink:
    """Sends a run to Weights & Biases, or writes it for `wandb sync`.

    Args:
        project: The project.
        entity: Its owner; None is the key's.
        mode: Whether to send, or only to write.
    """

    def __init__(self, project: str, entity: str | None, mode: Literal["online", "offline"]) -> None:
        self._project, self._entity, self._mode = project, entity, mode
        self._run: TrackedRun | None = None
        self._session: Any = None
        self._state: dict[str, Any] = {}

    def open(self, run: TrackedRun, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Remember the run; a session begins when there is something to send."""
        _client()
        self._run, self._state = run, dict(state)
        return self._state

    def describe(self, description: Description) -> Mapping[str, Any]:
        """Send the config, facts about the run, and files."""
        session = self._begin()
        session.config.update(dict(description.parameters), allow_val_change=True)
        session.config.update({"headway": dict(description.tags)}, allow_val_change=True)
        session.config.update(
            {"datasets": {one.name: {"digest": one.digest, "source": one.source} for one in description.datasets}},
            allow_val_change=True,
        )
        for name, text in description.files.items():
            path = Path(session.dir) / "headway" / name  # the client uploads what is there when it finishes
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return self._state

    def send(self, batch: Batch) -> None:
        """Hand the points over; `flush` makes sure that they have arrived."""
        session = self._begin()
        for point in batch.points:
            session.log({point.name: point.value}, step=point.step)

    def flush(self) -> Mapping[str, Any]:
        """Finish the session."""
        self._finish()
        return self._state

    def set_status(self, status: Status, ended: float | None) -> None:
        """Finish the session of a run that has ended, with an exit code; W&B has no other words for how it stands."""
        # Kept, so that a session which only describes the run again does not make a failed one look finished.
        self._state["status"] = status
        if status == "running":
            return
        session = self._begin()
        session.summary["headway/status"] = status
        if status == "killed":
            session.mark_preempting()
        self._finish()

    def close(self) -> None:
        """Finish the session."""
        with suppress(Unreachable):
            self._finish()

    def _begin(self) -> Any:
        if self._session is not None:
            return self._session
        run = self._run
        assert run is not None, "open"
        wandb = _client()
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
        )
        try:
            self._session = wandb.init(
                project=self._project,
                entity=self._entity,
                id=run.id[:16] + run.suffix,
                name=run.title,
                group=run.name,
                dir=str(run.path / FOLDER),
                mode=self._mode,
                resume="allow",
                reinit="create_new",
                settings=settings,
            )
        except wandb.errors.AuthenticationError as error:
            raise Refused(
                f"Weights & Biases refuses the key: {redact(str(error))}", where="WANDB_API_KEY", fix="wandb login"
            ) from error
        except (wandb.errors.Error, OSError) as error:
            raise Unreachable(redact(str(error)).partition("\n")[0]) from error
        return self._session

    def _finish(self) -> None:
        code = _CODES.get(self._state.get("status", "running"), 0)
        session, self._session = self._session, None
        if session is None:
            return
        try:
            session.finish(exit_code=code)
        except Exception as error:  # the client's process may be gone, with what was not finished
            raise Unreachable(redact(str(error)).partition("\n")[0]) from error


def _client() -> Any:
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        import wandb
    except ImportError:
        raise missing_extra("wandb", "wandb", "the tracker wandb") from None
    return wandb


def _address(settings: WandbConfig) -> tuple[str, str | None, str]:
    """Return project, entity and mode."""
    environment = os.environ
    project = settings.project or environment.get("WANDB_PROJECT") or _DEFAULT_PROJECT
    return (
        project,
        settings.entity or environment.get("WANDB_ENTITY"),
        settings.mode or environment.get("WANDB_MODE") or "online",
    )


def _check(settings: WandbConfig, where: str) -> None:
    if _address(settings)[2] == "offline" or os.environ.get("WANDB_API_KEY"):
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


def _place(settings: WandbConfig, where: str) -> str:
    project, entity, mode = _address(settings)
    return f"{mode}, {entity or 'own'}/{project}"


def _make(settings: WandbConfig, run: Path, where: str) -> Sink:
    project, entity, mode = _address(settings)
    return WandbSink(project, entity, "offline" if mode == "offline" else "online")


SPEC = SinkSpec(_place, _make, _check, library=("wandb", "wandb", "wandb"))
