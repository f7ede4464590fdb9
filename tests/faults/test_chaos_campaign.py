"""A short campaign of kills, as `headway chaos` makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support import headway

#: One by which uploads and downloads are killed in the first run already.
SEED = "44"


@pytest.mark.timeout(960)
def test_a_campaign_comes_out_as_if_nothing_had_happened(tiny: Callable[..., Path], tmp_path: Path) -> None:
    mine = {"remote": {"url": f"file://{tmp_path}/mine"}}
    config = tiny(train={"steps": 24, "lanes": 2}, determinism="elastic", checkpoint=mine)
    output, remote = tmp_path / "chaos", tmp_path / "remote"
    plan = ("--kills", "10", "--workers", "1,2", "--seed", SEED)
    limits = ("--max-recovery", "10 min", "--max-overhead", "5min")
    done = headway("chaos", config, *plan, *limits, "--output", output, "--remote", f"file://{remote}", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((output / "chaos.json").read_text())
    assert record["passed"] and record["mismatches"] == 0
    assert record["kills"] >= 8, "kills that were planned and did not come test nothing"
    kinds = record["kills_by_kind"]
    assert kinds["kill@supervisor"] == 2 * len(record["trials"])
    assert any("upload." in kind for kind in kinds) and any("bring." in kind for kind in kinds), kinds
    assert sum(trial["disks_lost"] for trial in record["trials"]) >= 1 and "from the remote tier" in done.stdout
    recoveries, own = (
        [s for trial in record["trials"] for s in trial[key]] for key in ("recovery_seconds", "own_seconds")
    )
    assert own and 0 < max(own) < max(recoveries), "a part of every recovery is the start of a process"
    assert set(record["controls"]) == {"moments", "one bit of a weight", "cursor", "seed"}
    assert not any(record["controls"].values())
    assert record["max_recovery_seconds"] == 600 and record["max_overhead_seconds"] == 300 and not record["too_slow"]
    assert not (tmp_path / "runs").exists(), "the config's own run directory is not touched"
    assert not (tmp_path / "mine").exists(), "nor is its remote tier"
    (campaign,) = remote.iterdir()
    assert (campaign / "trial-001" / "run-001").is_dir() and not (campaign / "reference").exists()


def test_what_a_config_does_not_promise_is_not_tested(tiny: Callable[..., Path]) -> None:
    refused = headway("chaos", tiny(), "--workers", "1,2")
    assert refused.returncode == 2 and "determinism=elastic" in refused.stderr
    for url, why in (("runs/there", "is no URL"), ("https://there", "nothing can be written to a web address")):
        refused = headway("chaos", tiny(), "--remote", url)
        assert refused.returncode == 2 and why in refused.stderr and "without a disturbance" not in refused.stderr
    refused = headway("chaos", tiny(), "--output", tiny().parent)
    assert refused.returncode == 2 and "the folder is not empty" in refused.stderr, "kills of before would be counted"
    refused = headway("chaos", tiny(), "train.steps=3")
    assert refused.returncode == 2 and "train.steps=4 at least" in refused.stderr
    refused = headway("chaos", tiny(), "--max-recovery", "10")
    assert refused.returncode == 2 and "this is a time" in refused.stderr and "--max-recovery 10s" in refused.stderr
    refused = headway("chaos", tiny(), "--workers", "one")
    assert refused.returncode == 2 and "--workers 1,2,4" in refused.stderr
