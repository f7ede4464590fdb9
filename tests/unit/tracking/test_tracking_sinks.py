"""Trackers by their names: what the config takes, what is found wrong before the first step; TensorBoard's files."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headway.config import Config, dump_config, identity, load_config
from headway.config.sections.health import HealthConfig
from headway.config.sections.track import TrackConfig, mlflow_uri_problem
from headway.core.coordination.outcomes import BUDGET_REACHED
from headway.core.errors import ConfigError, HeadwayError
from headway.core.requirements import install_command
from headway.telemetry.record import Run
from headway.tracking import sinks, wandb_sink
from headway.tracking.describe import describe, status
from headway.tracking.follow import follow
from headway.tracking.follower import Waiting
from headway.tracking.sink import Description, TrackedRun
from headway.tracking.sinks import check_trackers, parse_trackers, resolve
from headway.tracking.track_runs import track_runs
from headway.tracking.wandb_sink import WandbSink
from support.followers import FakeMlflow, append, record, steps, write_run
from support.local_server import LocalServer
from support.runs import write_config

OVER = Waiting(lambda: True, sleep=lambda seconds: None, patience_seconds=0.0)


def load(folder: Path, track: Any) -> Config:
    from headway.config import load_config

    return load_config(write_config(folder, track=track))


def test_a_tracker_is_named_alone_or_with_its_keys(tmp_path: Path) -> None:
    own = {"mine:Sink": {"path": "x"}}
    config = load(tmp_path, ["tensorboard", {"mlflow": {"uri": "http://h:1"}}, {"wandb": None}, "a.b:Sink", own])
    assert [one.name for one in config.track] == ["tensorboard", "mlflow", "wandb", "a.b:Sink", "mine:Sink"]
    assert config.track[4].own is not None and config.track[4].own.options == {"path": "x"}
    assert [one.name for one in load(tmp_path, "tensorboard").track] == ["tensorboard"]  # alone
    again = Config.model_validate(yaml.safe_load(dump_config(config)))
    assert again.track == config.track
    assert identity(config) == identity(config.model_copy(update={"track": []}))  # a run may get one at any time


@pytest.mark.parametrize(
    ("track", "what", "fix"),
    [
        ([{"opentelemetry": {"endpoint": "h:4318"}}], "this is no address", None),
        ([{"opentelemetry": {"endpoint": "https://me:Zx81qwertz@h"}}], "credential", "remove it"),
        ([{"trackio": {"server": "grpc://h"}}], "this is no address", None),
        ([{"trackio": {"project": "my.model"}}], "track.0.trackio.project", None),
        ([{"trackio": {"project": "registry-x"}}], "Trackio keeps this name for itself", None),
        ([{"trackio": {"project": "my_traces"}}], "Trackio keeps this name for itself", None),
        (["tensorbord"], "track.0: should be mlflow, opentelemetry", "did you mean tensorboard?"),
        ([{"mlfow": {"uri": "http://h"}}], "unknown key 'track.0.mlfow'", "did you mean track.mlflow?"),
        ([{"mlflow": {"experimnt": "x"}}], "key 'track.0.mlflow.experimnt'", "did you mean track.mlflow.experiment?"),
        ([{"mlflow": {}, "wandb": {}}], "one tracker, not mlflow and wandb", None),
        ([{"mlflow": {"uri": "htp://h"}}], "did you mean http:?", None),
        ([{"mlflow": {"uri": "http://h:port"}}], "the port of this address is no number", None),
        ([{"wandb": {"mode": "off"}}], "track.0.wandb.mode", None),
        ([{"mlflow": {"uri": "https://me:Zx81qwertz@h"}}], "credential", "remove it"),
    ],
)
def test_a_wrong_tracker_is_refused(tmp_path: Path, track: list[Any], what: str, fix: str | None) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, track)
    assert what in raised.value.what and "track" in str(raised.value.where), raised.value
    assert fix is None or fix in str(raised.value.fix)
    assert "Zx81qwertz" not in str(raised.value)


def test_the_command_takes_the_same_items() -> None:
    found = parse_trackers(["mlflow", "{mlflow: {experiment: x}}", "own_tracker:Sink", "{own_tracker:Sink: {path: a}}"])
    assert [one.name for one in found] == ["mlflow", "mlflow", "own_tracker:Sink", "own_tracker:Sink"]
    with pytest.raises(ConfigError, match="should be mlflow"):
        parse_trackers(["mlfow"])
    with pytest.raises(ConfigError, match="unknown key"):
        parse_trackers(["{mlflow: {ur: x}}"])


@pytest.mark.parametrize(
    ("uri", "is_wrong"),
    [
        ("http://127.0.0.1:5000", False), ("https://m.example.org/path", False), ("databricks", False),
        ("sqlite:///m.db", False), ("http://[::1]:5000", False), ("127.0.0.1:5000", True), ("host", True),
        ("http:host", True), ("http://h:99999", True), ("https://", True),
    ],
)  # fmt: skip
def test_addresses_of_mlflow(uri: str, is_wrong: bool) -> None:
    assert (mlflow_uri_problem(uri) is not None) == is_wrong


def check(*items: Any) -> None:
    check_trackers([TrackConfig.model_validate(item) for item in items])


def test_what_is_missing_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_MODE", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="no MLflow server is named") as raised:
        check("mlflow")
    assert "MLFLOW_TRACKING_URI" in str(raised.value.where) and "export" in str(raised.value.fix)
    with pytest.raises(ConfigError, match="no key for Weights & Biases"):
        check("wandb")
    check({"wandb": {"mode": "offline"}}, "tensorboard")
    with pytest.raises(ConfigError, match="same place"):
        check("tensorboard", {"tensorboard": {}})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere")
    with pytest.raises(ConfigError, match="no address") as raised:
        check("mlflow")
    assert raised.value.where == "MLFLOW_TRACKING_URI"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:Zx81qwertz@h")
    with pytest.raises(ConfigError, match="has a credential in it") as raised:
        check("mlflow")
    assert "MLFLOW_TRACKING_PASSWORD" in str(raised.value.fix) and "Zx81qwertz" not in str(raised.value)
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package 'tensorboard'") as raised:
        check("tensorboard")
    assert raised.value.fix == install_command("tensorboard")
    for name in ("trackio", "opentelemetry"):
        with pytest.raises(ConfigError, match="which is not installed") as raised:
            check(name)
        assert raised.value.fix == install_command(name)
    assert "mlflow" not in sys.modules or sys.modules["mlflow"] is not None


class Answers:
    """Servers that answer with a code."""

    def __new__(cls, code: int) -> Any:
        from http.server import BaseHTTPRequestHandler

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = self.headers.get("Authorization") == "Bearer good"
                self.send_response(200 if allowed else code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return LocalServer(Handler)


def test_a_server_that_refuses_is_found_and_one_that_is_down_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    server = Answers(401)
    tracker = {"mlflow": {"uri": server.endpoint}}
    try:
        with pytest.raises(ConfigError, match="refuses access") as raised:
            check(tracker)
        assert "MLFLOW_TRACKING_TOKEN" in str(raised.value.fix)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "good")
        check(tracker)
    finally:
        server.close()
    check(tracker)
    assert "does not answer now" in capsys.readouterr().err
    other = Answers(404)
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
    try:
        with pytest.raises(ConfigError, match="no MLflow server"):
            check({"mlflow": {"uri": other.endpoint}})
    finally:
        other.close()


def test_an_own_sink_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half_a_sink.py").write_text("class Half:\n    def open(self, run, state): pass\n")
    with pytest.raises(ConfigError, match="it has no describe, send"):
        check("half_a_sink:Half")
    with pytest.raises(ConfigError, match="no class Other"):
        check("half_a_sink:Other")


def test_an_own_sink_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = "describe = send = flush = set_status = close = open"
    text = "class Broken:\n    def open(self, run, state): pass\n    {}\n    def __init__(self): {}\n"
    (tmp_path / "broken_sink.py").write_text(text.format(names, "raise ValueError('no such port')"))
    with pytest.raises(ConfigError, match="cannot be made: no such port"):
        check("broken_sink:Broken")
    (tmp_path / "slow_sink.py").write_text(text.format(names, "import time; time.sleep(60)"))
    monkeypatch.setattr(sinks, "_CHECK_SECONDS", 0.5)
    with pytest.raises(ConfigError, match="is not made within"):
        check("slow_sink:Broken")


def test_a_failed_run_stays_failed_in_wandb_when_it_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    session = SimpleNamespace(
        config=SimpleNamespace(update=lambda *_, **__: None), dir=str(tmp_path), summary={},
        log=lambda *_, **__: None, mark_preempting=lambda: None, finish=lambda exit_code: codes.append(exit_code),
    )  # fmt: skip
    client = SimpleNamespace(Settings=lambda **_: None, init=lambda **_: session)
    monkeypatch.setattr(wandb_sink, "_client", lambda: client)
    run, description = TrackedRun("ab" * 16, "tiny", tmp_path), Description("tiny", {}, {})
    sink = WandbSink("headway", None)
    sink.open(run, {})
    sink.describe(description)
    sink.set_status("failed", None)
    state = sink.flush()
    again = WandbSink("headway", None)
    again.open(run, state)
    again.describe(description)
    state = again.flush()
    again.set_status("running", None)
    again.describe(description)
    again.flush()
    assert codes == [1, 1, 0]


def test_a_status_that_was_not_made_certain_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's client is killed between the status and the end of its session: the next one says that the run failed."""
    codes: list[int] = []

    def finish(exit_code: int) -> None:
        codes.append(exit_code)
        if len(codes) == 1:
            raise OSError("the client is gone")

    session = SimpleNamespace(
        config=SimpleNamespace(update=lambda *_, **__: None), dir=str(tmp_path), summary={},
        log=lambda *_, **__: None, mark_preempting=lambda: None, finish=finish,
    )  # fmt: skip
    client = SimpleNamespace(Settings=lambda **_: None, init=lambda **_: session)
    monkeypatch.setattr(wandb_sink, "_client", lambda: client)
    run = write_run(tmp_path, steps(1, 3), outcomes=("worker 0 crashed: no",))
    tracker = TrackConfig.model_validate({"wandb": {"mode": "online"}})
    for _ in range(2):
        with suppress(HeadwayError):
            follow(run, tracker, "track.0", report=lambda text: None, waiting=OVER)
        cursor = next((run / "tracking").glob("wandb-*.json"))
        # As a kill leaves it: the status is in the cursor, and what the sink keeps of it is not.
        cursor.write_text(json.dumps({**json.loads(cursor.read_text()), "status": "failed", "state": {}}))
    assert codes[-1] == 1, codes


def test_a_run_without_trackers_is_told_so(tmp_path: Path) -> None:
    run = write_run(tmp_path, [])
    with pytest.raises(ConfigError, match="names no tracker") as raised:
        track_runs([run], [], once=True, model=None)
    assert "--to tensorboard" in str(raised.value.fix)
    with pytest.raises(ConfigError, match="a model is logged to MLflow"):
        track_runs([run], ["tensorboard"], once=True, model=tmp_path)
    with pytest.raises(HeadwayError, match="does not exist"):
        track_runs([tmp_path / "none"], ["tensorboard"], once=True, model=None)


def test_the_target_of_a_cursor_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://one")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    item = TrackConfig.model_validate("mlflow")
    one = resolve(item, "track.0").place
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "else")
    assert one == "http://one, experiment headway"
    assert resolve(item, "track.0").place == "http://one, experiment else"


def test_rollbacks_segments_and_attempts_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps(1, 3), outcomes=("died", "finished"))
    line = '{"kind": "decision", "attempt": 1, "first_step": 4, "last_step": 6, "action": "rollback", "reason": "x"}\n'
    (run / "ledger.jsonl").write_text(line)
    tags = describe(Run(run)).tags
    assert tags["headway.attempts"] == "2" and tags["headway.outcome"] == "finished"
    assert tags["headway.rollbacks"] == "1; steps left out: 5 to 6"
    assert tags["headway.git.commit"] == "0123abc" and tags["headway.package.torch"] == "2.11.0"


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("finished", "finished"), ("preempted", "killed"), (BUDGET_REACHED, "killed"), ("restored", "killed"),
        (None, "killed"), ("worker 0 crashed: no", "failed"),
    ],
)  # fmt: skip
def test_how_a_run_stands_that_has_ended(tmp_path: Path, outcome: str | None, expected: str) -> None:
    """One without an end was killed by force: its process is gone."""
    assert status(Run(write_run(tmp_path, [], outcomes=("finished", outcome))))[0] == expected


# TensorBoard ----------------------------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def send(run: Path) -> None:
    follow(run, TrackConfig.model_validate("tensorboard"), "track.0", report=lambda text: None, waiting=OVER)


def test_tensorboard_reads_each_step_once_though_the_file_was_ahead_of_the_cursor(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = write_run(tmp_path, steps(1, 4), outcomes=("died", "finished"))
    send(run)
    cursor = next((run / "tracking").glob("tensorboard-*.json"))
    before, event_file = cursor.read_bytes(), next((run / "tensorboard").iterdir())
    append(run, [*steps(3, 6, 2), record(6, 2, evaluation__loss="Infinity")])
    send(run)
    whole = event_file.read_bytes()
    cursor.write_bytes(before)  # as if the follower had been killed before it wrote the cursor
    event_file.write_bytes(whole[:-5])  # in the middle of an event
    send(run)
    assert event_file.read_bytes() == whole
    found = scalars(run / "tensorboard")
    assert found["train/loss"] == [(step, pytest.approx(1 / step)) for step in range(1, 7)]
    assert found["evaluation/loss"] == [(6, float("inf"))]


def test_tensorboard_gets_everything_again_when_its_file_is_gone(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = write_run(tmp_path, steps(1, 4))
    send(run)
    next((run / "tensorboard").iterdir()).unlink()
    send(run)
    assert [step for step, _ in scalars(run / "tensorboard")["train/loss"]] == [1, 2, 3, 4]


def test_tensorboard_drops_the_steps_that_a_change_replaces(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    records = [*steps(1, 4), *steps(3, 5, 2, factor=3.0)]
    run = write_run(tmp_path, records, outcomes=("preempted", "finished"), configs=("one", "two"))
    send(run)
    assert scalars(run / "tensorboard")["train/loss"] == [
        *((step, pytest.approx(1 / step)) for step in (1, 2)),
        *((step, pytest.approx(3 / step)) for step in (3, 4, 5)),
    ]


def test_trackers_get_the_values_that_differ_from_the_defaults(tmp_path: Path) -> None:
    sources = [{"name": "web", "path": "a.jsonl", "weight": 2.0}, {"name": "code", "path": "b.jsonl", "weight": 1.0}]
    clean = [{"step": "length", "min_words": 3}]
    data = {"sources": sources, "store": "store", "clean": clean}
    config = load_config(write_config(tmp_path, data=data, launch={"slurm": {"partition": "gpu"}}))
    run = write_run(tmp_path, steps(1, 2))
    (run / "config.yaml").write_text(dump_config(config))
    found = describe(Run(run))
    assert found.parameters["data.sources.web.weight"] == "2.0" and found.parameters["data.sources.code.path"]
    assert found.parameters["data.clean.0.step"] == "length" and found.parameters["data.clean.0.min_words"] == "3"
    assert [name for name in found.parameters if name.startswith("launch.")] == ["launch.slurm.partition"]
    assert len(found.parameters) < 60 < len(found.defaults)
    assert not found.parameters.keys() & found.defaults.keys()
    assert found.defaults["health.watch_seconds"] == json.dumps(HealthConfig.model_fields["watch_seconds"].default)


def test_a_parameter_that_becomes_the_default_again_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = FakeMlflow()
    mlflow.install(monkeypatch)
    config = load_config(write_config(tmp_path, seed=7))
    run = write_run(tmp_path, steps(1, 2))
    [tracker] = parse_trackers(["{mlflow: {uri: 'http://127.0.0.1:9'}}"])
    for seed in (7, Config.model_fields["seed"].default, 7):
        (run / "config.yaml").write_text(dump_config(config.model_copy(update={"seed": seed})))
        follow(run, tracker, "track.0", report=print, waiting=OVER)
        data = mlflow.runs["run0"].data
        assert data.params["seed"] == "7" and data.tags.get("headway.now.seed", "7") == str(seed)
    assert len(mlflow.runs) == 1 and "launch" not in data.params


def test_a_run_begins_and_ends_at_mlflow_when_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of long ago, whose durations were negative; and one whose clock was set back meanwhile."""
    mlflow = FakeMlflow()
    mlflow.install(monkeypatch)
    [tracker] = parse_trackers(["{mlflow: {uri: 'http://127.0.0.1:9'}}"])
    records = [*steps(1, 6), *steps(4, 8, 2, factor=3.0)]
    run = write_run(tmp_path, records, outcomes=("preempted", "finished"), configs=("one", "two"))
    attempt = run / "attempts" / "002" / "attempt.json"
    attempt.write_text(json.dumps({**json.loads(attempt.read_text()), "started": 1150.0}))
    follow(run, tracker, "track.0", report=print, waiting=OVER)
    first, second = mlflow.runs["run0"], mlflow.runs["run1"]
    assert (first.info.start_time, first.end) == (1_000_000, 1_106_000), "its last record"
    assert (second.info.start_time, second.end) == (1_150_000, 2_002_000)
    other = write_run(tmp_path, steps(1, 2), name="back")
    (other / "run.json").write_text(json.dumps({"id": "cd" * 16}))
    attempt = other / "attempts" / "001" / "attempt.json"
    attempt.write_text(json.dumps({"started": 5000.0, "outcome": "finished", "ended": 4000.0}))
    follow(other, tracker, "track.0", report=print, waiting=OVER)
    assert (mlflow.runs["run2"].info.start_time, mlflow.runs["run2"].end) == (5_000_000, 5_000_000)
