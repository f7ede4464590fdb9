import os
import subprocess
import sys
from pathlib import Path

from headway.checkpoint.store import CheckpointStore


def test_two_runs_in_one_process_with_workers_that_were_made_differently(tmp_path: Path) -> None:
    script = Path(__file__).with_name("trainer_worker.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*torchrun, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for name in ("first", "second"):
        assert [info.step for info in CheckpointStore(tmp_path / name / "checkpoints").list()] == [3]
