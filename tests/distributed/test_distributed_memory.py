"""What sharded strategies hold at a time, on two workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("memory_worker.py")


def test_strategies_hold_no_more_than_they_must() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stderr.count(" s\n") >= 4, result.stderr[-2000:]
