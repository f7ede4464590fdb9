"""`headway spot ... -- headway launch --on slurm` on a real Slurm: a week of prices pauses and resumes a job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.clouds.launchers.record import audited
from headway.clouds.spot.made_trace import as_csv, make_trace
from headway.run.directory.account import account_of
from headway.telemetry.record import Run
from support.parts_table import SLURM
from support.places import SLOW_LOSS
from support.runs import headway, state_hash
from support.slurm import Slurm, slurm_cluster
from support.waits import LONG

pytestmark = [pytest.mark.parts(SLURM), pytest.mark.timeout(1800)]

#: Prints a price of the week. With each look at it three hours pass if the run has made a step since the last one, or
#: waits for a lower price. So no spike passes while a job starts, however slow this machine is.
PRICE = """
import csv, json, os, sys
week, metrics = sys.argv[1:]
rows = [(float(row["time"]), float(row["usd_per_hour"])) for row in csv.DictReader(open(week))]
now, seen = json.load(open("clock.json")) if os.path.exists("clock.json") else (0, 0)
size = os.path.getsize(metrics) if os.path.exists(metrics) else 0
price = lambda: [price for time, price in rows if time <= now][-1]
if size > seen or price() > 2.70:
    now += 10800
json.dump((now, size), open("clock.json", "w"))
print(price())
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), ["n1", "n2"], "all Nodes=n1,n2 Default=YES") as cluster:
        yield cluster


def test_a_week_with_three_spikes_pauses_a_launched_job_three_times(
    slurm: Slurm, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny(train={"steps": 320}, checkpoint={"every": "1 h"}, loss="slow_loss:slow")
    run = config.parent / "runs" / "held"
    (tmp_path / "week.csv").write_text(as_csv(make_trace(7)))
    (tmp_path / "price.py").write_text(PRICE)
    (tmp_path / "slow_loss.py").write_text(SLOW_LOSS)
    price = f"{sys.executable} -S price.py week.csv {run}/metrics.jsonl"
    policy = ("--pause-above", "2.80", "--resume-below", "2.70", "--price-command", price, "--every", "1 s")
    environment = f"launch.environment={{PATH: '{Path(sys.executable).parent}:/usr/bin:/bin', NAP: '0.025'}}"
    launch = ("headway", "launch", config, "--on", "slurm", "name=held", "launch.grace_seconds=60", environment)
    done = headway("spot", run, *policy, "--min-run", "1 s", "--min-pause", "1 s", "--", *launch, fresh=True)
    assert done.returncode == 0, done.stderr
    actions = [line["action"] for line in audited(run)]
    assert actions == [*["spot", "launch", "cancel"] * 3, "spot", "launch"], done.stderr

    record = Run(run)
    assert [(one.outcome, one.exit_code) for one in record.attempts] == [*[("cancelled", 7)] * 3, ("finished", 0)]
    prices = [line["usd_per_hour"] for line in audited(run) if line["action"] == "spot"]
    billed = {n: usd * one.seconds / 3600 for n, usd, one in zip(range(1, 5), prices, record.attempts, strict=True)}
    account = account_of(record)
    assert account.attempts_usd == pytest.approx(billed, rel=1e-5) and len(set(prices)) == 4
    assert account.total_usd == account.compute_usd and account.idle_usd == 0, "a pause costs nothing"

    whole = headway("train", config, "name=whole")
    assert whole.returncode == 0, whole.stderr
    assert state_hash(run) == state_hash(config.parent / "runs" / "whole")


def test_the_first_example_of_the_page_pauses_and_ends(
    slurm: Slurm, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As typed from docs/cost.md; what it prints has the lines of the page, with other numbers."""
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text(encoding="utf-8")
    typed = re.search(r"^    headway cost trace --seed.*?\n\n", page, re.S | re.M)
    printed = re.search(r"```text\n(\$.*?)```", page, re.S)
    assert typed is not None and printed is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    (tmp_path / "slow_loss.py").write_text(SLOW_LOSS)
    variables = {"PATH": os.environ["PATH"], "NAP": "0.05"}
    tiny(name="mine", runs="runs", train={"steps": 260}, checkpoint={"every": "1 h"}, loss="slow_loss:slow",
         launch={"environment": variables, "grace_seconds": 60}).rename("my.yaml")  # fmt: skip
    words = ["sh", "-ec", textwrap.dedent(typed[0])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONG * 3, check=False)
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    said = {re.sub(r"[\d.]+", "N", line) for line in done.stderr.splitlines()}
    missing = [line for line in printed[1].splitlines() if re.sub(r"[\d.]+", "N", line) not in said]
    assert not missing and done.stderr.count("pausing") >= 1, done.stderr
    assert Run(tmp_path / "runs" / "mine").state == "finished"
