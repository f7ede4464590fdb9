"""The line: what it says, and how it behaves on a terminal and in a log."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import pytest

from headway.core import console
from headway.core.console import log_to, notice
from headway.telemetry.line import Status, StatusLine, render, render_evaluation


def test_the_whole_line() -> None:
    status = Status(
        step=1200,
        total_steps=10_000,
        loss=3.2141,
        items_per_second=41_200,
        mfu=0.521,
        eta_seconds=8040,
        spent_usd=3.1,
        total_usd=18.4,
        saved_seconds_ago=12,
    )
    assert render(status) == (
        "step 1,200/10,000 · loss 3.214 · 41.2k tok/s · mfu 52.1 % · eta 2 h 14 m · $3.10 of $18.40 · saved 12 s ago"
    )


def test_unknown_parts_are_left_out() -> None:
    assert render(Status(step=1, total_steps=10)) == "step 1/10"
    assert render(Status(step=1, total_steps=10, spent_usd=0.5)) == "step 1/10 · $0.50"
    assert render(Status(step=1, total_steps=10, saved_seconds_ago=0.4)) == "step 1/10 · saved 0 s ago"


def test_a_finished_run_has_no_eta() -> None:
    assert "eta" not in render(Status(step=10, total_steps=10, eta_seconds=0.0))


def test_a_loss_that_is_no_number_is_shown() -> None:
    assert "loss nan" in render(Status(step=1, total_steps=10, loss=float("nan")))


def test_a_loss_that_is_no_cross_entropy_has_no_perplexity_and_samples_are_no_tokens() -> None:
    assert render_evaluation(3, 0.5, None, {}, language_model=False) == "step 3 · validation loss 0.500"
    assert render(Status(step=1, total_steps=2, items_per_second=7, item="samples")) == "step 1/2 · 7 samples/s"


def test_an_evaluation_has_its_own_line() -> None:
    text = partial(render_evaluation, replay=None, figures={}, language_model=True)
    assert text(1200, 3.3) == "step 1,200 · validation loss 3.300 · perplexity 27.11"
    assert "perplexity inf" in text(1, 1e6)
    assert text(1, float("nan")).endswith("validation loss nan · perplexity nan")


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def metrics(seconds: float, **more: float) -> dict[str, float]:
    values = {"train/loss": 2.0, "speed/step_seconds": seconds, "speed/tokens_per_second": 1000 / seconds}
    return {**values, **{key.replace("_", "/", 1): value for key, value in more.items()}}


def run_steps(line: StatusLine, clock: Clock, steps: range, seconds: float = 1.0) -> None:
    for step in steps:
        clock.now += seconds
        line.step(step, metrics(seconds))


def steps_shown(text: str) -> list[int]:
    return [int(row.split("/")[0].removeprefix("step ")) for row in text.splitlines()]


def test_a_log_gets_the_first_the_last_and_every_nth_step(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = StatusLine(25, log_every=10, clock=clock)
    run_steps(line, clock, range(1, 26))
    line.close()
    assert steps_shown(capsys.readouterr().err) == [1, 10, 20, 25]


def test_a_resumed_attempt_shows_its_own_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = StatusLine(100, log_every=10, clock=clock)
    run_steps(line, clock, range(13, 24))
    assert steps_shown(capsys.readouterr().err) == [13, 20]
    line.close()
    assert steps_shown(capsys.readouterr().err) == [23], "an attempt that is stopped shows how far it came"
    line.close()
    assert capsys.readouterr().err == ""


def test_a_run_that_ends_early_shows_its_last_step_once_and_without_an_eta(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = StatusLine(100, log_every=10, clock=clock)
    run_steps(line, clock, range(1, 24))
    assert "eta" in capsys.readouterr().err.splitlines()[-1]
    line.close(is_over=True)
    assert capsys.readouterr().err == "step 23/100 · loss 2.000 · 1,000 tok/s\n"
    line.close()
    assert capsys.readouterr().err == ""


def test_the_first_step_counts_for_neither_speed_nor_eta(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = StatusLine(101, log_every=1, clock=clock)
    run_steps(line, clock, range(1, 2), seconds=500.0)  # compiling
    assert capsys.readouterr().err == "step 1/101 · loss 2.000 · 2 tok/s\n"
    run_steps(line, clock, range(2, 12), seconds=2.0)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "step 11/101 · loss 2.000 · 500 tok/s · eta 3 m 0 s"


def test_the_eta_counts_what_happens_between_steps(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = StatusLine(21, log_every=1, clock=clock)
    for step in range(1, 12):
        clock.now += 3.0  # one second of step, two of evaluation
        line.step(step, metrics(1.0))
    assert capsys.readouterr().err.splitlines()[-1].endswith("1,000 tok/s · eta 30 s")


def test_the_eta_counts_the_rows_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = StatusLine(21, log_every=1, work=lambda step: step if step < 11 else 11 + 4 * (step - 11), clock=clock)
    run_steps(line, clock, range(1, 12))
    assert capsys.readouterr().err.splitlines()[-1].endswith("eta 40 s")


def test_cost_is_estimated_for_the_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = StatusLine(7201, log_every=1, clock=clock, total_usd=lambda eta: 1.0 + 2.0 * eta / 3600)
    line.step(1, metrics(1.0, cost_spent_usd=0.0))
    clock.now += 1.0
    line.step(2, metrics(1.0, cost_spent_usd=1.0))
    assert "$1.00 of $5.00" in capsys.readouterr().err


def test_a_budget_shows_in_the_line_only_where_it_will_not_do() -> None:
    def cost(spent: float, total: float | None, budget: float | None) -> str:
        status = Status(step=1, total_steps=10, spent_usd=spent, total_usd=total, budget_usd=budget)
        return render(status).removeprefix("step 1/10 · ")

    assert cost(3.1, 18.4, 20.0) == "$3.10 of $18.40"
    assert cost(3.1, 18.4, 10.0) == "$3.10 of $18.40, over the budget of $10.00"
    assert cost(11.0, None, 10.0) == "$11.00, over the budget of $10.00"


def test_the_age_of_the_newest_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = StatusLine(100, log_every=1, clock=clock)
    run_steps(line, clock, range(1, 2))
    line.saved()
    run_steps(line, clock, range(2, 3), seconds=12.0)
    first, second = capsys.readouterr().err.splitlines()
    assert "saved" not in first and second.endswith("saved 12 s ago")


class Terminal(io.StringIO):
    """Standard error that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def screen(raw: str) -> list[str]:
    """What a terminal shows after this output: a carriage return and an erased line start a row afresh."""
    rows = [""]
    for piece in raw.replace("\r\x1b[2K", "\x00").split("\n"):
        rows[-1] = (rows[-1] + piece).rsplit("\x00", 1)[-1]
        rows.append("")
    return rows[:-1]


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """To be called from the test itself: pytest puts its own standard error in place after the fixtures."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(console, "_live", "")
    return stream


def test_a_terminal_has_one_live_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = open_terminal(monkeypatch)
    clock = Clock()
    line = StatusLine(25, log_every=10, clock=clock)
    with log_to(tmp_path / "log"):
        run_steps(line, clock, range(1, 16))
        assert screen(terminal.getvalue()) == ["step 15/25 · loss 2.000 · 1,000 tok/s · eta 10 s"]
        notice("saved step 15")
        shown = screen(terminal.getvalue())
        assert shown == ["saved step 15", "step 15/25 · loss 2.000 · 1,000 tok/s · eta 10 s"]
        run_steps(line, clock, range(16, 26))
        line.close()
    assert screen(terminal.getvalue()) == ["saved step 15", "step 25/25 · loss 2.000 · 1,000 tok/s", ""]
    logged = [row for row in (tmp_path / "log").read_text().splitlines() if row.startswith("step")]
    assert sorted(set(steps_shown("\n".join(logged)))) == [1, 10, 20, 25]


def test_a_live_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "30")
    clock = Clock()
    run_steps(StatusLine(25, clock=clock), clock, range(1, 4))
    (row,) = screen(terminal.getvalue())
    assert len(row) == 29 and row.endswith("…")


def test_a_terminal_is_not_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    clock = Clock()
    run_steps(StatusLine(100_000, log_every=1000, clock=clock), clock, range(1, 1000), seconds=0.001)
    assert terminal.getvalue().count("\r") < 15


def test_other_workers_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    clock = Clock()
    line = StatusLine(25, clock=clock)
    run_steps(line, clock, range(1, 26))
    line.close()
    assert terminal.getvalue() == ""
