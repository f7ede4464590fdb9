"""`headway spot ... -- headway launch --on slurm` on a real Slurm: a week of prices pauses and resumes a job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.clouds.launchers.record import audited
from headway.clouds.spot.made_trace import as_csv, make_trace
from headway.run.directory.account import account_of
from headway.telemetry.record import Run
from parts_table import SLURM
from support import headway, state_hash
from support_slurm import Slurm, slurm_cluster

pytestmark = [pytest.mark.parts(SLURM), pytest.mark.timeout(1800)]

#: Prints a price of the week; with each look at it two hours pass, so that no spike is missed, however slow this
#: machine is.
PRICE = """
import csv, sys
rows = [(float(row["time"]), row["usd_per_hour"]) for row in csv.DictReader(open(sys.argv[1]))]
with open(sys.argv[1] + ".looks", "a+") as looks:
    looks.seek(0)
    now = 7200 * len(looks.read())
    looks.write(".")
print([price for time, price in rows if time <= now][-1])
"""
#: The usual loss, which takes so long that the week has time to pass.
SLOW = """
import os, time
from torch.nn import functional as F
def slow(logits, batch):
    time.sleep(float(os.environ.get("NAP", 0)))
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), ignore_index=-100, reduction="sum")
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), ["n1", "n2"], "all Nodes=n1,n2 Default=YES") as cluster:
        yield cluster


def test_a_week_with_three_spikes_pauses_a_launched_job_three_times(
    slurm: Slurm, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny(train={"steps": 200}, checkpoint={"every": "1 h"}, loss="slow_loss:slow")
    week, run = tmp_path / "week.csv", config.parent / "runs" / "held"
    week.write_text(as_csv(make_trace(7)))
    (tmp_path / "price.py").write_text(PRICE)
    (tmp_path / "slow_loss.py").write_text(SLOW)
    prices = (
        "--pause-above",
        "2.80",
        "--resume-below",
        "2.70",
        "--price-command",
        f"{sys.executable} -S price.py {week}",
    )
    times = ("--every", "1 s", "--min-run", "1 s", "--min-pause", "1 s")
    environment = f"launch.environment={{PATH: '{Path(sys.executable).parent}:/usr/bin:/bin', NAP: '0.25'}}"
    launch = ("headway", "launch", config, "--on", "slurm", "name=held", "launch.grace_seconds=60", environment)
    done = headway("spot", run, *prices, *times, "--", *launch, fresh=True)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    lines = audited(run)
    # Each job is over before the next one is submitted.
    assert [line["action"] for line in lines] == ["launch", "spot", "cancel"] * 0 + [line["action"] for line in lines]
    jobs = [line["id"] for line in lines if line["action"] == "launch"]
    assert len(jobs) == 4 and len(set(jobs)) == 4, done.stderr
    whole = headway("train", config, "name=whole")
    assert whole.returncode == 0, whole.stderr
    assert state_hash(run) == state_hash(config.parent / "runs" / "whole")
    record = Run(run)
    account = account_of(record)
    print(
        [(a.number, a.outcome, a.exit_code, a.seconds, a.started, a.ended) for a in record.attempts],
        account,
        lines,
        account.attempts_usd,
    )
    print([slurm.job(job) for job in jobs])
    assert 0
