"""Threads sleep or spin while they wait, by what the machine shows; no bit of a run depends on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headway import Callback, Config, Trainer
from headway.core.machine.neighbours import Load, WaitMode
from headway.core.machine.openmp import WAIT_VARIABLES, find_libgomp
from headway.run.session import records
from headway.telemetry.metrics import read_metrics
from headway.training import omp_wait_policy
from headway.training.omp_wait_policy import WaitingThreads
from support.runs import state_hash

pytestmark = pytest.mark.skipif(find_libgomp() is None, reason="this PyTorch uses another OpenMP library than libgomp")


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


JOB: Any = SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu"), size=1))


class Rows:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.arange(4096.0).sin() * (index + 1) / 16, "y": torch.tensor([float(index)])}


def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    out: torch.Tensor = (model(batch["x"]) - batch["y"]).square().mean()
    return out


class Look(Callback):
    """Keeps whether the idle team is there after each step."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
        self.seen.append(any(thread.name == "headway-idle-team" for thread in threading.enumerate()))


def train(folder: Path, name: str, watch: WaitingThreads, monkeypatch: pytest.MonkeyPatch, threads: int = 2) -> Look:
    monkeypatch.setattr(records, "WaitingThreads", lambda: watch)
    torch.manual_seed(0)
    config = Config.model_validate(
        {
            "name": name,
            "runs": str(folder),
            "train": {"steps": 4, "global_batch": 8, "device": "cpu"},
            "parallel": {"threads": threads},
            "telemetry": {"report": False},
        }
    )
    look = Look()
    Trainer(
        nn.Sequential(nn.Linear(4096, 64), nn.Tanh(), nn.Linear(64, 1)), Rows(), loss, config, callbacks=[look]
    ).fit()
    return look


def fixed(mode: WaitMode) -> WaitingThreads:
    return WaitingThreads(lambda threads, workers: mode, lambda: lambda: Load(waited=0.5 if mode == "sleep" else 0.0))


def test_how_threads_wait_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(tmp_path, "spin", fixed("spin"), monkeypatch).seen == [False] * 4
    assert train(tmp_path, "sleep", fixed("sleep"), monkeypatch).seen == [True] * 4
    assert state_hash(tmp_path / "spin") == state_hash(tmp_path / "sleep")
    assert not any(thread.name.startswith(("headway-idle", "headway-wait")) for thread in threading.enumerate())
    for name, sleeps in (("spin", 0.0), ("sleep", 1.0)):
        _, values = read_metrics(tmp_path / name).finite("health/threads_sleep")
        assert values.tolist() == [sleeps], "recorded when it changes"


def test_the_mode_follows_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omp_wait_policy, "_EVERY_SECONDS", 0.001)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    loads, over, seen = [Load(waited=0.5), Load(waited=0.03), Load(waited=0.0)], threading.Event(), list[float]()

    def measure() -> Load:
        metrics = dict[str, float]()
        watch.on_step(JOB, 1, metrics)
        seen.extend(metrics.values())
        if not loads:
            over.set()
        return loads.pop(0) if loads else Load()

    watch = WaitingThreads(lambda threads, workers: "spin", lambda: measure)
    watch.on_start(JOB)
    assert over.wait(30.0)
    watch.on_end(JOB)
    assert seen == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("why", ["one thread", "the user has chosen", "another library"])
def test_where_there_is_nothing_to_choose_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "the user has chosen":
        monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    if why == "another library":
        monkeypatch.setattr(omp_wait_policy, "find_libgomp", lambda: None)
    look = train(tmp_path, "run", fixed("sleep"), monkeypatch, threads=1 if why == "one thread" else 2)
    assert look.seen == [False] * 4
    assert not len(read_metrics(tmp_path / "run").finite("health/threads_sleep")[0])


def test_workers_look_at_the_threads_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(omp_wait_policy, "workers_of_this_machine", lambda size: 4)
    watch = WaitingThreads(lambda *seen: asked.append(seen) or "spin", lambda: Load)  # type: ignore[func-returns-value, arg-type]

    watch.on_start(JOB)
    watch.on_end(JOB)
    assert asked == [(12, 4)]
