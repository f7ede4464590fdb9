"""A spot machine is taken away in mid-run: saved, code 75, and the same bits at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.core.process.waiting import wait_until
from support.notices import Cloud, metadata_service, utc
from support.runs import headway, start_headway, state_hash
from support.waits import LONG

Change = Callable[[Cloud, Path], None]


def wait_for(condition: Callable[[], bool]) -> None:
    assert wait_until(condition, LONG)


def preempted(cloud: Cloud, run: Path) -> None:
    cloud.change_google("preempted", "TRUE")


def recommended_then_interrupted(cloud: Cloud, run: Path) -> None:
    cloud.rebalance = {"noticeTime": utc(0)}
    wait_for(lambda: bool(list((run / "checkpoints").glob("step-*"))))
    saved = (run / "metrics.jsonl").stat().st_size
    wait_for(lambda: (run / "metrics.jsonl").stat().st_size > saved)  # a recommendation alone stops nothing
    cloud.spot = {"action": "terminate", "time": utc(120)}


def scheduled(cloud: Cloud, run: Path) -> None:
    cloud.events = [{"EventId": "b", "EventType": "Preempt", "Resources": ["trainer_7"], "EventStatus": "Scheduled"}]


@pytest.mark.parametrize(
    ("source", "change", "wishes", "workers"),
    [
        ("gcp", preempted, ["stop"], 1),
        pytest.param("aws", recommended_then_interrupted, ["save", "stop"], 2, marks=pytest.mark.slow),
        pytest.param("azure", scheduled, ["stop"], 2, marks=pytest.mark.slow),
    ],
)
def test_a_notice_saves_and_stops_and_the_run_goes_on(
    tiny: Callable[..., Path],
    tmp_path: Path,
    source: str,
    change: Change,
    wishes: list[str],
    workers: int,
) -> None:
    taken = tmp_path / "runs/taken"
    with metadata_service() as cloud:
        sections: dict[str, Any] = {
            "preemption": {"watch": [source], "endpoints": {source: cloud.url}},
            "train": {"steps": 10**6},
            "checkpoint": {"every": "1 h"},
            # A learning rate that does not depend on how long the run was meant to be.
            "schedule": {"name": "constant", "warmup": "5 steps"},
        }
        config = tiny(**sections)
        process = start_headway("train", config, "name=taken", "-w", str(workers), strategies=workers > 1)
        try:
            wait_for((taken / "metrics.jsonl").exists)
            change(cloud, taken)
            announced = time.time()
            _, errors = process.communicate(timeout=LONG)
        finally:
            process.kill()
        answered = cloud.started
    assert process.returncode == 75, errors
    assert f"stopped by {source}: " in errors
    assert answered == (["b"] if source == "azure" else []), "it may begin, and need not wait for its time"
    record = json.loads((taken / "attempts/001/attempt.json").read_text())
    assert (record["outcome"], record["exit_code"]) == ("preempted", 75)
    assert [notice["wish"] for notice in record["notices"]] == wishes
    assert announced - 1 <= record["notices"][-1]["seen"] <= record["ended"]
    step = int(sorted((taken / "checkpoints").iterdir())[-1].name[5:])
    quiet = ["preemption.watch=none", f"train.steps={step + 10}", "--accept-changes", "-w", str(workers)]
    assert headway("train", config, "name=taken", *quiet).returncode == 0
    assert headway("train", config, "name=whole", *quiet).returncode == 0
    assert state_hash(tmp_path / "runs/whole") == state_hash(taken)
