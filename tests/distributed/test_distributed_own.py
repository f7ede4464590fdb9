"""A strategy and an optimizer of the user's own, from the pages of `docs/extending`, in worker processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from support.runs import headway, state_hash

PAGES = Path(__file__).parents[2] / "docs" / "extending"


def test_two_workers_have_the_bits_of_ddp_also_after_a_kill(tiny: Callable[..., Path], tmp_path: Path) -> None:
    for page in ("strategy", "optimizer"):
        block = re.search(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)
        assert block is not None
        (tmp_path / f"own_{page}.py").write_text(block[1], encoding="utf-8")
    config = tiny(train={"steps": 4}, optimizer={"name": "own_optimizer:SIGNUM", "learning_rate": 1e-3})
    usual = headway("train", config, "-w", "2", "name=usual", "parallel.strategy=ddp", cwd=tmp_path)
    assert usual.returncode == 0, usual.stderr
    own = ("name=own", "parallel.strategy=own_strategy:PLAIN")
    killed = headway("train", config, "-w", "2", *own, faults="kill@step=3%1", cwd=tmp_path)
    assert killed.returncode == 1 and (tmp_path / "runs/own/checkpoints").exists(), killed.stderr
    resumed = headway("train", config, "-w", "2", *own, cwd=tmp_path)
    assert resumed.returncode == 0 and "checkpoints/step-00000002 (" in resumed.stderr, resumed.stderr
    assert state_hash(tmp_path / "runs/own") == state_hash(tmp_path / "runs/usual")
