"""`headway chaos drill`: copies of a run lose their disk or their remote checkpoints, and come back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import CheckpointError, ConfigError
from headway.lab.chaos.drill import LOSSES, DrillResult, Recovery, drill
from headway.lab.chaos.drill_report import drill_page, rows, verdict
from support.object_storage import S3Server, SeaweedFs
from support.parts_table import SEAWEEDFS
from support.runs import headway, write_config, write_corpus

GOOD = Recovery("disk", "the run directory is lost", 19, 16, 3, 4, 5.25, 6.5, "a" * 64)


def result(*recoveries: Recovery, **facts: Any) -> DrillResult:
    return DrillResult("runs/a", "file:///x", 10, 20, 4, 0.5, "a" * 64, list(recoveries), **facts)


def trained(folder: Path) -> Path:
    """A run of six steps."""
    write_corpus(folder)
    done = headway("train", write_config(folder), "train.steps=6")
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "tiny"


def content(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_drill(run: Path, output: Path, *words: str) -> dict[str, Any]:
    done = headway("chaos", "drill", run, "--every", "2", "--output", output, "--json", *words)
    assert done.returncode == 0, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["passed"] and found["last_step"] == 12, found
    for recovery in found["recoveries"]:
        intervals = 2 if recovery["loss"] == "newest" else 1
        assert recovery["state_sha256"] == found["expected"] and recovery["rpo_steps"] <= intervals * 2
        assert 0 < recovery["rto_seconds"] <= recovery["caught_up_seconds"]
    assert "Recovery drill" in (output / "drill.html").read_text() and json.loads((output / "drill.json").read_text())
    return found


@pytest.mark.slow
def test_a_run_comes_back_from_every_loss(tmp_path: Path) -> None:
    run = trained(tmp_path)
    before = content(run)
    found = run_drill(run, tmp_path / "out")
    assert {one["loss"]: one["resumed_step"] for one in found["recoveries"]} == {"disk": 10, "remote": 10, "newest": 8}
    assert content(run) == before, "the run itself is only read"


@pytest.mark.parts(SEAWEEDFS)
@pytest.mark.parametrize("s3_server", [SeaweedFs], indirect=True)
def test_two_drills_on_a_real_store_give_the_same_bits(s3: S3Server, tmp_path: Path) -> None:
    """At most one save interval is lost with the disk."""
    run = trained(tmp_path)
    before = content(run)
    url = f"{s3.url}/{tmp_path.name}"
    first = run_drill(run, tmp_path / "first", "--remote", url)
    second = run_drill(run, tmp_path / "second", "--remote", url, "--loss", "disk")
    assert len(first["recoveries"]) == 3 and first["expected"] == second["expected"]
    assert content(run) == before and first["remote"] != second["remote"]
    print({one["loss"]: one for one in first["recoveries"]})


def test_a_report_names_every_shortfall() -> None:
    good = result(GOOD, max_recovery_seconds=6.0)
    assert (
        not good.problems
        and rows(good) == [["disk", "19", "step 16", "3 of at most 4", "5.2 s", "6.5 s", "equal"]]
        and verdict(good).startswith("passed")
    )
    assert "passed" in drill_page(good) and "3 of at most 4" in drill_page(good)
    slow = result(GOOD, max_recovery_seconds=5.0)
    assert slow.problems == ["disk: the recovery took longer than 5 s"] and verdict(slow) == "FAILED"
    bad = result(replace(GOOD, state_sha256="b" * 64, problems=("its last state is b, not <a>",)))
    assert bad.problems == ["disk: its last state is b, not <a>"] and not bad.record()["passed"]
    assert "not &lt;a&gt;" in drill_page(bad) and "failed" in drill_page(bad)
    never = result(replace(GOOD, rto_seconds=None, resumed_step=None, rpo_steps=None, caught_up_seconds=None))
    assert rows(never)[0][2:6] == ["n/a", "n/a", "n/a", "n/a"] and drill_page(never)


def test_a_drill_refuses_what_would_show_nothing(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    run.mkdir(parents=True)
    write_config(run, checkpoint={"every": "2 steps"})
    with pytest.raises(CheckpointError, match="no checkpoint"):
        drill(run, tmp_path / "out")
    with pytest.raises(ConfigError, match="there is no loss 'house'"):
        drill(run, tmp_path / "out", losses=["house"])
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "determinism: 'off'\n")
    with pytest.raises(ConfigError, match="promises no equal bits"):
        drill(run, tmp_path / "out")
    assert set(LOSSES) == {"disk", "remote", "newest"}
