"""Every alert rule in both directions, by `promtool test rules`, and the same tests on rules that were broken.

A case holds series that the exporter gives, the minute at which the rule is judged, and whether it fires. For each rule
one case fires and at least one, which differs in one respect, stays silent.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.telemetry.catalogue import metric
from headway.tracking.alert_rules import RULES, AlertRule, rules_document
from headway.tracking.live_run import LiveRun
from support.parts_table import PROMETHEUS, program
from support.tracking import WrittenRun

pytestmark = pytest.mark.parts(PROMETHEUS)

RUN = {"run": "one"}
GPU = {"run": "one", "machine": "m1", "gpu": "0"}
MACHINE = {"run": "one", "machine": "m1"}
RUNNING, FINISHED = (
    {"run/state/running": f"{flag}+0x400", "run/state/finished": f"{1 - flag}+0x400"} for flag in (1, 0)
)
#: Started at the time 0, a step and a save every minute.
HEALTHY = {
    **RUNNING,
    "run/started_timestamp_seconds": "0+0x400",
    "run/last_step_timestamp_seconds": "0+60x400",
    "run/last_saved_timestamp_seconds": "0+60x400",
}


@dataclass(frozen=True)
class Case:
    """Series by name, in promtool's notation with a value a minute; the run is healthy otherwise."""

    rule: str
    series: Mapping[str, str]
    minute: int = 30
    fires: bool = False
    labels: Mapping[str, str] = field(default_factory=lambda: RUN)


def both(
    rule: str,
    fires: Mapping[str, str],
    *silent: Mapping[str, str],
    minute: int = 30,
    labels: Mapping[str, str] = RUN,
) -> Iterator[Case]:
    """One case that fires, and others that stay silent."""
    yield Case(rule, fires, minute, True, labels)
    yield from (Case(rule, series, minute, False, labels) for series in silent)


CASES = (
    *both(
        "HeadwayLossNotFinite",
        {"train/loss": "3 3 NaN+0x100"},
        {"train/loss": "3+0x100"},
        {"train/loss": "3 3 NaN+0x100", **FINISHED},
    ),
    *both("HeadwayLossNotFinite", {"train/loss": "3 3 Inf+0x100"}),
    *both(
        "HeadwayLossSpike",
        {"train/loss": "3-0.001x90 4+0x100"},
        {"train/loss": "3-0.001x90 3+0x100"},
        {"train/loss": "3-0.001x90 4+0x100", **FINISHED},
        {"train/loss": "11-0.01x400"},
        minute=100,
    ),
    *both(
        "HeadwayLossSpike",
        {"health/loss_deviations": "0.5x25 20 0.5x100"},
        {"health/loss_deviations": "0.5x25 5 0.5x100"},
    ),
    *both(
        "HeadwayNoStep",
        {"run/last_step_timestamp_seconds": "0+60x10 600+0x200"},
        {},
        {"run/last_step_timestamp_seconds": "0+60x10 600+0x200", **FINISHED},
        {"run/last_step_timestamp_seconds": "0+60x18 1080+0x200"},  # 12 minutes ago
    ),
    # A run that hangs before its first step has no time of a step at all.
    *both("HeadwayNoStep", {"run/last_step_timestamp_seconds": "_x400"}),
    *both(
        "HeadwayCheckpointTooOld",
        {"run/last_saved_timestamp_seconds": "0+60x10 600+0x400"},
        {},
        {"run/last_saved_timestamp_seconds": "0+60x10 600+0x400", **FINISHED},
        {"run/last_saved_timestamp_seconds": "0+60x100 6000+0x400"},
        minute=160,
    ),
    *both("HeadwayCheckpointTooOld", {"run/last_saved_timestamp_seconds": "_x400"}, minute=160),
    *both(
        "HeadwaySaveFailing",
        {"run/save_failures": "0x25 1x100"},
        {"run/save_failures": "0x100"},
        {"run/save_failures": "4x100"},  # before the time that counts
    ),
    *both(
        "HeadwaySaveFailing",
        {"run/failed_saves_in_row": "0x25 1x100"},
        {"run/failed_saves_in_row": "0x100"},
        {"run/failed_saves_in_row": "0x25 1x100", **FINISHED},
    ),
    *both(
        "HeadwayUploadFailing",
        {"run/upload_failures": "0x25 1x100"},
        {"run/upload_failures": "0x100"},
        {"run/upload_failures": "0x2 1x100"},
        minute=40,
    ),
    *both(
        "HeadwayGpuHot",
        {"gpu/temperature_celsius/<gpu>": "60x10 90x100"},
        {"gpu/temperature_celsius/<gpu>": "80x100"},
        {"gpu/temperature_celsius/<gpu>": "60x27 90x100"},  # for three minutes
        labels=GPU,
    ),
    *both(
        "HeadwayGpuUtilizationLow",
        {"gpu/utilization_share/<gpu>": "0.1x100"},
        {"gpu/utilization_share/<gpu>": "0.9x100"},
        {"gpu/utilization_share/<gpu>": "0.1x100", **FINISHED},
        minute=40,
        labels=GPU,
    ),
    *both(
        "HeadwayGpuErrors",
        {"gpu/uncorrected_errors/<gpu>": "2x20 3x100"},
        {"gpu/uncorrected_errors/<gpu>": "2x100"},  # older than the run
        labels=GPU,
    ),
    *both("HeadwayGpuErrors", {"gpu/xid_errors/<gpu>": "0x20 1x100"}, {"gpu/xid_errors/<gpu>": "0x100"}, labels=GPU),
    *both(
        "HeadwayDiskNearlyFull",
        {"system/disk_free_gib": "3x100", "system/disk_total_gib": "100x100"},
        {"system/disk_free_gib": "30x100", "system/disk_total_gib": "100x100"},
        labels=MACHINE,
    ),
    *both(
        "HeadwayDiskNearlyFull",
        {"health/checkpoints_that_fit": "1x100"},
        {"health/checkpoints_that_fit": "2x100"},
        {"health/checkpoints_that_fit": "1x100", **FINISHED},
    ),
    *both(
        "HeadwayMemoryNearlyUsedUp",
        {"system/memory_used_gib": "97x100", "system/memory_allowed_gib": "100x100"},
        {"system/memory_used_gib": "80x100", "system/memory_allowed_gib": "100x100"},
        labels=MACHINE,
    ),
    *both(
        "HeadwayDataWaitHigh",
        {"speed/data_wait_share": "0.5x100"},
        {"speed/data_wait_share": "0.05x100"},
        {"speed/data_wait_share": "0.5x100", **FINISHED},
        {"speed/data_wait_share": "0.01x27 0.9x3"},
    ),
    *both(
        "HeadwayAnomaly",
        {"run/anomaly/<anomaly>": "_x20 1x100"},
        {},
        {"run/anomaly/<anomaly>": "_x20 1x100", **FINISHED},
        {"run/anomaly/<anomaly>": "_x10 1x5 _x100"},  # over
        labels={"run": "one", "anomaly": "slower: other processes"},
    ),
    *both(
        "HeadwayGoodputLow",
        {"run/goodput_ratio": "0.4x200"},
        {"run/goodput_ratio": "0.9x200"},
        {"run/goodput_ratio": "0.4x200", **FINISHED},
        minute=90,
    ),
    Case("HeadwayGoodputLow", {"run/goodput_ratio": "0.1x200"}, minute=50),  # the run is young
    *both(
        "HeadwayBudgetNearlySpent",
        {"cost/spent_usd": "95x100", "run/budget_usd": "100x100"},
        {"cost/spent_usd": "50x100", "run/budget_usd": "100x100"},
        {"cost/spent_usd": "95x100"},
    ),
    *both(
        "HeadwayRestartsNearlyUsedUp",
        {"run/recent_failures": "3x100", "run/allowed_failures": "3x100"},
        {"run/recent_failures": "2x100", "run/allowed_failures": "3x100"},
        {"run/recent_failures": "0x100", "run/allowed_failures": "0x100"},
        {"run/recent_failures": "3x100", "run/allowed_failures": "3x100", **FINISHED},
    ),
    *both("HeadwayRunEndedBadly", {"run/state/failed": "0x10 1x100"}, {"run/state/failed": "0x100"}, FINISHED),
    *both("HeadwayRunEndedBadly", {"run/state/died": "0x10 1x100"}),
    Case("HeadwayExporterDown", dict.fromkeys(HEALTHY, "_x100"), fires=True, labels={}),
    Case("HeadwayExporterDown", {}),
)


def series_of(case: Case) -> Iterator[dict[str, str]]:
    for name, values in {**HEALTHY, **case.series}.items():
        entry = metric(name)
        assert entry is not None, name
        labels = dict(case.labels) if name in case.series and name not in HEALTHY else dict(RUN)
        if (state := entry.label_value(name)) is not None and entry.label == "state":
            labels = {**RUN, "state": state}
        inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
        yield {"series": f"{entry.prometheus_name}{{{inside}}}", "values": _notation(values)}


def _notation(values: str) -> str:
    """What repeats a value, `3x100`, is `3+0x100` to promtool."""
    return re.sub(r"(?<![-+\d.])([\d.]+|NaN|Inf)x", r"\1+0x", values)


def judge(rules: Sequence[AlertRule], cases: Sequence[Case], folder: Path) -> bool:
    """Whether promtool finds that every case comes out as it must."""
    tests = []
    for case in cases:
        document: dict[str, Any] = {"interval": "1m", "input_series": list(series_of(case)), "promql_expr_test": []}
        # Not by the alert's annotations, which hold values: the number of series of `ALERTS` that fire.
        expression = f'count(ALERTS{{alertname="{case.rule}", alertstate="firing"}})'
        samples = [{"labels": "{}", "value": 1}] if case.fires else []
        document["promql_expr_test"] = [{"expr": expression, "eval_time": f"{case.minute}m", "exp_samples": samples}]
        tests.append(document)
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules_document(rules)))
    (folder / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    assert promtool("check", "rules", "rules.yaml", folder=folder), "each is one that Prometheus takes"
    return promtool("test", "rules", "test.yaml", folder=folder)


def promtool(*words: str, folder: Path) -> bool:
    """Whether promtool is content."""
    found = program("promtool")
    if found is None:
        pytest.skip("there is no promtool: apt-get install prometheus")
    return subprocess.run([found, *words], cwd=folder, capture_output=True, check=False).returncode == 0


def cases_of(rule: AlertRule) -> list[Case]:
    return [case for case in CASES if case.rule == rule.name]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_fires_and_stays_silent(rule: AlertRule, tmp_path: Path) -> None:
    cases = cases_of(rule)
    assert {case.fires for case in cases} == {True, False}, "in both directions"
    for case in cases:
        assert judge([rule], [case], tmp_path), (case, (tmp_path / "test.yaml").read_text())


def broken(rule: AlertRule) -> Iterator[tuple[str, AlertRule]]:
    """The rule with one thing wrong at a time."""
    text = rule.expression
    for sign, other in ((" > ", " < "), (" < ", " > "), (" >= ", " < "), (" == 1", " == 2"), ("absent(", "count(")):
        if sign in text:
            yield f"{sign.strip()} is {other.strip()}", replace(rule, expression=text.replace(sign, other))
    if (guard := text.rfind(" and on (run) (")) >= 0:
        yield "also of runs that have ended", replace(rule, expression=text[:guard] + ")" * text[guard:].endswith("))"))
    yield "never for long enough", replace(rule, hold="12h")
    yield "of a metric that nobody has", replace(rule, expression=f"({text}) and on (run) headway_nothing")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_broken_rule_fails_its_tests(rule: AlertRule, tmp_path: Path) -> None:
    found = list(broken(rule))
    assert len(found) >= 3
    for what, changed in found:
        assert not judge([changed], cases_of(rule), tmp_path), f"{what}: {changed.promql}"


@pytest.mark.parametrize(
    ("deviations", "fires"),
    [
        ({20: (0.5, 40.0)}, False),  # a gradient alone
        ({20: (9.0, 1.0)}, True),
        ({20: (0.5, 40.0), 22: (5.0, 1.0)}, True),
        ({16: (0.5, 17.0), 20: (0.5, 17.0), 24: (0.5, 17.0)}, True),
    ],
    ids=["gradient spike", "loss spike", "the loss follows", "repetition"],
)
def test_a_spike_of_a_run_alerts_only_if_it_matters(
    deviations: Mapping[int, tuple[float, float]], fires: bool, tmp_path: Path
) -> None:
    """A run with a step a minute, by what its exporter says after each."""
    run = WrittenRun(tmp_path / "one")
    run.begin(alive=True)
    live = LiveRun(run.path)
    said: list[set[str]] = []
    for step in range(31):
        loss, norm = deviations.get(step, (0.5, 0.5))
        health = {"health/loss_deviations": loss, "health/grad_norm_deviations": norm}
        run.step(step, run.started + 60.0 * step, **{"speed/data_wait_share": 0.0}, **health)
        said.append({name for name in live.refresh().values if name.startswith("run/anomaly/")})
    names = set().union(*said) or {"run/anomaly/loss spike"}
    [rule] = [rule for rule in RULES if rule.name == "HeadwayAnomaly"]
    fired = []
    for name in sorted(names):
        series = " ".join("1" if name in now else "_" for now in said)
        labels = {**RUN, "anomaly": name.removeprefix("run/anomaly/")}
        case = Case(rule.name, {"run/anomaly/<anomaly>": series}, fires=True, labels=labels)
        fired.append(judge([rule], [case], tmp_path))
        assert fired[-1] != judge([rule], [replace(case, fires=False)], tmp_path)
    assert any(fired) == fires
