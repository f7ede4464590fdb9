from pathlib import Path

import pytest

from support.runs import run_workers


@pytest.mark.parametrize("workers", [2, 4])
def test_all_reduce_follows_the_tree(workers: int) -> None:
    run_workers(workers, Path(__file__).with_name("tree_worker.py"))
