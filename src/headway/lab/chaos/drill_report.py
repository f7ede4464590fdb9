"""The report of a recovery drill, as a table and as a page."""

from __future__ import annotations

from headway.core.format import UNKNOWN, format_seconds
from headway.lab.chaos.drill import DrillResult
from headway.telemetry.html import facts, heading, page, paragraphs, section, table, tiles

HEADERS = ("LOSS", "LOST AT STEP", "CONTINUED FROM", "RPO (STEPS)", "RTO", "CAUGHT UP", "STATE")


def rows(result: DrillResult) -> list[list[str]]:
    """Return a row of the table for each loss."""
    found = []
    for one in result.recoveries:
        is_equal = one.state_sha256 == result.expected
        rpo = UNKNOWN if one.rpo_steps is None else f"{one.rpo_steps:,} of at most {one.most_steps:,}"
        resumed = UNKNOWN if one.resumed_step is None else f"step {one.resumed_step:,}"
        times = [_seconds(one.rto_seconds), _seconds(one.caught_up_seconds)]
        state = "equal" if is_equal else str(one.state_sha256)
        found.append([one.loss, f"{one.lost_at_step:,}", resumed, rpo, *times, state])
    return found


def verdict(result: DrillResult) -> str:
    """Return the result in a line."""
    if result.problems:
        return "FAILED"
    return f"passed: every copy ended in state {result.expected[:12]} at step {result.last_step:,}"


def drill_page(result: DrillResult) -> str:
    """Return the report as a page."""
    recoveries = [one.rto_seconds for one in result.recoveries if one.rto_seconds is not None]
    points = [one.rpo_steps for one in result.recoveries if one.rpo_steps is not None]
    state = "failed" if result.problems else "passed"
    tone = "bad" if result.problems else "good"
    longest = _seconds(max(recoveries, default=None))
    most = f"{max(points):,} steps" if points else UNKNOWN
    about = [
        ("run", result.run),
        ("remote checkpoints of the copies", result.remote),
        ("trained", f"steps {result.first_step:,} to {result.last_step:,}, saved every {result.every_steps:,} steps"),
        ("time of a step", format_seconds(result.step_seconds)),
        ("state of the undisturbed copy", result.expected),
    ]
    what = [f"- {one.loss}: {one.what}" for one in result.recoveries]
    meaning = [
        "RTO is the time from the loss to the first new step, caught up when the lost steps were done again. RPO is the"
        " number of steps that were lost. The loss comes right before a save, once the save before it is uploaded.",
    ]
    body = [
        heading("Recovery drill", state, f"Copies of {result.run} lost something, and continued.", tone),
        tiles([("longest recovery (RTO)", longest, ""), ("most steps lost (RPO)", most, "")]),
        section("Losses", table(HEADERS, rows(result), range(1, 6)), paragraphs([*what, *meaning])),
        section("Problems", paragraphs(f"- {problem}" for problem in result.problems)),
        section("About", facts(about)),
    ]
    return page("Recovery drill", body)


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f} s"
