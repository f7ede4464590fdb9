import subprocess
import sys
from pathlib import Path

import pytest

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.mark.parametrize("workers", [2, 4])
def test_all_reduce_follows_the_tree(workers: int) -> None:
    script = Path(__file__).with_name("tree_worker.py")
    result = subprocess.run(
        [sys.executable, *TORCHRUN, str(workers), str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
