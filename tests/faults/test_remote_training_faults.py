"""Whole trainings whose checkpoints go to a real object store, while that and their workers fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from headway.checkpoint.remote.acquire import is_sent
from headway.checkpoint.run_identity import run_identity
from headway.checkpoint.transfer import remote_manifests
from headway.config import load_resolved
from headway.core.coordination.heartbeat import read_heartbeat
from headway.run.directory.ledger_proof import prove
from headway.telemetry.metrics import read_metrics
from support.object_storage import S3Server
from support.runs import headway, skip_without, state_hash, write_config
from support.s3_proxy import S3Proxy

skip_without("s3fs")

STEPS = 12
#: Workers stop themselves until the store has come to what a test is about, however busy the machine is.
PATIENT = {"hang_seconds": 200}


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state in which the undisturbed run ends."""
    folder = tmp_path_factory.mktemp("whole")
    data = {"store": str(corpus / "store"), "sources": [str(corpus / "corpus.jsonl")]}
    config = write_config(folder, data=data, train={"steps": STEPS})
    result = headway("train", config, "name=whole")
    assert result.returncode == 0, result.stderr
    return state_hash(folder / "runs" / "whole")


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    proxy = S3Proxy(s3.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # what is tried again is to be tried by us
    yield proxy
    proxy.close()


def worker_of(run: Path) -> int:
    """Process of the worker that trains.

    Raises:
        ProcessLookupError: it has ended.
    """
    found = read_heartbeat(max(run.glob("attempts/*")) / "heartbeat-0")
    if found is None:
        raise ProcessLookupError
    return found.pid


class Weather:
    """What becomes of requests: each kind of fault at least once; and the worker is killed in mid-upload, twice."""

    def __init__(self, run: Path) -> None:
        self._run, self._away_until = run, 0.0
        self._kills = [4, 10]
        last = f"step-{STEPS:08d}/manifest.json"
        self._once = {("shard", "cut"), ("manifest.json", "412"), ("manifest.json", "slow"), ("newest.json", "lost")}
        self._once.add((last, "503"))

    def __call__(self, method: str, path: str, body: bytes) -> str | None:
        if time.monotonic() < self._away_until:
            return "503"
        if method == "GET" and "list-type" in path:
            return "stale"
        if method != "PUT" or ("/step-" not in path and "newest" not in path):
            return None
        step = int(path.split("/step-")[1][:8]) if "/step-" in path else 0
        if "shard" in path and self._kills and step >= self._kills[0]:
            self._kills.pop(0)
            self._away_until = time.monotonic() + 1.0
            os.kill(worker_of(self._run), signal.SIGKILL)
            return "503"
        for part, action in sorted(self._once):
            if part in path:
                self._once.remove((part, action))
                return action
        return None


@pytest.mark.slow
def test_a_run_ends_with_the_same_bits_whatever_the_store_and_the_machine_do(
    tiny: Callable[..., Path],
    s3: S3Server,
    proxy: S3Proxy,
    tmp_path: Path,
    whole: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, run = f"{s3.url}/{tmp_path.name}-weather", tmp_path / "runs" / "tiny"
    config = tiny(
        train={"steps": STEPS},
        checkpoint={"every": "2 steps", "remote": {"url": url}},
        supervise={"max_failures": 1, **PATIENT},
    )
    weather = Weather(run)
    proxy.rules = [weather]
    hurt = headway("train", config, faults="freeze@step=5,freeze@step=11#2", patient=True)
    assert hurt.returncode == 1 and "attempt 1 ended: worker 0" in hurt.stderr, hurt.stderr
    assert not weather._kills, hurt.stderr
    shutil.rmtree(run / "checkpoints")
    result = headway("train", config)
    assert result.returncode == 0, result.stderr
    assert f"downloading {url}/tiny/run-001/step-" in result.stderr
    assert all(proxy.done[action] for action in ("503", "412", "cut", "slow", "lost", "stale")), proxy.done
    assert "does not answer as it should" in result.stderr and "answers again" in result.stderr
    assert state_hash(run) == whole and prove(run).problems == []
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)  # as it is, without stale listings
    checked = headway("checkpoints", "verify", f"{url}/tiny", "--json")
    assert checked.returncode == 0, checked.stderr
    assert remote_manifests(f"{url}/tiny")[-1].manifest.state_sha256 == whole


@pytest.mark.slow
def test_a_run_that_may_not_upload_says_so_goes_on_and_the_same_command_makes_up_for_it(
    tiny: Callable[..., Path], s3: S3Server, proxy: S3Proxy, tmp_path: Path, whole: str
) -> None:
    """The keys have expired in mid-run: no waiting helps."""
    url, run = f"{s3.url}/{tmp_path.name}-keys", tmp_path / "runs" / "tiny"
    config = tiny(
        train={"steps": STEPS},
        checkpoint={"every": "2 steps", "remote": {"url": url}},
        supervise=PATIENT,
        telemetry={"report": False, "alert": f"cat >> '{tmp_path}/alerts.jsonl'"},
    )
    proxy.rules = [lambda method, path, body: "403" if method == "PUT" and "shard" in path else None]
    ended = threading.Event()

    def go_on_once_it_has_failed() -> None:
        while not ended.wait(0.1):
            if proxy.done["403"]:
                with suppress(ProcessLookupError):
                    os.kill(worker_of(run), signal.SIGCONT)

    thread = threading.Thread(target=go_on_once_it_has_failed, daemon=True)
    thread.start()
    result = headway("train", config, faults="freeze@step=5", patient=True)
    ended.set()
    assert result.returncode == 0, result.stderr
    why = "is not uploaded: the store denies access"
    ends = "the run is finished, and the same command uploads it once the store can be used"
    assert why in result.stderr and "training continues, and the next checkpoint is tried" in result.stderr
    assert f"step {STEPS} {why}" in result.stderr and ends in result.stderr
    failed = read_metrics(run).series("checkpoint/upload_failed_step")[1]
    assert failed[0] < STEPS and failed[-1] == STEPS
    told = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    # Commands do not wait for each other, so of two at the same time either may write first.
    alerts = [alert["what"] for alert in sorted(told, key=lambda alert: alert["time"])]
    assert sum(why in text for text in alerts) > 1 and ends in alerts[-1]
    assert state_hash(run) == whole and prove(run).problems == []
    proxy.rules = []
    assert remote_manifests(f"{url}/tiny") == [], "half of a checkpoint must not be seen"
    again = headway("train", config)
    assert again.returncode == 0 and f"not known to be at {url}; uploading it" in again.stderr, again.stderr
    (found,) = remote_manifests(f"{url}/tiny")
    assert found.manifest.state_sha256 == whole
    resolved = load_resolved(run / "config.yaml")
    remote = resolved.checkpoint.remote
    assert remote is not None
    assert is_sent(remote, run_identity(resolved), found.manifest), "there is nothing left to do"
