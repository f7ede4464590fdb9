"""A launched job that prices pause, resume, grow and move, on a cluster that is one file; and what cannot be held."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.clouds.launchers import ending, held, spot
from headway.clouds.launchers.ending import exit_code_of, only_one, stop_launched, wait_for_end
from headway.clouds.launchers.held import HeldLaunch, LaunchCommand
from headway.clouds.launchers.job import Job
from headway.clouds.launchers.launcher import Handle, JobState
from headway.clouds.launchers.price_feeds import PlaceFeed, moving_of
from headway.clouds.launchers.record import audited, write_handle
from headway.clouds.launchers.spot import SpotJob, hold_by_price
from headway.clouds.spot.places import Moving, Place, parse_place
from headway.clouds.spot.policy import SpotPolicy
from headway.config import load_config
from headway.config.units import Interval
from headway.core.errors import ConfigError
from headway.cost.price_book import save_offers
from support.followers import write_run
from support.places import EAST, WEST, offer
from support.runs import headway_in_copy

POLICY = SpotPolicy(2.5, 2.0, min_run_seconds=0.0, min_pause_seconds=0.0)
#: A launch as a process: it submits a job to the cluster, waits for its end, and ends as the job does.
LAUNCH = """
import json, pathlib, sys, time
run = pathlib.Path(sys.argv[1])
cluster = run.parent / "cluster.json"
jobs = json.loads(cluster.read_text())
assert all(job["state"] != "running" for job in jobs), "two owners"
jobs.append({"state": "running", "words": sys.argv[2:]})
number = len(jobs) - 1
cluster.write_text(json.dumps(jobs))
handle = {"target": "own_cluster:CLUSTER", "id": str(number), "machines": "1", "grace_seconds": 1, "details": {},
          "launched": time.time()}
(run / "launch.json.new").write_text(json.dumps(handle))
(run / "launch.json.new").rename(run / "launch.json")
while number < 2 and json.loads(cluster.read_text())[number]["state"] == "running":
    time.sleep(0.01)
"""


class Cluster:
    """A launcher whose jobs are lines of a file; it refuses so many cancels first."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "cluster.json"
        self.file.write_text("[]")
        self.refusals = 0

    @property
    def jobs(self) -> list[dict[str, Any]]:
        while True:
            with suppress(ValueError):  # it is being written
                return list(json.loads(self.file.read_text()))

    def problems(self, job: Job) -> Iterator[ConfigError]:
        yield from job.problems()

    def status(self, handle: Handle) -> JobState:
        return JobState(self.jobs[int(handle.id)]["state"], "as the file says")

    def cancel(self, handle: Handle) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ConfigError("the engine is away")
        jobs = self.jobs
        jobs[int(handle.id)]["state"] = "cancelled"
        self.file.write_text(json.dumps(jobs))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(spot, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(ending, "_FIRST_LOOK_SECONDS", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "launch.py").write_text(LAUNCH)
    (tmp_path / "runs" / "own").mkdir(parents=True)
    return tmp_path / "runs" / "own"


@pytest.fixture
def cluster(run: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    module = ModuleType("own_cluster")
    found = module.CLUSTER = Cluster(run.parent)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_cluster", module)
    return found


def launch(run: Path, *overrides: str, **options: Any) -> LaunchCommand:
    own = (f"runs={run.parent}", "name=own", "data.store=store", "train.device=cpu", "parallel.workers=8")

    def parse(words: Any) -> Job:
        machines = [int(after) for word, after in pairwise(words) if word == "--machines"]
        given = [word for word in words if "=" in word and not word.startswith(("-", "/"))]
        return Job(load_config("quickstart", [*own, *given]), machines[-1] if machines else 1)

    command = [sys.executable, str(run.parents[1] / "launch.py"), str(run), *overrides]
    return LaunchCommand(command, "own_cluster:CLUSTER", parse, **options)


def held_job(run: Path, policy: SpotPolicy = POLICY, **options: Any) -> SpotJob:
    found = launch(run, *options.pop("overrides", ()), **options)
    return SpotJob(run, found.command, policy, found.workers, 0.0, found)


def prices(cluster: Cluster, *while_running: float, between: float = 1.5) -> Callable[[], float]:
    """A price while each of the first jobs runs, and one between them; the third job ends by itself."""

    def price() -> float:
        jobs = cluster.jobs
        is_running = 0 < len(jobs) < 3 and jobs[-1]["state"] == "running"
        return while_running[len(jobs) - 1] if is_running else between

    return price


def test_a_dear_hour_removes_the_job_and_a_cheap_one_launches_it_again(run: Path, cluster: Cluster) -> None:
    """One that the engine does not give up is asked for again; a pause begins only when no machine has it."""
    cluster.refusals = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held, "_AGAIN_SECONDS", 0.05)
        assert hold_by_price(held_job(run), prices(cluster, 3.0, 3.0)) == 0
    assert [job["state"] for job in cluster.jobs] == ["cancelled", "cancelled", "running"]
    asked = [line["why"] for line in audited(run) if line["action"] == "cancel"]
    assert asked == ["spot: $3.00 an hour, pausing"] * 3
    words = cluster.jobs[0]["words"]
    assert words[-3:] == ["--wait", "--yes", "cost.usd_per_hour=1.5"], "billed at the price that has started it"


def test_a_launch_grows_by_machines_and_keeps_its_own_price(run: Path, cluster: Cluster) -> None:
    policy = replace(POLICY, grow_below=1.2)
    job = held_job(run, policy, overrides=("determinism=elastic", "cost.usd_per_hour=9"), machines=(1, 2))
    assert hold_by_price(job, prices(cluster, 1.0, 2.2)) == 0
    words = [job["words"] for job in cluster.jobs]
    assert [found[found.index("--machines") + 1] for found in words] == ["1", "2", "1"]
    assert not any("cost.usd_per_hour=1" in word for found in words for word in found)


def test_a_job_of_a_holder_that_was_killed_is_held_again(run: Path, cluster: Cluster) -> None:
    cluster.file.write_text(json.dumps([{"state": "running"}]))
    write_handle(run, Handle("own_cluster:CLUSTER", "0", "1", 1, {}, time.time()))
    assert hold_by_price(held_job(run), prices(cluster, 3.0, 3.0)) == 0
    assert [job["state"] for job in cluster.jobs] == ["cancelled", "cancelled", "running"]


def test_a_run_has_one_holder(run: Path, cluster: Cluster) -> None:
    with only_one(run, "spot"), pytest.raises(ConfigError, match="another headway spot has this run"):
        hold_by_price(held_job(run), lambda: 1.0)
    assert cluster.jobs == []


def test_a_holder_that_is_stopped_removes_the_job(run: Path, cluster: Cluster) -> None:
    holder = HeldLaunch(run)
    holder.start([*launch(run).command])
    assert holder.stop([15]) == 75
    assert [job["state"] for job in cluster.jobs] == ["cancelled"]
    assert audited(run)[-1]["why"] == "spot: headway spot was stopped by SIGTERM"


def test_a_job_that_is_not_over_is_an_error_and_one_that_has_finished_is_no_pause(
    run: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_REMOVAL_SECONDS", -1.0)
    write_handle(run, Handle("own_cluster:CLUSTER", "0", "1", 0, {}, 0.0))
    cluster.file.write_text(json.dumps([{"state": "finished"}]))
    assert stop_launched(run, "why").state == "finished"
    cluster.file.write_text(json.dumps([{"state": "unknown"}]))
    monkeypatch.setattr(Cluster, "cancel", lambda self, handle: None)
    with pytest.raises(ConfigError, match="is not over"):
        stop_launched(run, "why")


def test_waiting_ends_with_the_exit_code_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "_FIRST_LOOK_SECONDS", 0.001)
    states = iter(["waiting", "waiting", "unknown", None, "running", "running", "failed"])

    class Engine(Cluster):
        def status(self, handle: Handle) -> JobState:
            if (state := next(states)) is None:
                raise ConfigError("no route to the cluster")
            return JobState(state, "words")  # type: ignore[arg-type]

    handle = Handle("own", "7", "1", 1, {}, 1000.0)
    state = wait_for_end(Engine(tmp_path), handle)  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert state.state == "failed" and said.count("asking again") == 1
    assert said.count("7 on own: words") == 1 and said.count("7 on own: running") == 1
    assert exit_code_of(state, handle, tmp_path / "elsewhere") == 1
    assert exit_code_of(JobState("finished", ""), handle, tmp_path) == 0
    assert exit_code_of(JobState("cancelled", ""), handle, tmp_path) == 7
    run = write_run(tmp_path, [], outcomes=["budget reached"])
    record = run / "attempts" / "001" / "attempt.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "exit_code": 6, "started": 1001.0}))
    assert exit_code_of(state, handle, run) == 6
    assert exit_code_of(state, replace(handle, launched=1002.0), run) == 1, "that was an earlier launch"


# Places --------------------------------------------------------------------------------------------------------------

TIER = "checkpoint.remote.url=s3://bucket/runs"


@pytest.fixture
def places() -> tuple[Place, Place]:
    save_offers("made", [offer(EAST, 2.0), offer(WEST, 2.2)])
    return (
        parse_place(f"{EAST} traffic=0 launch.slurm.partition=east"),
        parse_place(f"{WEST} traffic=0.01 launch.slurm.partition=west"),
    )


def test_a_run_moves_where_it_is_cheaper_and_is_billed_there(
    run: Path, cluster: Cluster, places: tuple[Place, Place]
) -> None:
    """East becomes dear while it trains there; the move is worth its upload. A spike on both is a pause."""
    moving = Moving(save_seconds=60.0, start_seconds=120.0, state_gib=1.0, uploads_per_hour=6.0)
    job = held_job(run, replace(POLICY, pause_above=4.5, resume_below=4.0), overrides=(TIER,), places=places)

    class Moved(PlaceFeed):
        def __call__(self) -> float:
            if len(cluster.jobs) == 1:
                save_offers("made", [offer(EAST, 4.0), offer(WEST, 2.2)])
            if len(cluster.jobs) == 2:
                dear = 9.0 if cluster.jobs[1]["state"] == "running" else 2.2
                save_offers("made", [offer(EAST, 9.0), offer(WEST, dear)])
            return super().__call__()

    assert hold_by_price(job, Moved(places, 8, moving=lambda: moving)) == 0
    ways = [[word for word in found["words"] if "partition" in word or "usd" in word] for found in cluster.jobs]
    assert ways == [
        ["launch.slurm.partition=east", "cost.usd_per_hour=2.0"],
        ["launch.slurm.partition=west", "cost.usd_per_hour=2.2"],
        ["launch.slurm.partition=west", "cost.usd_per_hour=2.2"],
    ]
    asked = [line["why"] for line in audited(run) if line["action"] == "cancel"]
    assert asked == [
        f"spot: $2.20 an hour for {WEST}, moving there",
        f"spot: $9.00 an hour for {WEST}, pausing",
    ]


def test_skypilot_takes_a_place_as_it_is() -> None:
    found = LaunchCommand(["headway"], "sky", lambda words: None, (Place(WEST),))  # type: ignore[arg-type,return-value]
    assert found.words(Place(WEST))[-3:] == [
        "launch.sky.infra=aws/us-west-2", "launch.sky.instance_type=p5.48xlarge", "launch.sky.spot=true",
    ]  # fmt: skip


def test_what_a_move_takes_is_measured_or_given(tmp_path: Path) -> None:
    every = Interval(600, "seconds")
    assert moving_of(tmp_path / "away", every, None) is None
    assert moving_of(tmp_path / "away", every, (300.0, 16.0)) == Moving(300.0, 0.0, 16.0, 6.0)
    assert moving_of(tmp_path / "away", Interval(100, "steps"), (300.0, 16.0)) is None
    saves = {"checkpoint/stall_seconds": 1.0, "checkpoint/write_seconds": 4.0, "checkpoint/upload_seconds": 15.0}
    lines = [{"step": step, "attempt": 1, "time": 1000.0 + step, "speed/step_seconds": 2.0} for step in range(1, 31)]
    records = [{**line, **(saves if line["step"] % 10 == 0 else {})} for line in lines]
    run = write_run(tmp_path, records)
    assert moving_of(run, every, None) is None, "no checkpoint"
    saved = run / "checkpoints" / "step-00000030"
    saved.mkdir(parents=True)
    files = {"weights.safetensors": {"bytes": 2**31}}
    (saved / "manifest.json").write_text(json.dumps({"step": 30, "files": files, "context": {}}))
    found = moving_of(run, None, None)
    assert found is not None
    assert (found.save_seconds, found.uploads_per_hour) == (20.0, 3600 / 20)
    assert found.start_seconds >= 15.0


@pytest.mark.parametrize(
    ("overrides", "texts", "options", "words"),
    [
        ((), (f"{EAST} traffic=0 name=own", f"{WEST} traffic=0 launch.slurm.qos=w"), {}, "only by a remote tier"),
        ((TIER,), (f"{EAST} launch.slurm.qos=e", f"{WEST} traffic=0"), {}, "price of traffic"),
        ((TIER,), (f"{EAST} traffic=0", f"{WEST} traffic=0"), {}, "a move would lead nowhere"),
        ((), (), {"machines": (1, 2)}, "only with determinism=elastic"),
        ((), (), {"workers": (1, 2)}, "only with determinism=elastic"),
        (("name=other",), (), {}, "keeps its handle in"),
    ],
)
def test_a_launch_that_cannot_be_held_is_refused(
    run: Path, cluster: Cluster, overrides: tuple[str, ...], texts: tuple[str, ...], options: dict[str, Any], words: str
) -> None:
    found = launch(run, *overrides, places=tuple(map(parse_place, texts)), **options)
    with pytest.raises(ConfigError, match=words) as error:
        found.check(run)
    assert error.value.fix and cluster.jobs == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prices", "p.csv", "--", "headway", "launch", "my.yaml", "--on", "metaflow"), "a flow cannot be held"),
        (("--prices", "p.csv", "--", "headway", "launch", "my.yaml", "--on", "ray"), "takes the checkpoints with it"),
        (("--prices", "p.csv", "--", "headway", "launch", "status", "runs/own"), "only the launch of a run is held"),
        (("--prices", "p.csv", "--", "headway", "launch", "my.yaml", "--on", "slurm", "--smoke"), "start no run"),
        (("--prices", "p.csv", "--", "headway", "launch", "my.yaml", "--on", "none"), "no launcher 'none'"),
        (("--place", EAST, "--place", WEST, "--", "headway", "train", "my.yaml"), "stays here"),
        (("--place", "east", "--", "headway", "train", "my.yaml"), "'east' is not part of a place"),
        (("--place", "lambda/x/y/spot", "--refresh", "1 h", "--", "headway", "train", "my.yaml"), "cannot be fetched"),
        (
            ("--place", EAST, "--prices", "p.csv", "--", "headway", "train", "my.yaml"),
            "comes from a file, a command or",
        ),
    ],
)
def test_spot_refuses_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("base: quickstart\nname: own\ntrain: {device: cpu}\n")
    Path("p.csv").write_text("time,usd_per_hour\n1,2\n")
    code, printed = headway_in_copy("spot", "runs/own", "--pause-above", "3", "--resume-below", "2", *words)
    assert code == 2 and said in printed, printed
    assert not Path("runs").exists()
