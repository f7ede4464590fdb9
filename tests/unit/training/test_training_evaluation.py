"""Who is told to stop leaves an evaluation, together with all other workers, and another attempt does it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headway.api import train
from headway.config import Config, load_config
from headway.config.derived.identity import changes
from headway.core.errors import Preempted
from headway.core.process import faults
from headway.data.feeding.evaluation_feed import EvaluationFeed
from headway.data.store import TokenStore
from headway.run.directory.ledger_proof import prove
from headway.telemetry.metrics import read_metrics
from headway.telemetry.report import write_report
from headway.training.evaluation import evaluate as evaluate_module
from headway.training.evaluation.evaluate import Evaluation, evaluate
from headway.training.evaluation.inference import evaluate_trained, load_trained
from headway.training.task import Objective
from support.runs import config_values, state_hash, write_corpus
from support.waits import LONG

OBJECTIVE = Objective(lambda model, batch: model(batch["x"]).sum(), lambda batch: len(batch["x"]))


class Batches:
    """Of an evaluation; counts those that were asked for."""

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, 0

    def __len__(self) -> int:
        return self.number

    def batch(self, index: int) -> dict[str, torch.Tensor]:
        self.asked += 1
        return {"x": torch.full((2, 3), float(index))}


class Together:
    """Exchanges between workers that are threads of this process."""

    def __init__(self, workers: int) -> None:
        self.workers, self.exchanges = workers, 0
        self._said: dict[int, list[float]] = {}
        self._barrier = threading.Barrier(workers, action=self._count, timeout=LONG)

    def _count(self) -> None:
        self.exchanges += 1

    def world(self, rank: int) -> Any:
        def gather(values: list[float]) -> list[list[float]]:
            self._said[rank] = values
            self._barrier.wait()
            everyone = [self._said[other] for other in range(self.workers)]
            self._barrier.wait()  # nobody may say more before all have heard
            return everyone

        return SimpleNamespace(
            size=self.workers,
            data_rank=rank,
            mesh=SimpleNamespace(data=self.workers),
            device=torch.device("cpu"),
            counts_loss=True,
            counts_items=True,
            gather=gather,
        )


def evaluated(
    workers: int, batches: list[Batches], stopped: Callable[[int], Callable[[], bool]]
) -> tuple[list[Evaluation | None], int]:
    """What every worker has of one evaluation, and how many exchanges it took."""
    together = Together(workers)

    def one(rank: int) -> Evaluation | None:
        model = nn.Linear(3, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        found = evaluate(OBJECTIVE, model, batches[rank], together.world(rank), stopped=stopped(rank))
        assert model.training, "also where it was left"
        return found

    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(one, range(workers)))
    return found, together.exchanges // 2


@pytest.mark.parametrize("who", [0, 2])
def test_all_workers_leave_an_evaluation_before_the_same_batch(who: int) -> None:
    """Whoever was told: one that stayed would wait for the others in a forward pass for ever."""
    batches = [Batches(90) for _ in range(3)]
    found, _ = evaluated(3, batches, lambda rank: lambda: rank == who and batches[rank].asked >= 4)
    assert found == [None] * 3
    (asked,) = {one.asked for one in batches}
    assert 4 <= asked < 30


def test_workers_that_nobody_stops_have_the_same_loss() -> None:
    found, _ = evaluated(3, [Batches(8) for _ in range(3)], lambda rank: lambda: False)
    assert found == [Evaluation(sum(range(8)) * 3 / 8, 16)] * 3


def test_workers_do_not_ask_each_other_before_every_fast_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    _, exchanges = evaluated(2, [Batches(400) for _ in range(2)], lambda rank: lambda: False)
    assert exchanges <= 2 + 5 + 200 // 32, "one of them is that of the losses"


def test_workers_ask_each_other_before_every_slow_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one worker alone is slow, whose clock the others cannot see."""
    clock = count(step=5.0)
    slow = threading.local()

    def monotonic() -> float:
        return float(next(clock)) if getattr(slow, "is_slow", False) else 0.0

    def stopped(rank: int) -> Callable[[], bool]:
        def ask() -> bool:
            slow.is_slow = rank == 1
            return False

        return ask

    monkeypatch.setattr(evaluate_module, "time", SimpleNamespace(monotonic=monotonic))
    _, exchanges = evaluated(2, [Batches(20) for _ in range(2)], stopped)
    assert exchanges >= 9


def test_a_single_worker_looks_before_every_batch() -> None:
    batches = Batches(9)
    world = SimpleNamespace(size=1, data_rank=0, mesh=SimpleNamespace(data=1), device=torch.device("cpu"))
    world.counts_loss = world.counts_items = True
    assert evaluate(OBJECTIVE, nn.Linear(3, 1), batches, world, stopped=lambda: batches.asked == 3) is None
    assert batches.asked == 3


@pytest.mark.slow
def test_an_evaluation_that_was_left_is_the_next_attempts(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an attempt begins with it, and where it is that of the last step, without which no run is finished."""
    path = tiny(train={"steps": 6}, evaluation={"rows": 8, "every": "4 steps"}, checkpoint={"every": "9 steps"})

    def attempt(name: str, stop: str = "") -> None:
        faults._passed.clear()
        monkeypatch.setenv("HEADWAY_FAULTS", f"stop@{stop}" if stop else "")
        train(load_config(path, [f"name={name}", "supervise.enabled=false"]))

    def saved() -> str:
        return max(folder.name for folder in (tmp_path / "runs/left/checkpoints").glob("step-*"))

    attempt("whole")
    for at, step in (("evaluation=4:2", 4), ("evaluation=4:2", 4), ("evaluation=6:2", 6)):
        with pytest.raises(Preempted, match=f"step {step} is saved"):
            attempt("left", at)
        point = at.split(":")[0]
        assert faults._passed[point] == 2, "it was left after the batch in which the signal came"
        assert saved() == f"step-{step:08d}"
        assert step not in read_metrics(tmp_path / "runs/left").series("evaluation/loss")[0]
    attempt("left")
    whole, left = (read_metrics(tmp_path / "runs" / name) for name in ("whole", "left"))
    for name in ("evaluation/loss", "train/loss"):
        assert [s.tolist() for s in left.series(name)] == [s.tolist() for s in whole.series(name)]
    assert left.series("evaluation/loss")[0].tolist() == [4, 6]
    assert state_hash(tmp_path / "runs/left") == state_hash(tmp_path / "runs/whole")
    assert not prove(tmp_path / "runs/left").problems
    before = (tmp_path / "runs/left/metrics.jsonl").read_bytes()
    attempt("left")
    assert (tmp_path / "runs/left/metrics.jsonl").read_bytes() == before, "now it is finished"


class Replayed(Batches):
    """Whose last batches are of replayed sources."""

    replay_from = 3


@pytest.mark.parametrize("workers", [1, 2])
def test_replayed_sources_have_a_loss_of_their_own(workers: int) -> None:
    together, model = Together(workers), nn.Identity()
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(evaluate, OBJECTIVE, model, Replayed(5), together.world(n)) for n in range(workers)]
        results = [job.result() for job in jobs]
    # Each of two items of batch n has the loss 3 n.
    assert results == [Evaluation(3.0, 6, Evaluation(10.5, 4))] * workers


def test_replay_is_recorded_and_shown_beside_what_is_learnt(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    old = [{"text": f"old {number}: " + "far hills " * 9} for number in range(40)]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(record) + "\n" for record in old))
    data = {"sources": [str(tmp_path / "corpus.jsonl"), {"path": str(tmp_path / "old.jsonl"), "role": "replay"}]}
    values = config_values(tmp_path, data={**data, "validation": 0.2}, evaluation={"every": "1 steps", "rows": 4})
    config = Config.model_validate({**values, "train": {**values["train"], "steps": 2}})
    run = train(config).directory
    found = read_metrics(run)
    assert len(found.series("evaluation/replay_loss")[1]) == len(found.series("evaluation/loss")[1]) == 2

    numbers = evaluate_trained(run, rows=4)
    assert found.last("evaluation/replay_loss") == pytest.approx(numbers["replay"]["loss"])
    assert found.last("evaluation/loss") == pytest.approx(numbers["loss"])
    store = TokenStore.open(config.data.store)
    feed = EvaluationFeed(store, sequence_length=32, limit=4, micro_batch=8, only=["old"])
    batch = feed.batch(0)
    model = load_trained(run).model
    with torch.no_grad():
        loss = model(batch["ids"], batch["targets"]) / (batch["targets"] != -100).sum()
    assert numbers["replay"]["loss"] == pytest.approx(loss.item(), rel=1e-5)

    page = write_report(run).read_text()
    assert "Replay loss" in page and "validation loss of replayed sources" in page


def test_another_role_is_no_other_run(tmp_path: Path) -> None:
    values = config_values(tmp_path, data={"sources": ["a.jsonl", "b.jsonl"]})
    plain = Config.model_validate(values)
    values["data"]["sources"] = ["a.jsonl", {"path": "b.jsonl", "role": "replay"}]
    assert not changes(plain, Config.model_validate(values))
    values["data"]["sources"] = [{"path": "b.jsonl", "role": "replay"}]
    with pytest.raises(ValueError, match="nothing to learn"):
        Config.model_validate(values)
