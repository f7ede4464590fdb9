"""The holder of a command on spot machines, with a command that stands for a training."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from headway.clouds.launchers import spot
from headway.clouds.launchers.price_feeds import command_feed, file_feed
from headway.clouds.launchers.spot import SpotJob, hold_by_price
from headway.clouds.spot.policy import SpotPolicy
from headway.core.errors import ConfigError

#: Begins an attempt of a run as a training does, then works until its board asks it to stop; the third one ends.
TRAINING = """
import json, pathlib, sys, time
run = pathlib.Path(sys.argv[1])
number = len(list((run / "attempts").glob("*"))) + 1 if run.exists() else 1
attempt = run / "attempts" / f"{number:03d}"
attempt.mkdir(parents=True)
(attempt / "attempt.json").write_text(json.dumps({"number": number, "words": sys.argv[2:]}))
if number == 3:
    sys.exit(0)
until = time.monotonic() + 60
while not (attempt / "notices.jsonl").exists():
    if time.monotonic() > until:
        sys.exit(9)
    time.sleep(0.01)
(attempt / "attempt.json").write_text(json.dumps({"number": number, "words": sys.argv[2:], "outcome": "preempted"}))
sys.exit(75)
"""
POLICY = SpotPolicy(2.5, 2.0, min_run_seconds=0.0, min_pause_seconds=0.0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(spot, "LOOK_SECONDS", 0.01)
    (tmp_path / "training.py").write_text(TRAINING)
    return tmp_path / "run"


def command(run: Path, *words: str) -> list[str]:
    return [sys.executable, str(run.parent / "training.py"), str(run), *words]


class Prices:
    """A price while each attempt runs, and one between them; the third attempt ends by itself."""

    def __init__(self, run: Path, *while_running: float, between: float = 1.5) -> None:
        self._run, self._while_running, self._between = run, while_running, between

    def __call__(self) -> float:
        files = sorted((self._run / "attempts").glob("*/attempt.json"))
        if not files or len(files) > 2 or "outcome" in files[-1].read_text():
            return self._between
        return self._while_running[len(files) - 1]


def test_a_dear_hour_pauses_the_run_by_its_board_and_a_cheap_one_resumes_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = SpotJob(run, command(run), POLICY, every_seconds=0.0)
    assert hold_by_price(job, Prices(run, 3.0, 3.0)) == 0
    assert sorted(path.name for path in (run / "attempts").iterdir()) == ["001", "002", "003"]
    notices = (run / "attempts" / "001" / "notices.jsonl").read_text().splitlines()
    assert len(notices) == 1, "asked once"
    assert '"source": "spot"' in notices[0].replace('":"', '": "') and "$3.00 an hour, pausing" in notices[0]
    assert "resuming" in capsys.readouterr().err


def test_a_command_that_waits_for_a_price_says_so_once_in_a_pause(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """At first, and in every later pause."""
    at_first = iter([3.0] * 5)
    prices = Prices(run, 3.0, 3.0)
    job = SpotJob(run, command(run), POLICY, every_seconds=0.0)

    def feed() -> float:
        price = next(at_first, None)
        told = any("resumes when" in record.message for record in caplog.records)
        if price is None and (price := prices()) == 1.5 and (run / "attempts" / "001").exists() and not told:
            price = 2.4  # not low enough, until the command has seen that the paused run has ended
        return price

    assert hold_by_price(job, feed) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "waiting" in line]
    assert (
        told[0] == f"$3.00 an hour: {run} begins when the price is below $2.00; waiting, with a look at it every 0.0 s"
    )
    assert [f"{run} resumes when the price is below $2.00" in line for line in told[1:]] == [True] * len(told[1:])
    assert 2 <= len(told) <= 3


def test_very_cheap_hours_have_all_workers(run: Path) -> None:
    policy = SpotPolicy(2.5, 2.0, 1.2, min_run_seconds=0.0, min_pause_seconds=0.0)
    job = SpotJob(run, command(run, "determinism=elastic"), policy, (1, 8), every_seconds=0.0)
    assert hold_by_price(job, Prices(run, 1.0, 2.2)) == 0
    words = [(run / "attempts" / number / "attempt.json").read_text() for number in ("001", "002", "003")]
    assert [text[text.index("--workers") :][:14] for text in words] == [
        '--workers", "1', '--workers", "8', '--workers", "1',
    ], "many, and few again when the price rises"  # fmt: skip


def test_the_end_of_the_command_is_the_end(run: Path) -> None:
    """A budget that is reached, a crash: the policy starts nothing again that it has not stopped."""
    for code in (6, 75, 1):
        job = SpotJob(run, [sys.executable, "-c", f"import sys; sys.exit({code})"], POLICY)
        assert hold_by_price(job, lambda: 1.0) == code


def test_without_a_new_price_the_last_one_counts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = iter([1.0])

    def feed() -> float:
        for price in prices:
            return price
        raise ConfigError("the feed is away")

    job = SpotJob(run, [sys.executable, "-c", "import time; time.sleep(0.3)"], POLICY, every_seconds=0.0)
    assert hold_by_price(job, feed) == 0
    assert capsys.readouterr().err.count("the feed is away") == 1


@pytest.mark.parametrize(
    ("job", "where"),
    [
        (SpotJob(Path("r"), [], POLICY), "COMMAND"),
        (SpotJob(Path("r"), ["x"], SpotPolicy(2.5, 2.0, 1.2)), "--grow-below, --workers"),
        (SpotJob(Path("r"), ["x"], POLICY, (1, 8)), "--grow-below, --workers"),
        (SpotJob(Path("r"), ["x"], SpotPolicy(2.5, 2.0, 1.2), (8, 8)), "--workers"),
        (SpotJob(Path("r"), ["x"], SpotPolicy(2.5, 2.0, 1.2), (1, 8)), "--workers"),
        (SpotJob(Path("r"), ["x"], SpotPolicy(1.0, 2.0)), "--resume-below, --pause-above"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(job: SpotJob, where: str) -> None:
    with pytest.raises(ConfigError) as error:
        hold_by_price(job, lambda: 1.0)
    assert error.value.where == where and error.value.fix


def test_prices_come_from_a_file_or_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.csv"
    file.write_text("time,usd_per_hour\n1,2.5\n2,3.5\n")
    assert file_feed(file)() == 3.5
    assert command_feed("echo 1.25")() == 1.25
    assert "newest price" not in capsys.readouterr().err, "times that count from a start are no dates"
    file.write_text("time,usd_per_hour\n2026-01-01T00:00:00Z,2.5\n")
    feed = file_feed(file)
    assert feed() == feed() == 2.5
    assert capsys.readouterr().err.count(f"the newest price in {file} is of 2026-01-01") == 1
    file.write_text(f"time,usd_per_hour\n{time.time() - 86400},2.5\n")
    file_feed(file)()
    assert capsys.readouterr().err == ""
    for words in ("echo much", "echo -1", "exit 3"):
        with pytest.raises(ConfigError, match="gives no price"):
            command_feed(words)()
