"""Runs at real trackers: an MLflow server on SQLite, TensorBoard's reader, the client of Weights & Biases offline,
Trackio's store and server, and a receiver of OTLP on a port of this machine.

Followers and runs are killed at random moments, and the server too.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headway.core.machine.system import host_name
from headway.core.process.table import all_processes, arguments_of
from headway.core.process.waiting import wait_until
from headway.telemetry.metrics import read_metrics
from support.followers import append, record, steps, write_run
from support.otlp import Collector
from support.parts_table import MLFLOW, OTLP, TENSORBOARD, TRACKIO, WANDB, mlflow_server
from support.ports import free_ports
from support.runs import headway, write_config, write_corpus
from support.waits import LONG
from support.wandb_server import WandbServer

pytestmark = pytest.mark.timeout(1800)


class Server:
    """An MLflow server, which may be killed and started again."""

    def __init__(self, folder: Path, program: Path) -> None:
        self._folder, self._program, (self._port,) = folder, program, free_ports(1)
        self.uri, self.database = f"http://127.0.0.1:{self._port}", folder / "mlflow.db"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["--backend-store-uri", f"sqlite:///{self.database}", "--artifacts-destination", self._folder / "files"]
        words += ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        environment.pop("PYTHONPATH", None)
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "server", *words], stdout=log, stderr=log, env=environment, start_new_session=True
            )
        assert wait_until(self._answers, LONG, 0.2), (self._folder / "server.log").read_text()[-3000:]

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2):
            return True
        return False

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def runs(self) -> list[Any]:
        from mlflow import MlflowClient

        client = MlflowClient(self.uri)
        return list(client.search_runs([one.experiment_id for one in client.search_experiments()]))

    def values(self, run: str) -> dict[str, list[tuple[int, float]]]:
        """Every row that the server's database has: more than its API would tell of a value that came twice."""
        with sqlite3.connect(f"file:{self.database}?mode=ro", uri=True) as database:
            rows = database.execute("select key, step, value from metrics where run_uuid = ? order by step", (run,))
            found: dict[str, list[tuple[int, float]]] = {}
            for key, step, value in rows:
                found.setdefault(key, []).append((step, value))
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    program = mlflow_server()
    if program is None:
        pytest.skip("there is no MLflow server: tests/parts/install.sh")
    pytest.importorskip("mlflow")
    found = Server(tmp_path_factory.mktemp("mlflow"), program)
    found.start()
    yield found
    found.kill()


def tensorboard_steps(folder: Path, tag: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return [one.step for one in found.Scalars(tag)]


def check(server: Server, run: Path, total: int, names: Sequence[str] = ("train/loss",)) -> Any:
    """One run at the server, finished, with each step once; the same in the event file. Returns the server's run."""
    (found,) = [one for one in server.runs() if one.data.tags["headway.run_id"] == run_id(run)]
    assert found.info.status == "FINISHED"
    values = server.values(found.info.run_id)
    twice = {key: [step for step, n in Counter(s for s, _ in rows).items() if n > 1] for key, rows in values.items()}
    assert not any(twice.values()), twice
    metrics = read_metrics(run)
    for name in names:
        expected, losses = metrics.series(name)
        assert values[name] == list(zip(expected.tolist(), losses.tolist(), strict=True)), name
        assert tensorboard_steps(run / "tensorboard", name) == expected.tolist()
    assert [step for step, _ in values["train/loss"]] == list(range(1, total + 1))
    return found


def run_id(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["id"])


def recorded(run: Path) -> int:
    with suppress(OSError):
        return (run / "metrics.jsonl").read_bytes().count(b'"train/loss"')
    return 0


def followers(run: Path) -> list[int]:
    """The processes that follow a run."""
    return [
        found.pid
        for found in all_processes()
        if (words := arguments_of(found.pid)) and "headway.tracking.process" in words and str(run) in words
    ]


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for_steps(run: Path, number: int, process: subprocess.Popen[bytes]) -> None:
    assert wait_until(lambda: recorded(run) >= number or process.poll() is not None, LONG, 0.05)


def train(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    with (folder / "train.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "headway", "train", "config.yaml", *overrides], cwd=folder, stdout=log, stderr=log
        )


@pytest.mark.parts(MLFLOW)
def test_a_run_and_its_followers_are_killed_five_times(server: Server, tmp_path: Path) -> None:
    draws, total, run = random.Random(5), 500, tmp_path / "runs" / "tiny"
    write_corpus(tmp_path)
    track = ["tensorboard", {"mlflow": {"uri": server.uri}}]
    write_config(tmp_path, train={"steps": total}, checkpoint={"every": "20 steps"}, track=track)
    assert headway("data", "prepare", "config.yaml", cwd=tmp_path).returncode == 0
    for _ in range(5):
        before, process = recorded(run), train(tmp_path)
        try:
            wait_for_steps(run, before + 8, process)
            kill(followers(run))
            time.sleep(draws.uniform(0.0, 3.0))
            kill(followers(run))  # perhaps the one that was started in its place
            time.sleep(draws.uniform(0.0, 1.0))
        finally:
            process.kill()
            process.wait()
    assert train(tmp_path).wait(LONG) == 0, (tmp_path / "train.log").read_text()[-3000:]
    assert len(list((run / "attempts").iterdir())) >= 5
    found = check(server, run, total, ("train/loss", "train/grad_norm", "evaluation/loss"))
    assert found.data.params["train.steps"] == str(total)
    assert found.data.tags["headway.outcome"] == "finished" and int(found.data.tags["headway.attempts"]) >= 5
    assert "system/memory/peak_gib" in found.data.metrics and found.inputs.dataset_inputs[0].dataset.name == "corpus"
    from mlflow import MlflowClient

    files = {one.path for one in MlflowClient(server.uri).list_artifacts(found.info.run_id)}
    assert "config.yaml" in files


@pytest.mark.parts(MLFLOW)
def test_a_server_that_is_down_costs_no_step_and_loses_none(server: Server, tmp_path: Path) -> None:
    """It is killed in the middle, and comes back after the run has ended; the rest is sent by hand."""
    total = 60
    write_corpus(tmp_path)
    write_config(tmp_path, train={"steps": total})
    assert headway("data", "prepare", "config.yaml", cwd=tmp_path).returncode == 0
    assert train(tmp_path, "name=without").wait(LONG) == 0
    track = f"track=[tensorboard, {{mlflow: {{uri: '{server.uri}'}}}}]"
    process = train(tmp_path, "name=with", track)
    run = tmp_path / "runs" / "with"
    try:
        wait_for_steps(run, 10, process)
        server.kill()
        assert process.wait(LONG) == 0, (tmp_path / "train.log").read_text()[-3000:]
        said = (tmp_path / "train.log").read_text()
        assert "headway track" in said and "sends the rest" in said
    finally:
        process.kill()
        server.start()
    # The fastest tenth: other work on the machine slows the rest of the steps down, with a tracker or without.
    fastest = [
        sorted(read_metrics(tmp_path / "runs" / name).series("speed/step_seconds")[1])[total // 10]
        for name in ("without", "with")
    ]
    assert fastest[1] < 1.3 * fastest[0], fastest
    done = headway("track", run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check(server, run, total)


@pytest.mark.parts(MLFLOW)
def test_followers_by_hand_are_killed_at_random_moments(server: Server, tmp_path: Path) -> None:
    """A long run of last year, in many batches."""
    draws, total = random.Random(7), 4000
    run = write_run(tmp_path, steps(1, total), name="old")
    command = [sys.executable, "-m", "headway", "track", run, "--to", f"{{mlflow: {{uri: '{server.uri}'}}}}"]
    command += ["--to", "tensorboard"]
    for _ in range(5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(6.0 + draws.uniform(0.0, 4.0))
        process.kill()
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG)
    assert done.returncode == 0, done.stderr
    check(server, run, total, ("train/loss", "speed/step_seconds"))


@pytest.mark.parts(MLFLOW)
def test_a_changed_run_gets_a_child(server: Server, tmp_path: Path) -> None:
    records = [*steps(1, 6), *steps(4, 8, 2, factor=3.0)]
    run = write_run(tmp_path, records, outcomes=("preempted", "finished"), configs=("one", "two"), name="changed")
    done = headway("track", run, "--once", "--to", f"{{mlflow: {{uri: '{server.uri}', experiment: changes}}}}")
    assert done.returncode == 0, done.stderr
    found = {one.data.tags["headway.generation"]: one for one in server.runs() if "changed" in one.info.run_name}
    assert found["1"].info.run_name == "changed from step 3" and found["0"].info.status == "KILLED"
    assert found["1"].data.tags["mlflow.parentRunId"] == found["0"].info.run_id
    assert [found[key].info.start_time for key in "01"] == [1_000_000, 1_000_000], "when its attempt began"
    assert [found[key].info.end_time for key in "01"] == [1_106_000, 2_002_000]
    assert [step for step, _ in server.values(found["1"].info.run_id)["train/loss"]] == [4, 5, 6, 7, 8]
    assert [step for step, _ in server.values(found["0"].info.run_id)["train/loss"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parts(MLFLOW)
def test_values_that_are_no_numbers_arrive(server: Server, tmp_path: Path) -> None:
    """MLflow keeps NaN, and the greatest number that it can hold for an infinity (docs/tracking.md)."""
    from mlflow import MlflowClient

    odd = ["NaN", "Infinity", "-Infinity", 0.5]
    values = [record(step, train__loss=value) for step, value in enumerate(odd, 1)]
    run = write_run(tmp_path, values, name="odd")
    done = headway("track", run, "--once", "--to", f"{{mlflow: {{uri: '{server.uri}', experiment: odd}}}}")
    assert done.returncode == 0, done.stderr
    (found,) = [one for one in server.runs() if one.info.run_name == "odd"]
    history = MlflowClient(server.uri).get_metric_history(found.info.run_id, "train/loss")
    there = {metric.step: metric.value for metric in history}
    assert math.isnan(there[1]) and there[2] == -there[3] == sys.float_info.max and there[4] == 0.5


@pytest.mark.parts(MLFLOW)
def test_a_run_whose_machine_died_is_ended_by_a_sweep(server: Server, tmp_path: Path) -> None:
    """By the command, and by an exporter."""
    tracker = {"mlflow": {"uri": server.uri, "experiment": "swept"}}
    for name in ("one", "two"):
        run = write_run(tmp_path / name, steps(1, 5), outcomes=(None,), name=name, track=[tracker])
        (run / "run.json").write_text(json.dumps({"id": name * 8}))
        attempt = run / "attempts" / "001" / "attempt.json"
        attempt.write_text(json.dumps({"started": 1000.0, "host": "gone", "pid": 7}))
        assert headway("track", run, "--once").returncode == 0
        append(run, steps(6, 10))

    def status(name: str) -> str:
        (found,) = [one for one in server.runs() if one.data.tags["headway.run_id"] == name * 8]
        assert len(server.values(found.info.run_id)["train/loss"]) == (5 if found.info.status == "RUNNING" else 10)
        return str(found.info.status)

    done = headway("track", "--sweep", tmp_path / "one")
    assert done.returncode == 0 and status("one") == status("two") == "RUNNING", "they may be alive"
    for path in (*tmp_path.glob("*/*/metrics.jsonl"), *tmp_path.glob("*/*/attempts/*/*")):
        os.utime(path, (time.time() - 4000, time.time() - 4000))
    done = headway("track", "--sweep", tmp_path / "one")
    assert done.returncode == 0 and "sent its end to mlflow" in done.stderr, done.stderr
    assert (status("one"), status("two")) == ("KILLED", "RUNNING")
    words = ["top", tmp_path / "two", "--serve", f":{free_ports(1)[0]}", "--sweep"]
    with (tmp_path / "top.log").open("wb") as log:
        exporter = subprocess.Popen([sys.executable, "-m", "headway", *words], stdout=log, stderr=log)
    try:
        assert wait_until(lambda: status("two") == "KILLED", LONG, 0.5), (tmp_path / "top.log").read_text()
    finally:
        exporter.terminate()
        exporter.wait()


@pytest.mark.parts(MLFLOW)
def test_a_model_is_logged_and_loaded(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_corpus(tmp_path)
    write_config(tmp_path, train={"steps": 4})
    assert headway("data", "prepare", "config.yaml", cwd=tmp_path).returncode == 0
    assert headway("train", "config.yaml", cwd=tmp_path).returncode == 0
    assert headway("export", "runs/tiny", cwd=tmp_path).returncode == 0
    tracker = f"{{mlflow: {{uri: '{server.uri}', experiment: models}}}}"
    command = [sys.executable, "-m", "headway", "track", "runs/tiny", "--to", tracker, "--model", "runs/tiny/export"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LONG)
    assert done.returncode == 0, done.stderr
    address = done.stderr.rpartition("logged the model as ")[2].split()[0]
    code = (
        "import mlflow.transformers, sys; mlflow.set_tracking_uri(sys.argv[1]);"
        " model = mlflow.transformers.load_model(sys.argv[2]).model; print(sum(p.numel() for p in model.parameters()))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code, server.uri, address], capture_output=True, text=True, check=False, timeout=LONG
    )
    assert loaded.returncode == 0, loaded.stderr
    facts = json.loads((tmp_path / "runs/tiny/run.json").read_text())
    assert int(loaded.stdout.split()[-1]) == facts["model"]["parameters"]
    from mlflow import MlflowClient

    (found,) = [one for one in server.runs() if one.data.tags["headway.run_id"] == run_id(tmp_path / "runs/tiny")]
    assert found.info.status == "FINISHED"
    (model,) = MlflowClient(server.uri).search_logged_models([found.info.experiment_id])
    assert (model.name, model.model_uri, model.source_run_id) == ("model", address, found.info.run_id)
    assert model.status == "READY" and [one.model_id for one in found.outputs.model_outputs] == [model.model_id]


@pytest.mark.parts(MLFLOW)
def test_the_model_of_a_finished_run_becomes_a_version_with_signature_and_alias(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from mlflow import MlflowClient

    write_corpus(tmp_path)
    tracker = {"uri": server.uri, "experiment": "models", "log_model": True, "register": "tiny", "alias": "champion"}
    write_config(tmp_path, train={"steps": 4}, track=[{"mlflow": tracker}])
    assert headway("data", "prepare", "config.yaml", cwd=tmp_path).returncode == 0
    trained = headway("train", "config.yaml", cwd=tmp_path)
    assert trained.returncode == 0 and "waiting for trackers to get the last steps and the model" in trained.stderr
    client = MlflowClient(server.uri)
    first = client.get_model_version_by_alias("tiny", "champion")
    assert (first.version, first.tags["headway.step"]) == ("1", "4") and "# tiny" in first.description
    code = (
        "import mlflow.transformers, sys; mlflow.set_tracking_uri(sys.argv[1]);"
        " print(mlflow.models.get_model_info(sys.argv[2]).signature);"
        " model = mlflow.transformers.load_model(sys.argv[2]).model; print(sum(p.numel() for p in model.parameters()))"
    )
    command = [sys.executable, "-c", code, server.uri, "models:/tiny@champion"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG)
    assert loaded.returncode == 0, loaded.stderr
    assert "inputs" in loaded.stdout and "string" in loaded.stdout
    facts = json.loads((tmp_path / "runs/tiny/run.json").read_text())
    assert int(loaded.stdout.split()[-1]) == facts["model"]["parameters"]

    def track(**changes: Any) -> str:
        chosen = json.dumps({"mlflow": {**tracker, **changes}})
        done = headway("track", "runs/tiny", "--to", chosen, cwd=tmp_path)
        return done.stderr if done.returncode else ""

    (cursor,) = (tmp_path / "runs/tiny/tracking").glob("mlflow-*.json")
    before = json.loads(cursor.read_text())
    assert track() == "" and len(client.search_model_versions("name = 'tiny'")) == 1
    cursor.write_text(json.dumps({**before, "model": None}))  # as a kill after the version was made leaves it
    assert track() == "" and len(client.search_model_versions("name = 'tiny'")) == 1
    (found,) = [one for one in server.runs() if one.data.tags["headway.run_id"] == run_id(tmp_path / "runs/tiny")]
    assert found.info.status == "FINISHED" and len(found.outputs.model_outputs) == 1

    assert "limit_gib is 0.0001" in track(limit_gib=0.0001, alias="other"), "the model has more"
    assert track(only="card", alias="described") == ""
    described = client.get_model_version_by_alias("tiny", "described")
    assert described.version == "2" and described.source.endswith("model-card")
    (card,) = client.list_artifacts(found.info.run_id, "model-card")
    assert card.path == "model-card/README.md" and 0 < card.file_size < 10_000
    assert not list((tmp_path / "runs/tiny/tracking").glob("*.model"))


@pytest.mark.parts(TENSORBOARD)
def test_tensorboard_reads_a_run_that_is_written_meanwhile(tmp_path: Path) -> None:
    """The reader is open while the follower is killed and the file is cut; it has each step once in the end."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = write_run(tmp_path, steps(1, 50))
    send = ("track", run, "--once", "--to", "tensorboard")
    assert headway(*send).returncode == 0
    cursor = next((run / "tracking").glob("tensorboard-*.json"))
    before = cursor.read_bytes()
    append(run, steps(51, 90))
    assert headway(*send).returncode == 0
    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    cursor.write_bytes(before)  # as a kill would have left it
    append(run, steps(91, 120))
    assert headway(*send).returncode == 0
    reader.Reload()
    assert [one.step for one in reader.Scalars("train/loss")] == list(range(1, 121))


def offline_history(folder: Path) -> list[dict[str, Any]]:
    """The lines of history in the files of W&B's client."""
    lines = [message.history.item for message in offline_records(folder, "history")]
    return [{one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items} for items in lines]


def offline_records(folder: Path, wanted: str) -> list[Any]:
    """The records of a type in the files of W&B's client: LevelDB's log format, with its own messages."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, place, whole = path.read_bytes(), 7, b""
        while place + 7 <= len(data):
            if 32768 - place % 32768 < 7:
                place += 32768 - place % 32768
                continue
            _, length, kind = struct.unpack("<IHB", data[place : place + 7])
            if kind == 0:
                break
            whole += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # a whole record, or its last part
                message = wandb_internal_pb2.Record.FromString(whole)
                whole = b""
                if message.WhichOneof("record_type") == wanted:
                    found.append(message)
    return found


@pytest.mark.parts(WANDB)
def test_an_offline_folder_has_the_model_as_an_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    write_corpus(tmp_path)
    write_config(tmp_path, train={"steps": 4}, track=[{"wandb": {"mode": "offline", "log_model": True}}])
    assert headway("data", "prepare", "config.yaml", cwd=tmp_path).returncode == 0
    trained = headway("train", "config.yaml", cwd=tmp_path)
    assert trained.returncode == 0 and "warning" not in trained.stderr, trained.stderr
    run = tmp_path / "runs/tiny"
    (made,) = offline_records(run / "tracking", "artifact")
    entries = {one.path for one in made.artifact.manifest.contents}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= entries
    assert made.artifact.type == "model" and "newest" in made.artifact.aliases
    assert json.loads(made.artifact.metadata) == {"step": 4} and "# tiny" in made.artifact.description
    assert {line["_step"] for line in offline_history(run / "tracking")} == {1, 2, 3, 4}
    assert headway("track", run).returncode == 0 and len(offline_records(run / "tracking", "artifact")) == 1


#: The command line, which has W&B's client finish a session every second or so.
FLUSHING = (
    "from headway.tracking import delivery; delivery.FLUSH_SECONDS = 0.5; from headway.cli.main import main; main()"
)


def wandb_values(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """The values that a run has at W&B, whose steps must rise."""
    steps_sent = [int(line["_step"]) for line in lines]
    assert steps_sent == sorted(set(steps_sent)), "each step once"
    return {
        (name, int(line["_step"])): float(value)
        for line in lines
        for name, value in line.items()
        if not name.startswith("_")
    }


def wandb_folders(run: Path) -> list[Path]:
    return sorted((run / "tracking/wandb").glob("offline-run-*"))


def sync(run: Path, server: WandbServer) -> None:
    command = [Path(sys.executable).with_name("wandb"), "sync", *wandb_folders(run)]
    environment = {**os.environ, **server.variables, "WANDB_DIR": str(run.parent)}  # it keeps a log
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=LONG, env=environment, cwd=run.parent
    )
    assert done.returncode == 0 and "ERROR" not in done.stderr, done.stderr


@pytest.mark.parts(WANDB)
@pytest.mark.parametrize("seed", [1, 2])
def test_wandb_sync_sends_each_step_once_though_followers_are_killed(tmp_path: Path, seed: int) -> None:
    """A run that grows, restarts and has events; followers are killed three times, and what is there is sent between.

    What counts is what the real client sends to a server that tells it the truth about what it has.
    """
    pytest.importorskip("wandb")
    draws, server = random.Random(seed), WandbServer()
    run = write_run(tmp_path, [], outcomes=(None,))
    alive = {"number": 1, "pid": os.getpid(), "host": host_name(), "started": time.time()}
    (run / "attempts/001/attempt.json").write_text(json.dumps(alive))
    command = [sys.executable, "-c", FLUSHING, "track", str(run), "--to", "{wandb: {mode: offline}}"]
    expected: dict[tuple[str, int], float] = {}
    for number, (first, last) in enumerate([(1, 400), (301, 800), (801, 1200), (1101, 1254)], start=1):
        records = steps(first, last, number)
        for step in range(first + 99, last + 1, 100):
            place = next(n for n, one in enumerate(records) if one["step"] == step)
            records.insert(place + 1, record(step, number, evaluation__loss=2.0 / step))
        for one in records:
            for name in ("train/loss", "speed/step_seconds", "evaluation/loss"):
                if name in one:
                    expected.setdefault((name, one["step"]), one[name])
        process, before = None, len(wandb_folders(run))
        if number < 4:
            process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        for start in range(0, len(records), 20):
            append(run, records[start : start + 20])
            if process is not None:
                time.sleep(draws.uniform(0.1, 0.5))
        if process is not None:
            assert wait_until(lambda before=before: len(wandb_folders(run)) > before, LONG)
            append(run, [record(last, number, evaluation__perplexity=3.0)])  # the newest step is not written yet
            expected["evaluation/perplexity", last] = 3.0
            time.sleep(draws.uniform(0.0, 1.0))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if number == 2:
            sync(run, server)
            assert wandb_values(server.history("ab" * 8)).items() <= expected.items()
    ended = {**alive, "ended": time.time(), "outcome": "finished", "exit_code": 0}
    (run / "attempts/001/attempt.json").write_text(json.dumps(ended))
    done = subprocess.run([*command, "--once"], capture_output=True, text=True, check=False, timeout=LONG)
    assert done.returncode == 0, done.stderr
    sync(run, server)
    assert wandb_values(server.history("ab" * 8)) == expected and "headway/config.yaml" in server.uploads
    assert len(wandb_folders(run)) >= 4
    assert {line["_step"]: line["train/loss"] for line in offline_history(run / "tracking")} == {
        step: 1 / step for step in range(1, 1255)
    }
    shutil.rmtree(run / "tracking" / "wandb")
    again = subprocess.run([*command, "--once"], capture_output=True, text=True, check=False, timeout=LONG)
    assert again.returncode == 0 and not offline_history(run / "tracking")  # nothing is new
    server.close()


def trackio_losses(folder: Path, project: str = "headway") -> list[tuple[int, float]]:
    """Every row of the data base that has a loss: two if one came twice."""
    with sqlite3.connect(f"file:{folder / project}.db?mode=ro", uri=True) as database:
        rows = database.execute("select step, metrics from metrics order by step, id").fetchall()
        return [(step, found["train/loss"]) for step, text in rows if "train/loss" in (found := json.loads(text))]


def send_with_kills(command: Sequence[str | Path], environment: dict[str, str], seed: int) -> None:
    """Start it, kill it four times at random moments, and let it end."""
    draws = random.Random(seed)
    for _ in range(4):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(2.0 + draws.uniform(0.0, 3.0))
        process.kill()
        process.wait()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LONG)
    assert done.returncode == 0, done.stderr


@pytest.mark.parts(TRACKIO)
def test_trackio_has_each_step_once_though_followers_are_killed(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    total, store = 3000, tmp_path / "store"
    run = write_run(tmp_path, [*steps(1, total), record(total, evaluation__loss="NaN")], name="old")
    command = [sys.executable, "-m", "headway", "track", run, "--once", "--to", "trackio"]
    environment = {**os.environ, "TRACKIO_DIR": str(store)}
    send_with_kills(command, environment, 11)
    assert trackio_losses(store) == [(step, 1 / step) for step in range(1, total + 1)]
    next((run / "tracking").glob("trackio-*.json")).unlink()
    append(run, steps(total + 1, total + 5))
    assert subprocess.run(command, env=environment, check=False, timeout=LONG).returncode == 0
    assert trackio_losses(store) == [(step, 1 / step) for step in range(1, total + 6)]
    code = (
        "import trackio, json; run, = trackio.Api().runs('headway');"
        " print(json.dumps([run.name, run.config], default=str))"
    )
    read = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    name, config = json.loads(read.stdout.splitlines()[-1])
    assert name == "old" and config["headway"]["headway.status"] == "finished"


@pytest.mark.parts(TRACKIO)
def test_a_server_of_trackio_has_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    (port,), store = free_ports(1), tmp_path / "store"
    run = write_run(tmp_path, [*steps(1, 20), record(20, evaluation__loss="NaN")], name="remote")
    environment = {**os.environ, "TRACKIO_DIR": str(store), "TRACKIO_WRITE_TOKEN": "Qx7token81"}
    code = (
        "import trackio, sys; trackio.show(open_browser=False, block_thread=True, host='127.0.0.1',"
        " server_port=int(sys.argv[1]), share=False)"
    )
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-c", code, str(port)], env=environment, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            with suppress(OSError), urllib.request.urlopen(f"{address}/version", timeout=2):
                return True
            return server.poll() is not None

        assert wait_until(answers, LONG, 0.2) and server.poll() is None, (tmp_path / "server.log").read_text()[-2000:]
        tracker = f"{{trackio: {{server: '{address}', project: far}}}}"
        command = [sys.executable, "-m", "headway", "track", run, "--once", "--to", tracker]
        wrong = {**environment, "TRACKIO_WRITE_TOKEN": "no", "TRACKIO_DIR": str(tmp_path / "else")}
        done = subprocess.run(command, env=wrong, capture_output=True, text=True, check=False, timeout=LONG)
        assert done.returncode == 2 and "refuses access" in done.stderr and "TRACKIO_WRITE_TOKEN" in done.stderr
        right = {**wrong, "TRACKIO_WRITE_TOKEN": environment["TRACKIO_WRITE_TOKEN"]}
        for _ in range(2):
            done = subprocess.run(command, env=right, capture_output=True, text=True, check=False, timeout=LONG)
            assert done.returncode == 0, done.stderr
            next((run / "tracking").glob("trackio-*.json")).unlink()  # so that everything is sent again
        assert trackio_losses(store, "far") == [(step, 1 / step) for step in range(1, 21)]
        assert b"Qx7token81" not in b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    finally:
        server.kill()
        server.wait()


@pytest.mark.parts(OTLP)
def test_a_collector_has_each_step_though_followers_are_killed(tmp_path: Path) -> None:
    """At least once, and every time the same: as many distinct points as steps."""
    pytest.importorskip("opentelemetry.proto")
    total, collector = 3000, Collector()
    run = write_run(tmp_path, steps(1, total), name="old")
    tracker = f"{{opentelemetry: {{endpoint: '{collector.endpoint}'}}}}"
    try:
        command = [sys.executable, "-m", "headway", "track", run, "--once", "--to", tracker]
        send_with_kills(command, dict(os.environ), 13)
    finally:
        collector.close()
    expected = {(int(1e9 * one["time"]), one["train/loss"]) for one in steps(1, total)}
    assert set(collector.values("headway.train.loss")) == expected


@pytest.mark.parts(MLFLOW)
def test_a_version_of_a_registry_is_sent_once(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second push finds what the first has made, and moves the alias only."""
    pytest.importorskip("transformers")
    from mlflow import MlflowClient

    write_corpus(tmp_path)
    write_config(tmp_path)
    assert headway("train", "config.yaml", cwd=tmp_path).returncode == 0
    assert headway("registry", "add", "runs/tiny", "--name", "tiny", cwd=tmp_path).returncode == 0
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    for alias in ("candidate", "champion"):
        done = headway("registry", "push", "tiny@1", "mlflow:from-registry", "--alias", alias, cwd=tmp_path)
        assert done.returncode == 0 and "sent to models:/from-registry/1" in done.stderr, done.stderr
    client = MlflowClient(server.uri)
    (found,) = client.search_model_versions("name = 'from-registry'")
    assert found.tags["headway.version"] == "tiny@1"
    assert client.get_model_version_by_alias("from-registry", "champion").version == found.version
    assert headway("registry", "verify", cwd=tmp_path).returncode == 0, "nothing was written into the registry"
