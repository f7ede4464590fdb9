"""What sharded strategies hold at a time, on two workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs import run_workers

WORKER = Path(__file__).with_name("memory_worker.py")


@pytest.mark.slow
def test_strategies_hold_no_more_than_they_must() -> None:
    said = run_workers(2, WORKER)
    assert said.count(" s\n") >= 5, said[-2000:]
