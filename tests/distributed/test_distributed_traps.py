"""What makes workers drift apart without a word: see docs/parallelism-traps.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_what_only_one_worker_meets_is_the_same_for_all() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).with_name("traps_worker.py"))
    result = subprocess.run(
        [sys.executable, *torchrun, script], capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
