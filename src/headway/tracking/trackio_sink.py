"""The sink for Trackio: its store on this machine (SQLite), or a server of it.

Trackio's own `log` puts lines into a queue and drops what it cannot write. So this sink calls what that queue calls,
and waits for it. Each record has an id that follows from the run, the step and the names of its values; the store has
an index of ids and ignores one that it has. So each value is there once, however often it is sent.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from headway.config.sections.track import TrackioConfig, http_problem
from headway.core.credentials.secrets import redact
from headway.core.errors import ConfigError, HeadwayError, needing
from headway.core.files.hashes import fingerprint
from headway.core.machine.system import host_name
from headway.tracking.readings import machine_in
from headway.tracking.servers import address_from, ask_server
from headway.tracking.sink import Batch, Description, Refused, SinkSpec, Status, TrackedRun, Unreachable

_TOKEN = "TRACKIO_WRITE_TOKEN"
#: One request takes at most this long.
_TIMEOUT_SECONDS = 20.0
#: Writes rows: dictionaries with `metrics`, `step`, `log_id`, `time`, and perhaps `config`.
_Write = Callable[[Sequence[Mapping[str, Any]]], None]


class TrackioSink:
    """Writes a run to the store of Trackio, or sends it to its server.

    Args:
        project: The project.
        server: The server; None is the store of this machine.
    """

    def __init__(self, project: str, server: str | None) -> None:
        self._project = project
        self._server = server
        self._run = TrackedRun("", "", Path())
        self._write: _Write = _closed
        self._config: dict[str, Any] = {}
        self._state: dict[str, Any] = {}

    def open(self, run: TrackedRun, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Find the store; the run is made by its first record."""
        self._run = run
        self._state = dict(state)
        with _answering():
            self._write = self._to_store() if self._server is None else self._to_server(self._server)
        return self._state

    def describe(self, description: Description) -> Mapping[str, Any]:
        """Write the config, with facts about the run and its data."""
        self._config = {
            **description.parameters,
            "headway": dict(description.tags),
            "datasets": {one.name: {"digest": one.digest, "source": one.source} for one in description.datasets},
            "_Group": description.name,
        }
        return self._write_config()

    def send(self, batch: Batch) -> Mapping[str, Any]:
        """Write the points, those of one record in one row.

        Readings have rows of their own: one that appeared late must not change the id of values that were sent.
        """
        rows = []
        for (step, moment, _), points in groupby(batch.points, key=lambda p: (p.step, p.time, machine_in(p.name))):
            metrics = {point.name: point.value for point in points}
            rows.append(self._row(metrics, step, moment, sorted(metrics)))
        with _answering():
            self._write(rows)
        return self._state

    def flush(self) -> Mapping[str, Any]:
        """Return the state: every record was written."""
        return self._state

    def set_status(self, status: Status, ended: float | None) -> None:
        """Write the status into the config; Trackio has no other place for it."""
        self._state["status"] = status
        self._write_config()

    def close(self) -> None:
        """Forget the store; nothing is left open."""
        self._write = _closed

    def _write_config(self) -> Mapping[str, Any]:
        """Write the config with an empty record, since there is no config without one; it is the same one each time."""
        row = {**self._row({}, 0, 0.0, ["config"]), "time": time.time()}
        headway = {**self._config.get("headway", {}), "headway.status": self._state.get("status", "running")}
        with _answering():
            self._write([{**row, "config": {**self._config, "headway": headway}}])
        return self._state

    def _row(self, metrics: Mapping[str, float], step: int, moment: float, names: Sequence[str]) -> dict[str, Any]:
        place = [self._run.id, self._run.generation, self._project, step, moment, *names]
        return {"metrics": metrics, "step": step, "time": moment, "log_id": fingerprint(place)[:32]}

    def _named(self) -> dict[str, str]:
        run = self._run
        return {"project": self._project, "run": run.title, "run_id": run.id + run.suffix}

    def _to_store(self) -> _Write:
        with needing("trackio", "trackio", "the tracker trackio"):
            from trackio import utils
            from trackio.sqlite_storage import SQLiteStorage
        if utils.is_network_filesystem(utils.TRACKIO_DIR):
            raise Refused(
                "the store of Trackio is on a network file system, where its database breaks",
                where=str(utils.TRACKIO_DIR),
                fix="export TRACKIO_DIR=/a/local/folder, or name a server: {trackio: {server: http://HOST:PORT}}",
            )
        named = self._named()

        def write(rows: Sequence[Mapping[str, Any]]) -> None:
            SQLiteStorage.bulk_log(
                **named,
                metrics_list=[row["metrics"] for row in rows],
                steps=[row["step"] for row in rows],
                timestamps=[datetime.fromtimestamp(row["time"], UTC).isoformat() for row in rows],
                config=next((row["config"] for row in rows if "config" in row), None),
                log_ids=[row["log_id"] for row in rows],
            )

        return write

    def _to_server(self, server: str) -> _Write:
        with needing("trackio", "trackio", "the tracker trackio"):
            from trackio.remote_client import RemoteClient
            from trackio.utils import serialize_values
        client = RemoteClient(
            server, write_token=os.environ.get(_TOKEN), httpx_kwargs={"timeout": _TIMEOUT_SECONDS}, verbose=False
        )
        named = self._named()

        def write(rows: Sequence[Mapping[str, Any]]) -> None:
            logs = [
                {
                    **named,
                    "metrics": serialize_values(row["metrics"]),  # JSON has no NaN
                    "step": row["step"],
                    "config": row.get("config"),
                    "log_id": row["log_id"],
                }
                for row in rows
            ]
            client.predict(api_name="/bulk_log", logs=logs, hf_token=None)

        return write


def _closed(rows: Sequence[Mapping[str, Any]]) -> None:
    raise AssertionError("open")


@contextmanager
def _answering() -> Iterator[None]:
    """Turn errors of the store, and of the server's client, into those of the contract."""
    try:
        yield
    except HeadwayError:
        raise
    except (OSError, RuntimeError, sqlite3.Error) as error:
        raise Unreachable(redact(str(error) or type(error).__name__).partition("\n")[0][:200]) from error
    except Exception as error:
        code = getattr(getattr(error, "response", None), "status_code", None)  # of httpx, which is not imported here
        why = redact(str(error)).partition("\n")[0][:200]
        if code in (400, 401, 403):
            raise Refused(f"Trackio refuses this run ({code})", where=why, fix=f"export {_TOKEN}=...") from error
        raise Unreachable(why) from error


def _server(settings: TrackioConfig) -> str | None:
    if settings.server is not None:
        return settings.server
    found = address_from(
        "TRACKIO_SERVER_URL",
        "the Trackio server",
        problem=http_problem,
        credentials=_TOKEN,
        example="http://HOST:PORT",
    )
    if os.environ.get("TRACKIO_SPACE_ID"):
        raise ConfigError(
            "a run is not sent to a Space of Trackio",
            where="TRACKIO_SPACE_ID",
            fix=f"unset it, and afterwards: trackio sync --project {settings.project} --space-id ...",
        )
    return found


def _place(settings: TrackioConfig, where: str) -> str:
    # The store is on a disk of this machine, so another machine's is another one.
    here = ":".join(filter(None, (host_name(), os.environ.get("TRACKIO_DIR"))))
    return f"{_server(settings) or here}, project {settings.project}"


def _check(settings: TrackioConfig, where: str) -> None:
    server = _server(settings)
    if server is None:
        return
    headers = {"Content-Type": "application/json", "X-Trackio-Write-Token": os.environ.get(_TOKEN, "")}
    nothing = json.dumps({"args": [], "kwargs": {"logs": [], "hf_token": None}}).encode()
    ask_server(
        urllib.request.Request(f"{server.rstrip('/')}/api/bulk_log", data=nothing, headers=headers),
        "Trackio server",
        credentials=_TOKEN,
        address=f"{where}.trackio.server, or TRACKIO_SERVER_URL",
        refusals=(400, 401, 403),
    )


SPEC = SinkSpec(
    _place,
    lambda settings, run, where: TrackioSink(settings.project, _server(settings)),
    _check,
    library=("trackio", "trackio", "trackio"),
)
