"""Saves that fail: counted, reported on the page of heartbeats, and the end of the run after too many in a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.api import train
from headway.checkpoint.save.fence import Fenced
from headway.checkpoint.save.outcomes import Outcome
from headway.config import load_config
from headway.core.coordination import heartbeat
from headway.core.coordination.heartbeat import Heartbeat, read_heartbeat
from headway.core.coordination.launched import is_rescheduled
from headway.core.errors import CheckpointError, HeadwayError, SavesFailed
from headway.telemetry.record import Run
from headway.training.failed_saves import FailedSaves

FULL = CheckpointError("the disk is full", where="/runs/tiny", fix="make room")


def job_at(step: int, is_first: bool = True) -> Any:
    world = SimpleNamespace(is_first=is_first, gather_json=lambda value: [value])
    config = SimpleNamespace(run_directory=Path("/runs/tiny"))
    return SimpleNamespace(state=SimpleNamespace(cursor=SimpleNamespace(step=step)), world=world, config=config)


def after(saves: FailedSaves, *outcomes: tuple[int, bool]) -> FailedSaves:
    """Tell of saves that start at step 4: their steps, and whether each succeeded."""
    saves.on_start(job_at(4))
    for step, is_good in outcomes:
        saves.on_saved(job_at(step), Outcome(step, error=None if is_good else FULL))
    return saves


def test_only_failures_in_a_row_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_heartbeat", Heartbeat(tmp_path / "heartbeat-0"))
    saves = after(FailedSaves(2), (6, False), (8, True), (10, False))
    assert not saves.too_many
    page = read_heartbeat(tmp_path / "heartbeat-0")
    assert page is not None and (page.failed_saves, page.failed_saves_in_row) == (2, 1)
    saves.on_saved(job_at(12, is_first=False), Outcome(12, error=FULL))
    assert not saves.too_many, "the others learn of their parts only"
    saves.on_saved(job_at(12), Outcome(12, error=FULL))
    assert saves.too_many
    page = read_heartbeat(tmp_path / "heartbeat-0")
    assert page is not None and (page.failed_saves, page.failed_saves_in_row) == (3, 2)


@pytest.mark.parametrize(
    ("can_move", "has_moved", "saves", "kind"),
    [
        (False, False, [], CheckpointError),
        (True, False, [], SavesFailed),
        (True, True, [], CheckpointError),  # nor did the attempt before
        (True, True, [(6, True)], SavesFailed),
    ],
)
def test_how_the_run_ends(
    can_move: bool, has_moved: bool, saves: list[tuple[int, bool]], kind: type[HeadwayError]
) -> None:
    counted = after(FailedSaves(2, can_move, has_moved), *saves, (8, False), (9, False))
    error = counted.end_of_run(job_at(10))
    saved = 6 if saves else 4
    assert type(error) is kind and error.exit_code == (75 if kind is SavesFailed else 4)
    assert error.what.startswith("2 saves in a row have failed") and "the disk is full" in error.what
    assert f"steps {saved + 1} to 10 are lost" in error.what and error.where == "/runs/tiny"
    assert "make room" in str(error.fix) and f"it continues from step {saved}" in str(error.fix)
    assert ("on another machine" in str(error.fix)) == (kind is SavesFailed)
    last = counted.end_without(FULL)
    assert type(last) is kind and last.what == FULL.what
    fenced = Fenced("another attempt has the run")
    assert counted.end_without(fenced) is fenced


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "RAY_JOB_ID", None])
def test_a_scheduler_starts_jobs_again(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    for one in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "SKYPILOT_TASK_ID", "RAY_JOB_ID", "METAFLOW_RUN_ID"):
        monkeypatch.delenv(one, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "1")
    assert is_rescheduled() == (name is not None)


@pytest.mark.parametrize("remote", [False, True])
def test_a_run_whose_saves_all_fail_ends(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    """With a remote tier another machine can take it up, once: the second attempt in vain ends it."""
    settings: dict[str, Any] = {"every": "1 steps", "max_failed_saves": 3}
    if remote:
        (tmp_path / "tier").mkdir()
        settings["remote"] = {"url": f"file://{tmp_path / 'tier'}"}
    monkeypatch.setenv("HEADWAY_FAULTS", ",".join(f"enospc@checkpoint.shard:{number}" for number in range(1, 20)))
    config = load_config(tiny(train={"steps": 40}, checkpoint=settings), ["supervise.enabled=false"])
    for code in (75, 4) if remote else (4,):
        with pytest.raises(HeadwayError) as raised:
            train(config)
        # A fourth may have failed by the end of the step in which the third was reported.
        assert raised.value.exit_code == code and "saves in a row have failed" in raised.value.what
        assert Run(tmp_path / "runs/tiny").state == "failed", "nothing is saved"
    run = Run(tmp_path / "runs/tiny")
    assert 3 <= run.metrics.last_step < 40 and not run.checkpoints
    # A step that ends while an earlier save is under way has none of its own.
    failed = run.metrics.series("checkpoint/failed_step")[1].tolist()
    assert len(set(failed)) >= 2 and set(failed) <= {*range(1, 40)}
