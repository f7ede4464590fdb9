"""The sink for Trackio, on a store that stands in for its own: tests/parts has the real one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headway.config.sections.track import TrackConfig
from headway.core.errors import ConfigError, HeadwayError
from headway.core.machine.system import host_name
from headway.tracking import sinks
from headway.tracking.follow import follow
from headway.tracking.follower import Waiting
from headway.tracking.sink import Refused
from headway.tracking.sinks import check_trackers, resolve
from support.followers import append, record, steps, write_run
from support.local_server import LocalServer

OVER = Waiting(lambda: True, sleep=lambda seconds: None, patience_seconds=0.0)
VARIABLES = ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID", "TRACKIO_WRITE_TOKEN", "TRACKIO_DIR")


class Store:
    """The store of Trackio: rows by their id, of which the first one stays, and the newest config of a run."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.configs: dict[str, Any] = {}
        self.error: Exception | None = None
        self.is_on_network = False

    def bulk_log(
        self,
        *,
        project: str,
        run: str,
        run_id: str,
        metrics_list: Sequence[Mapping[str, float]],
        steps: Sequence[int],
        timestamps: Sequence[str],
        config: Mapping[str, Any] | None,
        log_ids: Sequence[str],
    ) -> None:
        if self.error is not None:
            raise self.error
        for metrics, step, moment, log in zip(metrics_list, steps, timestamps, log_ids, strict=True):
            self.rows.setdefault(log, {"run": run_id, "name": run, "step": step, "time": moment, **metrics})
        if config is not None:
            self.configs[run_id] = config

    def losses(self, run: str = "ab" * 16) -> list[tuple[int, float]]:
        return [
            (row["step"], row["train/loss"])
            for row in self.rows.values()
            if row["run"] == run and "train/loss" in row
        ]  # fmt: skip


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    found = Store()
    package, utils, storage = (ModuleType(name) for name in ("trackio", "trackio.utils", "trackio.sqlite_storage"))
    utils.__dict__.update(TRACKIO_DIR=Path("/store"), is_network_filesystem=lambda path: found.is_on_network)
    storage.__dict__.update(SQLiteStorage=SimpleNamespace(bulk_log=found.bulk_log))
    package.__dict__.update(utils=utils)
    for module in (package, utils, storage):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield found


def send(run: Path) -> None:
    tracker = TrackConfig.model_validate("trackio")
    follow(run, tracker, "track.0", report=lambda text: None, waiting=OVER)


def test_each_value_is_stored_once_however_often_it_is_sent(store: Store, tmp_path: Path) -> None:
    run = write_run(tmp_path, [*steps(1, 4), record(4, evaluation__loss="NaN")], outcomes=("died", "finished"))
    send(run)
    assert store.losses() == [(step, 1 / step) for step in (1, 2, 3, 4)]
    first = next(row for row in store.rows.values() if row["step"] == 1)
    assert first["time"] == "1970-01-01T00:18:21+00:00" and first["name"] == "tiny"
    before = len(store.rows)
    next((run / "tracking").glob("trackio-*.json")).unlink()  # the cursor is lost: everything is sent again
    append(run, steps(3, 5, 2))
    send(run)
    assert len(store.rows) == before + 1
    assert store.losses() == [(step, 1 / step) for step in range(1, 6)]


def test_a_reading_that_appears_late_doubles_no_value(store: Store, tmp_path: Path) -> None:
    run = write_run(tmp_path, [{**record(step, train__loss=1 / step), "time": 1000.0 + step} for step in (40, 80)])
    send(run)
    next((run / "tracking").glob("trackio-*.json")).unlink()  # everything is sent again
    (run / "attempts/001/system-b.jsonl").write_text('{"time": 1001.0, "system/cpu_share": 0.5}\n')
    send(run)
    assert store.losses() == [(40, 1 / 40), (80, 1 / 80)]
    assert [row["step"] for row in store.rows.values() if "system/b/cpu_share" in row] == [40]


def test_the_config_has_facts_data_and_status(store: Store, tmp_path: Path) -> None:
    send(write_run(tmp_path, steps(1, 2), outcomes=("worker 0 crashed: no",)))
    config = store.configs["ab" * 16]
    assert config["train.steps"] == "10" and config["headway"]["headway.git.commit"] == "0123abc"
    assert config["headway"]["headway.status"] == "failed"
    assert config["datasets"] == {"corpus": {"digest": "d" * 64, "source": "c.jsonl"}}


def test_changed_steps_are_another_run(store: Store, tmp_path: Path) -> None:
    records = [*steps(1, 4), *steps(3, 5, 2, factor=3.0)]
    send(write_run(tmp_path, records, outcomes=("died", "finished"), configs=("one", "two")))
    assert store.losses() == [(step, 1 / step) for step in (1, 2, 3, 4)]
    assert store.losses(f"{'ab' * 16}-1") == [(step, 3 / step) for step in (3, 4, 5)]
    assert {row["name"] for row in store.rows.values()} == {"tiny", "tiny from step 2"}


def test_a_store_that_cannot_be_written_loses_nothing(store: Store, tmp_path: Path) -> None:
    run = write_run(tmp_path, steps(1, 4))
    store.error = OSError("disk is full")
    with pytest.raises(HeadwayError, match="disk is full"):
        send(run)
    store.error = None
    send(run)
    assert store.losses() == [(step, 1 / step) for step in range(1, 5)]
    store.is_on_network = True
    with pytest.raises(Refused, match="network file system") as raised:
        send(run)
    assert "TRACKIO_DIR" in str(raised.value.fix)


class Server(BaseHTTPRequestHandler):
    """Answers as Trackio's server does: 400 without the token."""

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/api/bulk_log" and content["kwargs"]["logs"] == []
        self.send_response(200 if self.headers.get("X-Trackio-Write-Token") == "good" else 400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_what_is_wrong_is_found_before_the_first_step(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: object())

    def refused(what: str, **keys: str) -> Any:
        with pytest.raises(ConfigError, match=what) as raised:
            check_trackers([TrackConfig.model_validate({"trackio": keys})])
        return raised.value

    server = LocalServer(Server)
    try:
        assert "TRACKIO_WRITE_TOKEN" in str(refused("refuses access", server=server.endpoint).fix)
        monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "good")
        check_trackers([TrackConfig.model_validate({"trackio": {"server": server.endpoint}})])
    finally:
        server.close()
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    assert "trackio sync --project headway" in str(refused("not sent to a Space").fix)
    monkeypatch.delenv("TRACKIO_SPACE_ID")
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://h:1/?write_token=Zx81qwertz")
    error = refused("has a credential in it")
    assert "TRACKIO_WRITE_TOKEN" in str(error.fix) and "Zx81qwertz" not in str(error)


def test_where_it_sends_follows_the_environment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def place() -> str:
        return resolve(TrackConfig.model_validate({"trackio": {"project": "x"}}), "track.0").place

    assert place() == f"{host_name()}, project x"
    monkeypatch.setenv("TRACKIO_DIR", "/here")
    assert place() == f"{host_name()}:/here, project x"
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://h:1")
    assert place() == "http://h:1, project x"
