"""What else goes wrong while training: signals, full disks, non-finite steps, a run that is in use."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.core.process.waiting import wait_until
from headway.telemetry.metrics import read_metrics
from support.runs import headway, state_hash
from support.waits import LONG


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_saves_and_the_same_command_goes_on(tiny: Callable[..., Path], tmp_path: Path, workers: int) -> None:
    config = tiny(checkpoint={"every": "1000 steps"})
    assert headway("train", config, "name=whole", "-w", str(workers)).returncode == 0
    stopped = headway("train", config, "name=stopped", "-w", str(workers), faults="stop@step=4")
    assert stopped.returncode == 75, stopped.stderr
    assert "run the same command again" in stopped.stderr
    attempt = json.loads((tmp_path / "runs/stopped/attempts/001/attempt.json").read_text())
    assert (attempt["outcome"], attempt["exit_code"]) == ("preempted", 75)
    resumed = headway("train", config, "name=stopped", "-w", str(workers))
    assert resumed.returncode == 0 and "step-00000005" in resumed.stderr
    assert state_hash(tmp_path / "runs" / "stopped") == state_hash(tmp_path / "runs" / "whole")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fault", ["enospc@checkpoint.shard:2", pytest.param("kill@checkpoint.manifest:2", marks=pytest.mark.slow)]
)
def test_training_goes_on_without_a_checkpoint_that_cannot_be_written(
    tiny: Callable[..., Path], tmp_path: Path, fault: str, workers: int
) -> None:
    config = tiny()
    assert headway("train", config, "name=whole", "-w", str(workers)).returncode == 0
    full = headway("train", config, "name=full", "-w", str(workers), faults=fault)
    assert full.returncode == 0, full.stderr
    assert "training continues without a checkpoint of step 4" in full.stderr
    assert ("No space left" if "enospc" in fault else "died (signal 9)") in full.stderr
    run = tmp_path / "runs" / "full"
    failed = read_metrics(run).series("checkpoint/failed_step")[1].tolist()
    # The second worker's second file may be that of the next checkpoint: of this one it was not wanted any more.
    assert failed == [4.0] or (workers == 2 and failed == [4.0, 6.0])
    assert headway("checkpoints", "verify", run).returncode == 0
    assert headway("ledger", run).returncode == 0, "the ledger has no commit of a checkpoint that is not there"
    assert state_hash(run) == state_hash(tmp_path / "runs" / "whole")


@pytest.mark.parametrize(
    ("fault", "workers"),
    [
        ("kill@update=7%0", 1),
        pytest.param("crash@update=7%0", 2, marks=pytest.mark.slow),
        pytest.param("kill@update=7%0", 2, marks=pytest.mark.slow),
        pytest.param("crash@update=7%0", 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_from_the_memory_of_a_dead_worker(
    tiny: Callable[..., Path], tmp_path: Path, fault: str, workers: int
) -> None:
    config = tiny(checkpoint={"every": "1000 steps"}, supervise={"max_failures": 1})
    assert headway("train", config, "name=whole", "-w", str(workers)).returncode == 0
    memory = "checkpoint.memory_every=2 steps"
    result = headway("train", config, "name=killed", memory, "-w", str(workers), faults=fault)
    assert result.returncode == 0, result.stderr
    assert "resuming from" in result.stderr and "step-00000006" in result.stderr
    assert state_hash(tmp_path / "runs" / "killed") == state_hash(tmp_path / "runs" / "whole")
    assert headway("ledger", tmp_path / "runs" / "killed").returncode == 0


@pytest.mark.slow
def test_a_last_checkpoint_that_cannot_be_written_ends_with_code_4(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny()
    assert headway("train", config, "name=whole").returncode == 0
    full = headway("train", config, "name=full", faults="enospc@checkpoint.shard:5")
    assert full.returncode == 4, full.stderr
    assert "No space left" in full.stderr and "fix:" in full.stderr
    assert headway("train", config, "name=full").returncode == 0
    assert state_hash(tmp_path / "runs" / "full") == state_hash(tmp_path / "runs" / "whole")


@pytest.mark.slow
def test_a_non_finite_step_is_skipped_counted_and_resumed_exactly(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny()
    whole = headway("train", config, "name=whole", faults="nan@gradient=5")
    assert whole.returncode == 0, whole.stderr
    headway("train", config, "name=killed", faults="nan@gradient=5,kill@step=7")
    assert headway("train", config, "name=killed").returncode == 0
    for name in ("whole", "killed"):
        manifest = json.loads((tmp_path / "runs" / name / "checkpoints/step-00000010/manifest.json").read_text())
        assert manifest["cursor"] == {"step": 10, "skipped_steps": 1, "skipped_in_row": 0}
    assert state_hash(tmp_path / "runs" / "killed") == state_hash(tmp_path / "runs" / "whole")
    assert headway("train", config, "name=clean").returncode == 0
    assert state_hash(tmp_path / "runs" / "clean") != state_hash(tmp_path / "runs" / "whole")


@pytest.mark.slow
def test_too_many_in_a_row_end_with_code_5_and_an_intact_checkpoint(tiny: Callable[..., Path], tmp_path: Path) -> None:
    poison = ",".join(f"nan@gradient={step}" for step in (5, 6, 7))
    result = headway("train", tiny(train={"skip_limit": 3}), faults=poison)
    assert result.returncode == 5
    assert "3 steps in a row" in result.stderr and "learning_rate" in result.stderr
    assert headway("checkpoints", "verify", tmp_path / "runs" / "tiny").returncode == 0


@pytest.mark.slow
def test_a_run_that_diverged_is_not_finished_by_the_same_command(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Not even where the limit is reached at a step that a checkpoint is due at, the last one among them."""
    config = tiny(train={"steps": 6, "skip_limit": 2}, checkpoint={"every": "1 steps"})
    for _ in range(2):
        result = headway("train", config, faults="nan@gradient=5,nan@gradient=6")
        assert result.returncode == 5 and "2 steps in a row" in result.stderr, result.stderr
        assert "the last checkpoint is intact" in result.stderr
        assert sorted(path.name for path in (tmp_path / "runs/tiny/checkpoints").glob("step-*"))[-1] == "step-00000005"
    # A checkpoint from behind the limit, as one that was lowered since, is none to go on from.
    behind = headway("train", config, "train.skip_limit=1")
    assert behind.returncode == 5 and "headway checkpoints restore" in behind.stderr
    assert headway("train", config).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "faults"),
    [
        (1, "stop@step=3,kill@evaluation=4"),
        pytest.param(2, "stop@step=3,kill@evaluation=4", marks=pytest.mark.slow),
        # In the middle of it, where one worker is told alone.
        pytest.param(2, "stop@evaluation=4:1%1,kill@evaluation=4:4", marks=pytest.mark.slow),
    ],
)
def test_who_has_to_leave_leaves_the_evaluation_to_the_next_attempt(
    tiny: Callable[..., Path], tmp_path: Path, workers: int, faults: str
) -> None:
    config = tiny(train={"steps": 6}, evaluation={"rows": 8, "every": "4 steps"}, checkpoint={"every": "9 steps"})
    more = ("-w", str(workers))
    assert headway("train", config, "name=whole", *more).returncode == 0
    # It would be killed in an evaluation; what was lost was never made up for.
    stopped = headway("train", config, "name=left", *more, faults=faults)
    assert stopped.returncode == 75, stopped.stderr
    assert headway("train", config, "name=left", *more).returncode == 0
    whole, left = (read_metrics(tmp_path / "runs" / name) for name in ("whole", "left"))
    assert [s.tolist() for s in left.series("evaluation/loss")] == [s.tolist() for s in whole.series("evaluation/loss")]
    assert left.series("evaluation/loss")[0].tolist() == [4, 6]
    assert left.series("train/loss")[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert state_hash(tmp_path / "runs/left") == state_hash(tmp_path / "runs/whole")
    assert headway("ledger", tmp_path / "runs/left").returncode == 0


@pytest.mark.slow
def test_a_run_directory_in_use_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny(train={"steps": 100_000})
    first = subprocess.Popen(
        [sys.executable, "-m", "headway", "train", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
        assert wait_until(metrics.exists, LONG)
        second = headway("train", config)
        assert second.returncode == 4
        assert f"process {first.pid}" in second.stderr
        third = headway("train", config, "--restart")
        assert third.returncode == 4, "a run in use must not be moved away either"
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_the_end_is_the_same(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny()
    assert headway("train", config, "name=whole").returncode == 0
    headway("train", config, "name=damaged", faults="kill@step=7")
    shard = tmp_path / "runs/damaged/checkpoints/step-00000006/shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    resumed = headway("train", config, "name=damaged")
    assert resumed.returncode == 0, resumed.stderr
    assert "step-00000006" in resumed.stderr and "step-00000004" in resumed.stderr
    assert state_hash(tmp_path / "runs" / "damaged") == state_hash(tmp_path / "runs" / "whole")


def test_lost_checkpoints_never_mean_a_silent_start_from_scratch(tiny: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    config = tiny()
    headway("train", config, faults="kill@step=7")
    shutil.rmtree(tmp_path / "runs" / "tiny" / "checkpoints")
    result = headway("train", config)
    assert result.returncode == 4 and "does not start over" in result.stderr


@pytest.mark.slow
def test_another_token_store_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny()
    headway("train", config, faults="kill@step=5")
    other = tmp_path / "other"
    assert headway("data", "prepare", config, f"data.store={other}", "data.validation=0.3").returncode == 0
    result = headway("train", config, f"data.store={other}", "--accept-changes")
    assert result.returncode == 3 and "fingerprint" in result.stderr
    # And leaves the run as it was, or its model would be evaluated, and its ledger proven, with the other store.
    assert str(other) not in (tmp_path / "runs" / "tiny" / "config.yaml").read_text(encoding="utf-8")
