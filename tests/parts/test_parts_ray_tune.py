"""Searches with Ray Tune: trials are runs, whatever Ray stops, pauses, clones or loses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.config import load_resolved
from headway.core.process.waiting import wait_until
from headway.run.directory.ledger_proof import prove
from headway.telemetry.record import is_run, open_run
from support.parts_table import RAY
from support.runs import headway, saved_step, state_hash
from support.waits import LONG

pytestmark = [pytest.mark.parts(RAY), pytest.mark.timeout(1800)]

_SEARCH = """
import json, os, sys
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler, PopulationBasedTraining
import headway


class PausesOnce(FIFOScheduler):
    def on_trial_result(self, controller, trial, result):
        return self.PAUSE if result["training_iteration"] == 2 else self.CONTINUE



config, kind, folder, address, *words = sys.argv[1:]
variables = {name: os.environ[name] for name in ("HEADWAY_FAULTS", "OMP_NUM_THREADS") if name in os.environ}
own = {"num_cpus": 2, "include_dashboard": False, "_node_ip_address": "127.0.0.1"} if address == "local" else {}
environment = {"PYTHONPATH": os.pathsep.join(sys.path), **variables}
ray.init(address=address, runtime_env={"env_vars": environment}, **own)
rate = "optimizer.learning_rate"
space, search, metric = {rate: tune.grid_search([1e-4, 3e-2])}, None, {"metric": "evaluation/loss", "mode": "min"}
if kind == "asha":
    scheduler = ASHAScheduler(max_t=20, grace_period=2, reduction_factor=2)
elif kind == "pbt":
    scheduler = PopulationBasedTraining(
        perturbation_interval=1, quantile_fraction=0.5, hyperparam_mutations={rate: tune.loguniform(1e-3, 1e-1)}
    )
elif kind == "hyperband":
    from ray.tune.search.optuna import OptunaSearch

    scheduler, search = HyperBandScheduler(max_t=2, reduction_factor=2), OptunaSearch(seed=1)
    space = {rate: tune.loguniform(1e-3, 1e-1)}
else:
    scheduler = PausesOnce() if kind == "pauses" else None
samples = 4 if search else 1  # two brackets of HyperBand
tuner = tune.Tuner(
    headway.ray.trainable(headway.load_config(config, words)),
    param_space=space,
    tune_config=tune.TuneConfig(num_samples=samples, scheduler=scheduler, search_alg=search, **metric),
    run_config=tune.RunConfig(
        name=kind, storage_path=folder, verbose=1, failure_config=tune.FailureConfig(max_failures=3)
    ),
)
found = [
    {"path": one.path, "error": str(one.error), "step": one.metrics["step"], "loss": one.metrics["evaluation/loss"]}
    for one in tuner.fit()
]
json.dump(found, open(os.path.join(folder, "found.json"), "w"))
"""
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0",
    "OMP_NUM_THREADS": "1", "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "3000",
}  # fmt: skip


@pytest.fixture
def search(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    """Starts a search over two learning rates in this test's folder, and ends it with the block."""
    pytest.importorskip("ray", reason="there is no Ray: pip install '.[ray]'")
    config = tiny(train={"steps": 40}, evaluation={"every": "4 steps"}, checkpoint={"every": "4 steps", "keep": 20})

    @contextmanager
    def start(kind: str, address: str = "local") -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-c", _SEARCH, str(config), kind, str(tmp_path), address]
        slow = {"HEADWAY_FAULTS": "slow@step=1#*"}  # so that no trial ends before it is killed
        with (tmp_path / "ray.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **_ENVIRONMENT, **slow})
        try:
            yield process
        finally:
            process.terminate()
            process.wait()

    return start


def runs_of(folder: Path, kind: str) -> list[Path]:
    return sorted(path for path in (folder / kind).glob("*/*") if is_run(path) and ".old-" not in path.name)


def found_in(folder: Path, searching: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    assert searching.wait(LONG * 2) == 0, (folder / "ray.log").read_text()[-5000:]
    found: list[dict[str, Any]] = json.loads((folder / "found.json").read_text())
    assert [one["error"] for one in found] == ["None"] * len(found)
    return found


def state_alone(folder: Path, run: Path) -> str:
    """The state of a run by itself, with the config of a trial."""
    rate = load_resolved(run / "config.yaml").optimizer.learning_rate
    words = [f"name=alone-{rate}", f"optimizer.learning_rate={rate}"]
    done = headway("train", folder / "config.yaml", *words)
    assert done.returncode == 0, done.stderr
    return state_hash(folder / "runs" / f"alone-{rate}")


def first_that_saved(folder: Path, kind: str, step: int = 8) -> Path:
    """The first run of a search that has saved a step, which is waited for."""

    def saved() -> list[Path]:
        return [run for run in runs_of(folder, kind) if saved_step(run) >= step]

    assert wait_until(lambda: bool(saved()), LONG, 0.2), (folder / "ray.log").read_text()[-5000:]
    return saved()[0]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_killed_actor_of_a_search_with_asha_loses_nothing(search: Callable[..., Any], tmp_path: Path) -> None:
    with search("asha") as searching:
        run = first_that_saved(tmp_path, "asha")
        attempt = json.loads((run / "attempts/001/attempt.json").read_text())
        os.kill(parent_of(attempt["pid"]), signal.SIGKILL)
        found = found_in(tmp_path, searching)
    best, worst = sorted(found, key=lambda one: one["loss"])
    assert best["step"] == 40 and worst["step"] <= 40
    runs = runs_of(tmp_path, "asha")
    assert max(len(open_run(run).attempts) for run in runs) >= 2
    assert [prove(run).problems for run in runs] == [[], []]
    (ended,) = (run for run in runs if str(run.parent) == best["path"])
    assert state_hash(ended) == state_alone(tmp_path, ended)


def test_the_survivors_of_population_based_training_are_proven(search: Callable[..., Any], tmp_path: Path) -> None:
    with search("pbt") as searching:
        found = found_in(tmp_path, searching)
    assert [one["step"] for one in found] == [40, 40]
    runs = runs_of(tmp_path, "pbt")
    proofs = [prove(run) for run in runs]
    assert [proof.problems for proof in proofs] == [[], []] and [proof.steps for proof in proofs] == [40, 40]
    begun = [one for proof in proofs for one in proof.beginnings]
    assert begun, "no trial was cloned"
    changes = [change for proof in proofs for start in proof.segments for change in start.segment["changes"]]
    assert any("optimizer.learning_rate was" in change for change in changes)


def test_trials_that_are_paused_go_on_where_they_were(search: Callable[..., Any], tmp_path: Path) -> None:
    with search("pauses") as searching:
        found = found_in(tmp_path, searching)
    assert [one["step"] for one in found] == [40, 40]
    for run in runs_of(tmp_path, "pauses"):
        assert len(open_run(run).attempts) == 2 and prove(run).problems == []
        assert state_hash(run) == state_alone(tmp_path, run)


def test_hyperband_and_the_search_of_optuna_work_on_runs(search: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="there is no Optuna: pip install '.[tune]'")
    with search("hyperband") as searching:
        found = found_in(tmp_path, searching)
    assert len(found) == 4
    runs = runs_of(tmp_path, "hyperband")
    assert [prove(run).problems for run in runs] == [[]] * 4


def test_a_killed_node_of_a_search_loses_nothing(search: Callable[..., Any], tmp_path: Path) -> None:
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="there is no Ray: pip install '.[ray]'")
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        with search("grid", cluster.address) as searching:
            run = first_that_saved(tmp_path, "grid")
            attempt = json.loads((run / "attempts/001/attempt.json").read_text())
            raylet = parent_of(parent_of(attempt["pid"]))
            at_work = next(n for n in nodes if n.all_processes["raylet"][0].process.pid == raylet)
            cluster.remove_node(at_work, allow_graceful=False)
            found = found_in(tmp_path, searching)
    finally:
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    assert [one["step"] for one in found] == [40, 40]
    assert [prove(one).problems for one in runs_of(tmp_path, "grid")] == [[], []]
    assert len(open_run(run).attempts) >= 2 and state_hash(run) == state_alone(tmp_path, run)
