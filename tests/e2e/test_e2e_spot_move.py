"""`headway spot` moves a launched run to a cheaper region: two disks that share nothing but a real object store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.clouds.launchers.record import audited
from headway.core.process.waiting import wait_until
from headway.cost.price_book import save_offers
from support.object_storage import S3Server
from support.places import EAST, SLOW_LOSS, WEST, offer
from support.runs import headway, skip_without, state_hash
from support.waits import LONG

skip_without("s3fs")

#: Regions as folders. A job is a training in one of them, and no two of them train at the same time.
REGIONS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from headway.clouds.launchers.launcher import Handle, JobState

class Regions:
    def problems(self, job):
        yield from job.problems()

    def files(self, job):
        return {"config.yaml": job.config_text()}

    def check(self, job):
        pass

    def submit(self, job, folder):
        assert not list(Path().glob("*/alive")), "two owners"
        place = Path(job.config.launch.environment["REGION"])
        place.mkdir(exist_ok=True)
        (place / "alive").touch()
        train = f"{sys.executable} -m headway train {(folder / 'config.yaml').absolute()} > log 2>&1"
        words = f"trap : TERM; {train}; echo $? > code; rm alive"
        child = subprocess.Popen(["sh", "-c", words], cwd=place, start_new_session=True)
        return Handle("own_regions:REGIONS", str(child.pid), "1", 60, {"place": str(place)}, time.time())

    def status(self, handle):
        place = Path(handle.details["place"])
        if (place / "alive").exists():
            return JobState("running", "trains")
        code = (place / "code").read_text().strip()
        return JobState({"0": "finished", "75": "cancelled"}.get(code, "failed"), f"exit code {code}")

    def logs(self, handle, follow):
        return 0

    def cancel(self, handle):
        if self.status(handle).state == "running":
            os.killpg(int(handle.id), signal.SIGTERM)

REGIONS = Regions()
"""


@pytest.mark.slow
def test_a_run_moves_to_a_cheaper_region_and_ends_with_the_same_bits(
    s3: S3Server, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setenv("NAP", "0.02")
    (tmp_path / "own_regions.py").write_text(REGIONS)
    (tmp_path / "slow_loss.py").write_text(SLOW_LOSS)
    save_offers("made", [offer(EAST, 2.0), offer(WEST, 3.0)])
    config = tiny(name="moved", runs="runs", train={"steps": 60}, checkpoint={"every": "10 min"}, loss="slow_loss:slow")
    tier = f"checkpoint.remote.url={s3.url}/{tmp_path.name}"
    places = [f"{key} traffic=0 launch.environment.REGION={name}" for key, name in ((EAST, "east"), (WEST, "west"))]
    policy = ("--pause-above", "5", "--resume-below", "4", "--every", "1 s", "--min-run", "1 s",
              "--move-time", "1 s", "--state-gib", "0.1", "--place", places[0], "--place", places[1])  # fmt: skip
    launch = (sys.executable, "-m", "headway", "launch", config, "--on", "own_regions:REGIONS", tier)
    words = [sys.executable, "-m", "headway", "spot", "runs/moved", *policy, "--", *launch]
    holder = subprocess.Popen(list(map(str, words)), stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "east" / "runs" / "moved" / "metrics.jsonl"
    try:
        assert wait_until(lambda: holder.poll() is not None or metrics.exists(), LONG, 0.1)
        save_offers("made", [offer(EAST, 9.0), offer(WEST, 3.0)])
        said = holder.communicate(timeout=LONG)[1]
    finally:
        holder.kill()
    assert (tmp_path / "west" / "log").exists(), said
    log = (tmp_path / "west" / "log").read_text()
    assert holder.returncode == 0, said + log
    assert f"$3.00 an hour for {WEST}, moving there" in said and "downloading s3://" in log, said + log
    assert [line.get("place") for line in audited(tmp_path / "runs" / "moved") if line["action"] == "spot"] == [
        EAST,
        WEST,
    ]
    monkeypatch.setenv("NAP", "0")
    whole = headway("train", config, "name=whole")
    assert whole.returncode == 0, whole.stderr
    assert state_hash(tmp_path / "west" / "runs" / "moved") == state_hash(tmp_path / "runs" / "whole")
