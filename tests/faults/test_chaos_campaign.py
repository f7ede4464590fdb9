"""A short campaign of kills, as `headway chaos` makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.config import load_config, resolve
from headway.lab.chaos import report
from headway.lab.chaos.campaign import Trial, plan_campaign
from headway.lab.chaos.changes import one_stage
from headway.lab.chaos.controls import CURSOR
from headway.lab.chaos.report import render, run_campaign, shape_of
from support.made_of import MADE_OF, made_of
from support.runs import headway


def surely_kills_both_ways(trial: Trial) -> bool:
    """Whether a download and an upload are killed however slow the machine is: a lost disk means a download at once,
    and the first order of the last command, which nobody kills before its end, is carried out whenever it comes."""
    last = trial.legs[-1]
    return any(leg.disk_lost for leg in trial.legs) and "upload." in last.orders[last.disk_lost]


def sections(folder: Path) -> dict[str, Any]:
    mine = {"remote": {"url": f"file://{folder}/mine"}}
    return {"train": {"steps": 24, "lanes": 2}, "determinism": "elastic", "checkpoint": mine}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_campaign_comes_out_as_if_nothing_had_happened(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "CONTROLS", {})
    monkeypatch.setattr(report, "SEED", CURSOR)  # of the controls the one that the ledger has to tell of, too
    config = resolve(load_config(tiny(**sections(tmp_path))))
    output, remote = tmp_path / "chaos", tmp_path / "remote"
    shape = shape_of(config, one_stage(config, (1, 2)), (1, 2), remote=True)
    seed = next(seed for seed in count() if surely_kills_both_ways(next(plan_campaign(shape, seed))))
    result = run_campaign(config, output, kills=4, seed=seed, worker_counts=(1, 2), remote=f"file://{remote}")
    assert result.passed, render(result)
    (trial,) = result.trials
    kinds = result.kills
    assert kinds.total() >= 4 and kinds["kill@supervisor"] == 2, "kills that were planned and did not come test nothing"
    assert any("upload." in kind for kind in kinds) and any("bring." in kind for kind in kinds), kinds
    assert trial.disks_lost >= 1 and "from the remote tier" in render(result)
    assert result.own and 0 < max(result.own) < max(result.recoveries), "a part of a recovery is the start of a process"
    assert result.controls == {CURSOR: None}
    assert not (tmp_path / "runs").exists(), "the config's own run directory is not touched"
    assert not (tmp_path / "mine").exists(), "nor is its remote tier"
    (campaign,) = remote.iterdir()
    assert (campaign / "trial-001" / "run-001").is_dir() and not (campaign / "reference").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", MADE_OF)
def test_a_campaign_kills_runs_of_a_model_or_a_teacher(
    kind: str, tiny: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    if kind == "adapter":
        pytest.importorskip("peft")
    config = tiny(train={"steps": 8}, checkpoint={"keep_best": 1}, evaluation={"every": "2 steps"})
    values = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**values, **made_of(kind, tmp_path / "model", corpus / "store" / "tokenizer")}))
    loaded = resolve(load_config(config))
    result = run_campaign(loaded, tmp_path / "chaos", kills=1, seed=1, worker_counts=(1,), controls=False)
    assert result.passed and result.kills.total() >= 4, render(result)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_command_line_makes_a_campaign_and_tells_of_it(tiny: Callable[..., Path], tmp_path: Path) -> None:
    plan = ("--kills", "10", "--workers", "1,2", "--output", tmp_path / "chaos")
    limits = ("--max-recovery", "100 min", "--max-overhead", "50min")
    done = headway("chaos", tiny(**sections(tmp_path)), *plan, *limits, timeout=2300)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "chaos/chaos.json").read_text())
    assert record["passed"] and record["mismatches"] == 0 and record["kills"] >= 10
    assert record["kills_by_kind"]["kill@supervisor"] == 2 * len(record["trials"])
    assert set(record["controls"]) == {"moments", "one bit of a weight", "cursor", "seed"}
    assert not any(record["controls"].values())
    assert record["max_recovery_seconds"] == 6000 and record["max_overhead_seconds"] == 3000 and not record["too_slow"]


@pytest.mark.slow
def test_what_a_config_does_not_promise_is_not_tested(tiny: Callable[..., Path]) -> None:
    refused = headway("chaos", tiny(), "--workers", "1,2")
    assert refused.returncode == 2 and "determinism=elastic" in refused.stderr
    for url, why in (("runs/there", "is not a URL"), ("https://there", "a web address cannot be written to")):
        refused = headway("chaos", tiny(), "--remote", url)
        assert refused.returncode == 2 and why in refused.stderr and "without kills" not in refused.stderr
    refused = headway("chaos", tiny(), "--output", tiny().parent)
    assert refused.returncode == 2 and "the folder is not empty" in refused.stderr, "kills of before would be counted"
    refused = headway("chaos", tiny(), "train.steps=3")
    assert refused.returncode == 2 and "train.steps=4 at least" in refused.stderr
    refused = headway("chaos", tiny(), "--max-recovery", "10")
    assert refused.returncode == 2 and "this is a time" in refused.stderr and "--max-recovery 10s" in refused.stderr
    refused = headway("chaos", tiny(), "--workers", "one")
    assert refused.returncode == 2 and "--workers 1,2,4" in refused.stderr
