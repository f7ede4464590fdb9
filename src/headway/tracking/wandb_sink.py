"""The sinks for Weights & Biases.

Its client hands lines to a process of its own, which buffers them. So points count as arrived when the client has
finished a session; the follower has it finish one every few minutes, and after a kill sends the last ones again.
Online that is harmless: the server ignores a step that it has.

Offline there is no server to ask. `wandb sync` sends the folders of a run one after the other, gives steps that are not
above the last one other numbers, and gives up at a folder that a kill has left empty. So a session is written where
nobody looks for it and renamed into place when it is whole. Each folder says up to which step it goes, and the next one
begins above that: every step is in one folder, whatever was killed or sent twice.
"""

from __future__ import annotations

import netrc
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from headway.config.sections.track import ModelUpload, WandbConfig
from headway.core.credentials.secrets import redact
from headway.core.errors import ConfigError, needing
from headway.core.files.atomic import sync_folder, write_json
from headway.core.files.foreign import read_json_or_empty
from headway.core.files.hashes import fingerprint
from headway.tracking.cursor import FOLDER
from headway.tracking.run_model import CARD_FILE
from headway.tracking.sink import (
    Batch,
    Description,
    Refused,
    RunModel,
    Sink,
    SinkSpec,
    Status,
    TrackedRun,
    Unreachable,
)

_DEFAULT_PROJECT = "headway"
#: Set for the client if the user has not.
_VARIABLES = {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_ERROR_REPORTING": "false"}
#: In a folder of an offline session: the last step in it, and whose it is.
_SPAN_FILE = "headway.json"
#: W&B's registry of models.
_REGISTRY = "wandb-registry-model"
_CODES: dict[Status, int] = {"running": 0, "finished": 0, "failed": 1, "killed": 1}


class WandbSink:
    """Sends a run to Weights & Biases: at least once, with the same step and value.

    Args:
        project: The project.
        entity: Its owner; None is the key's.
        upload: What it gets of the run's model.
    """

    _mode: Literal["online", "offline"] = "online"

    def __init__(self, project: str, entity: str | None, upload: ModelUpload | None = None) -> None:
        self._project = project
        self._entity = entity
        self.upload = upload or ModelUpload()
        self._run: TrackedRun | None = None
        self._session: Any = None
        self._state: dict[str, Any] = {}

    def open(self, run: TrackedRun, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Remember the run; a session begins when there is something to send."""
        _client()
        self._run = run
        self._state = dict(state)
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

    def send_model(self, model: RunModel) -> Mapping[str, Any]:
        """Log the model of the finished run as an artifact; W&B makes no new version of the same content."""
        session = self._begin()
        wandb = _client()
        assert self._run is not None, "open"
        name = self.upload.register or f"model-{_id(self._run)}"
        artifact = wandb.Artifact(name, type="model", description=model.card, metadata={"step": model.step})
        if model.folder is None:
            with artifact.new_file(CARD_FILE, encoding="utf-8") as file:
                file.write(model.card)
        else:
            artifact.add_dir(str(model.folder))
        logged = session.log_artifact(artifact, aliases=[self.upload.alias])
        if self.upload.register is not None:
            logged.wait()
            session.link_artifact(logged, f"{_REGISTRY}/{name}", [self.upload.alias])
        self._finish()
        return self._state

    def close(self) -> None:
        """Finish the session."""
        with suppress(Unreachable):
            self._finish()

    def _folder(self, run: TrackedRun) -> Path:
        """Return where the client makes its folder `wandb`."""
        return run.path / FOLDER

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
                id=_id(run),
                name=run.title,
                group=run.name,
                dir=str(self._folder(run)),
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
        session = self._session
        self._session = None
        if session is None:
            return
        try:
            session.finish(exit_code=code)
        except Exception as error:  # the client's process may be gone, with what was not finished
            raise Unreachable(redact(str(error)).partition("\n")[0]) from error


class OfflineWandbSink(WandbSink):
    """Writes a run for `wandb sync`: every step in one folder, with all that is recorded before the next step.

    What is recorded later for a step that is written already, as where a restart repeats steps, is left out: W&B takes
    steps in rising order only.
    """

    _mode = "offline"

    def open(self, run: TrackedRun, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Find out which steps are written, and remove what a killed follower has left."""
        super().open(run, state)
        self._target = fingerprint([self._project, self._entity, _id(run)])[:8]
        self._unfinished = run.path / FOLDER / f"wandb-unfinished-{self._target}"
        shutil.rmtree(self._unfinished, ignore_errors=True)
        # A folder may be newer than the state, after a kill, or gone, after `wandb clean`.
        whole = (run.path / FOLDER / "wandb").glob(f"offline-run-*-{_id(run)}")
        self._written: int = max([state.get("written", -1), *map(self._last_step, whole)])
        self._logged = self._written
        held = state.get("held") or {}
        #: The newest step and its values. More may be recorded for it, so it is written when the next one comes.
        self._step: int = held.get("step", -1)
        self._values = {name: float(value) for name, value in held.get("values", {}).items()}
        return self._state

    def describe(self, description: Description) -> Mapping[str, Any]:
        """Write the description; `wandb sync` sends the files that the client was told of."""
        state = super().describe(description)
        session = self._begin()
        for name in description.files:
            session.save(str(Path(session.dir) / "headway" / name), base_path=session.dir, policy="now")
        return state

    def send(self, batch: Batch) -> None:
        """Write all steps but the newest; `flush` finishes the folder."""
        for point in batch.points:
            if point.step > self._step:
                self._log_newest()
                self._step = point.step
                self._values = {}
            if point.step == self._step:
                self._values.setdefault(point.name, point.value)

    def flush(self) -> Mapping[str, Any]:
        """Finish the folder, and keep the newest step."""
        self._finish()
        values = {name: repr(value) for name, value in self._values.items()}  # JSON has no NaN
        self._state["written"] = self._written
        self._state["held"] = {"step": self._step, "values": values} if self._step > self._written else None
        return self._state

    def set_status(self, status: Status, ended: float | None) -> None:
        """Write the newest step, too, of a run that has ended."""
        if status != "running":
            self._log_newest()
        super().set_status(status, ended)

    def close(self) -> None:
        """Drop a folder that is not whole; the next follower writes its steps."""
        session = self._session
        self._session = None
        if session is not None:
            with suppress(Exception):  # the client's process may be gone
                session.finish(exit_code=1)
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def _log_newest(self) -> None:
        if self._values and self._step > self._logged:
            self._begin().log(self._values, step=self._step)
            self._logged = self._step

    def _folder(self, run: TrackedRun) -> Path:
        # Another one each time: the client's process of a killed follower may still write to the last one.
        self._unfinished.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self._unfinished))

    def _finish(self) -> None:
        session = self._session
        super()._finish()
        if session is None:
            return
        assert self._run is not None, "open"
        folder = Path(session.dir).parent
        try:
            for path in folder.glob("*.wandb"):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            write_json(folder / _SPAN_FILE, {"target": self._target, "last_step": self._logged})
            place = self._run.path / FOLDER / "wandb" / folder.name
            place.parent.mkdir(exist_ok=True)
            folder.rename(place)
            sync_folder(place.parent)
        except OSError as error:
            raise Unreachable(f"{folder.name} cannot be written: {error.strerror or error}") from error
        self._written = self._logged

    def _last_step(self, folder: Path) -> int:
        """Return the last step in a folder; -1 if it is another tracker's, or of a version that did not say."""
        found = read_json_or_empty(folder / _SPAN_FILE)
        last = found.get("last_step")
        return last if found.get("target") == self._target and isinstance(last, int) else -1


def _id(run: TrackedRun) -> str:
    return run.id[:16] + run.suffix


def _client() -> Any:
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    with needing("wandb", "wandb", "the tracker wandb"):
        import wandb
    return wandb


def _address(settings: WandbConfig) -> tuple[str, str | None, str]:
    """Return project, entity and mode."""
    project = settings.project or os.environ.get("WANDB_PROJECT") or _DEFAULT_PROJECT
    entity = settings.entity or os.environ.get("WANDB_ENTITY")
    return project, entity, settings.mode or os.environ.get("WANDB_MODE") or "online"


def _check(settings: WandbConfig, where: str) -> None:
    if _address(settings)[2] == "offline":
        if settings.register is not None:
            raise ConfigError(
                "a model is registered at a server, and mode is offline",
                where=f"{where}.wandb.register, {where}.wandb.mode, WANDB_MODE",
                fix="leave register out: wandb sync sends the artifact, or give mode: online",
            )
        return
    if os.environ.get("WANDB_API_KEY"):
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
    kind = OfflineWandbSink if mode == "offline" else WandbSink
    return kind(project, entity, settings)


SPEC = SinkSpec(_place, _make, _check, library=("wandb", "wandb", "wandb"))
