"""What an experiment has shown: what was decided, when and why, for people and for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.format import UNKNOWN
from headway.serve.experiment.journal import JOURNAL, State, read_state
from headway.serve.experiment.sequential import Counts
from headway.telemetry import html
from headway.telemetry.summary import time_text

_EXPLANATION = (
    "The test may be looked at after every outcome (mixture sequential probability ratio test): without a difference,"
    " it ever decides with a probability of at most alpha. It counts the first outcome of each user since the present"
    " versions answer."
)


def report(folder: Path) -> dict[str, Any]:
    """Return what an experiment has shown.

    Raises:
        ConfigError: the folder has no experiment.
        CheckpointError: a record of its journal was changed.
    """
    if not (folder / JOURNAL).is_file():
        raise ConfigError("the folder has no experiment", where=str(folder), fix="name that of --experiment")
    state = read_state(folder)
    if state.plan is None:
        raise ConfigError("the experiment has not begun", where=str(folder), fix="headway serve ... --split")
    plan = state.plan
    names = plan.split.arms
    arms = [
        {
            "arm": names[index],
            "share": plan.split.shares[index],
            "version": state.version(index),
            "outcomes": state.posted[index].outcomes,
            "counted": state.counted[index].outcomes,
            "successes": state.counted[index].successes,
            "rate": state.counted[index].rate,
        }
        for index in (0, 1)
    ]
    return {
        "model": plan.model,
        "begun": state.begun,
        "since": state.since,
        "effect": plan.test.effect,
        "alpha": plan.test.alpha,
        "evidence": plan.test.evidence(*state.counted),
        "needed": 1 / plan.test.alpha,
        "arms": arms,
        "versions": [{"time": time, "arm": names[arm], "version": version} for time, arm, version in state.versions],
        "decision": _decision(state),
    }


def _decision(state: State) -> dict[str, Any] | None:
    found = state.decision
    if found is None or state.plan is None:
        return None
    names = state.plan.split.arms
    winner = _proportion(found.counts[found.winner])
    loser = _proportion(found.counts[found.loser])
    why = (
        f"{names[found.loser]} had {loser} and {names[found.winner]} {winner}: the evidence of a difference reached"
        f" {found.evidence:.1f}, and {1 / state.plan.test.alpha:g} is needed"
    )
    return {"winner": names[found.winner], "stopped": names[found.loser], "time": found.time, "why": why}


def _proportion(counts: Counts) -> str:
    """Return a proportion in words."""
    rate = UNKNOWN if counts.rate is None else f"{counts.rate:.1%}"
    return f"{counts.successes:,} of {counts.outcomes:,} successes ({rate})"


def headline(found: dict[str, Any]) -> str:
    """Return the report in one sentence."""
    decision = found["decision"]
    if decision is None:
        return (
            f"No decision yet: the evidence of a difference is {found['evidence']:.2f}, {found['needed']:g} is needed."
        )
    return f"{decision['winner']} answers every request since {time_text(decision['time'])}: {decision['why']}."


def table_of(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the arms as a table."""
    headers = ["ARM", "VERSION", "SHARE", "OUTCOMES", "COUNTED", "SUCCESSES", "RATE"]
    rows = [
        [
            arm["arm"],
            arm["version"] or UNKNOWN,
            f"{arm['share']:.1%}",
            f"{arm['outcomes']:,}",
            f"{arm['counted']:,}",
            f"{arm['successes']:,}",
            UNKNOWN if arm["rate"] is None else f"{arm['rate']:.1%}",
        ]
        for arm in found["arms"]
    ]
    return headers, rows


def page(found: dict[str, Any]) -> str:
    """Return the report as a page that loads nothing from elsewhere."""
    headers, rows = table_of(found)
    versions = [[time_text(one["time"]), one["arm"], one["version"]] for one in found["versions"]]
    state = "running" if found["decision"] is None else "decided"
    facts = [
        ("begun", time_text(found["begun"])),
        ("counted since", time_text(found["since"])),
        ("effect that matters", f"{found['effect']:.1%}"),
        ("alpha", f"{found['alpha']:.1%}"),
    ]
    return html.page(
        f"{found['model']} · Headway experiment",
        [
            html.heading(f"Experiment: {found['model']}", state, headline(found), "good"),
            html.section("Arms", html.table([header.capitalize() for header in headers], rows, range(2, 7))),
            html.section("The test", html.facts(facts), html.paragraphs([_EXPLANATION])),
            html.section("Versions", html.table(["From", "Arm", "Version"], versions)),
        ],
    )
