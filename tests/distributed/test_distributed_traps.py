"""What makes workers drift apart without a word: see docs/parallelism-traps.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs import run_workers


@pytest.mark.slow
def test_what_only_one_worker_meets_is_the_same_for_all() -> None:
    run_workers(2, Path(__file__).with_name("traps_worker.py"))
