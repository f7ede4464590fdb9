"""What a worker tells of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.errors import CheckpointError, HeadwayError
from headway.core.files.foreign import read_json_lines
from headway.run.supervisor import worker
from headway.run.supervisor.error_report import most_telling_report
from headway.run.supervisor.worker import SPARE_VARIABLE, reasons_in, report_to
from support.waits import LONG


def test_a_worker_that_cannot_be_watched_says_so_at_once(tmp_path: Path) -> None:
    """It would be ended as one that did not begin, after `supervise.start_seconds`."""
    (tmp_path / "heartbeat-0").mkdir()
    with pytest.raises(HeadwayError, match="worker 0 cannot be watched: Is a directory") as refused:
        report_to(tmp_path, 0)
    assert str(tmp_path / "heartbeat-0") in refused.value.render()
    with pytest.raises(SystemExit), reasons_in(tmp_path, 0):
        report_to(tmp_path, 0)
    left = most_telling_report(tmp_path)
    assert left is not None and "cannot be watched" in left.what


def test_a_worker_that_an_exception_ends_leaves_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a lost connection to a worker that has died; the agent may end it before it has told anything."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    with (tmp_path / "stack-1.txt").open("w") as stacks:
        monkeypatch.setattr(worker, "_stacks", stacks)
        with pytest.raises(SystemExit), reasons_in(tmp_path, 1):
            raise RuntimeError("connection closed by peer")
        assert "RuntimeError: connection closed by peer" in (tmp_path / "stack-1.txt").read_text()


def test_a_reason_that_the_disk_of_the_run_does_not_take_is_left_with_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, spare = tmp_path / "file" / "folder", tmp_path / "reasons"
    (tmp_path / "file").touch()
    monkeypatch.setenv(SPARE_VARIABLE, str(spare))
    with pytest.raises(SystemExit) as end, reasons_in(broken, 1):
        raise CheckpointError("no room")
    left = most_telling_report(broken, read_json_lines(spare))
    assert end.value.code == 4 and left is not None and (left.rank, left.what) == (1, "no room")


#: A worker of two on GPUs, as far as it can be had without them: the other one is not asked, and the groups are taken
#: down together with it, as those of NCCL are, by `destroy_process_group` or at the end of Python.
_ON_GPUS = """
import atexit, os, sys, time
from pathlib import Path
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from headway.core.errors import DataError
from headway.run.supervisor.worker import reasons_in
from headway.parallel.world import open_world

os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
begin = dist.init_process_group
sys.modules["torch.distributed.rendezvous"].rendezvous = lambda *_, **__: iter([(dist.HashStore(), 0, 2)])
dist.init_process_group = lambda *_, **__: begin("fake", store=FakeStore(), rank=0, world_size=2)
dist.get_backend_config = lambda: "cpu:gloo,cuda:nccl"
dist.destroy_process_group = lambda: time.sleep(600)
atexit.register(time.sleep, 600)
with reasons_in(Path(sys.argv[1]), 0), open_world("cpu", 60):
    print("the last line of the log")
    raise DataError("a row is missing")
"""


def test_on_gpus_an_error_is_told_and_ends_its_worker_though_others_wait_for_it(tmp_path: Path) -> None:
    """They would wait for each other until NCCL's limit is over, ten minutes later."""
    command = [sys.executable, "-c", _ON_GPUS, str(tmp_path)]
    ended = subprocess.run(command, timeout=LONG, stdout=subprocess.PIPE, text=True, check=False)
    left = most_telling_report(tmp_path)
    assert left is not None and (left.what, left.exit_code) == ("a row is missing", 3)
    assert (ended.returncode, ended.stdout) == (3, "the last line of the log\n")
