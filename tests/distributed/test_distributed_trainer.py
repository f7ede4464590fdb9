from pathlib import Path

from headway.checkpoint.store import CheckpointStore
from support.runs import torchrun


def test_two_runs_in_one_process_with_workers_that_were_made_differently(tmp_path: Path) -> None:
    torchrun(2, Path(__file__).with_name("trainer_worker.py"), tmp_path)
    for name in ("first", "second"):
        assert [info.step for info in CheckpointStore(tmp_path / name / "checkpoints").list()] == [3]
