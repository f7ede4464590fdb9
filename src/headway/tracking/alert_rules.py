"""Alert rules for Prometheus, made from the catalogue, and those of them that `headway top` can judge by one look.

An expression names metrics as the catalogue does: `{train/loss}` becomes `headway_train_loss`. A rule that has a
`check` is judged with the same thresholds without Prometheus. `tests/parts/test_parts_alert_rules.py` tests
each rule with promtool in both directions, and shows that the test fails when the rule is broken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.files.atomic import atomic_write
from headway.telemetry.catalogue import metric
from headway.telemetry.drifts import DATA_WAIT_SHARE
from headway.tracking.live_run import Snapshot

RULES_FILE = "headway-alerts.yaml"

_STALL_SECONDS = 900
_SAVE_SECONDS = 7200
_SPIKE_DEVIATIONS = 8
_SPIKE_RATIO = 1.25
_HOT_CELSIUS = 87
_IDLE_SHARE = 0.3
_GOODPUT_RATIO = 0.7
_YOUNG_SECONDS = 3600
_DISK_SHARE = 0.05
_MEMORY_SHARE = 0.95
_BUDGET_SHARE = 0.9
_ANOMALY = "HeadwayAnomaly"

#: A run that trains, as far as its exporter can see.
_LIVE = 'on (run) ({run/state/<state>}{{state=~"running|not ended"}} == 1)'
_NAME = re.compile(r"\{(\w+/[\w/<>]+)\}")


@dataclass(frozen=True)
class AlertRule:
    """One rule. Texts may use Prometheus's templates."""

    name: str
    severity: str
    """`critical` for what loses work, else `warning`."""
    expression: str
    hold: str
    """How long the expression must hold."""
    summary: str
    fix: str
    check: Callable[[Snapshot, float], bool] | None = None
    """Judges a snapshot at a time; None for a rule that needs the past."""
    short: str = ""
    """A few words for `headway top`."""

    @property
    def promql(self) -> str:
        """The expression with the names of Prometheus."""
        return _NAME.sub(_prometheus_name, self.expression).replace("{{", "{").replace("}}", "}")


def _prometheus_name(found: re.Match[str]) -> str:
    entry = metric(found[1])
    assert entry is not None, f"{found[1]} is not in the catalogue"
    return entry.prometheus_name


def _value(snapshot: Snapshot, name: str) -> float:
    """Return a value; NaN, which no comparison holds for, if it is unknown."""
    return snapshot.values.get(name, math.nan)


def _is_not_finite(snapshot: Snapshot, now: float) -> bool:
    loss = snapshot.values.get("train/loss")
    return snapshot.is_live and loss is not None and not math.isfinite(loss)


def _since(snapshot: Snapshot, name: str, now: float) -> float:
    return now - snapshot.values.get(name, _value(snapshot, "run/started_timestamp_seconds"))


def _is_stalled(snapshot: Snapshot, now: float) -> bool:
    return snapshot.is_live and _since(snapshot, "run/last_step_timestamp_seconds", now) > _STALL_SECONDS


def _is_unsaved(snapshot: Snapshot, now: float) -> bool:
    return snapshot.is_live and _since(snapshot, "run/last_saved_timestamp_seconds", now) > _SAVE_SECONDS


def _is_save_failing(snapshot: Snapshot, now: float) -> bool:
    return snapshot.is_live and _value(snapshot, "run/failed_saves_in_row") > 0


def _is_hot(snapshot: Snapshot, now: float) -> bool:
    readings = (item for machine in snapshot.machines.values() for item in machine.items())
    return any(name.startswith("gpu/temperature_celsius/") and value > _HOT_CELSIUS for name, value in readings)


def _is_disk_full(snapshot: Snapshot, now: float) -> bool:
    shares = (
        one.get("system/disk_free_gib", math.nan) / (one.get("system/disk_total_gib") or math.nan)
        for one in snapshot.machines.values()
    )
    few = snapshot.is_live and _value(snapshot, "health/checkpoints_that_fit") < 2
    return few or any(share < _DISK_SHARE for share in shares)


def _is_nearly_spent(snapshot: Snapshot, now: float) -> bool:
    return _value(snapshot, "cost/spent_usd") > _BUDGET_SHARE * _value(snapshot, "run/budget_usd")


def _is_last_restart_used(snapshot: Snapshot, now: float) -> bool:
    allowed = _value(snapshot, "run/allowed_failures")
    return snapshot.is_live and allowed > 0 and _value(snapshot, "run/recent_failures") >= allowed


RULES: Sequence[AlertRule] = (
    AlertRule(
        "HeadwayLossNotFinite",
        "critical",
        f"({{train/loss}} != {{train/loss}} or abs({{train/loss}}) == Inf) and {_LIVE}",
        "0m",
        "The loss of {{ $labels.run }} is not finite",
        "Look at the learning rate and at the rows of the step; docs/health.md says how a run rolls back by itself.",
        _is_not_finite,
        "loss not finite",
    ),
    AlertRule(
        "HeadwayLossSpike",
        "warning",
        f"(max_over_time({{health/loss_deviations}}[10m]) > {_SPIKE_DEVIATIONS}"
        f" or avg_over_time({{train/loss}}[10m]) > {_SPIKE_RATIO} * avg_over_time({{train/loss}}[1h] offset 10m))"
        f" and {_LIVE}",
        "0m",
        "The loss of {{ $labels.run }} has risen far above the usual",
        "headway data preview my.yaml --step N shows the rows; health.on_spike: rollback leaves them out.",
    ),
    AlertRule(
        "HeadwayNoStep",
        "critical",
        f"(time() - ({{run/last_step_timestamp_seconds}} or {{run/started_timestamp_seconds}})) > {_STALL_SECONDS}"
        f" and {_LIVE}",
        "1m",
        "{{ $labels.run }} has done no step for {{ $value | humanizeDuration }}",
        "The logs and stacks are in attempts/ of the run directory; headway doctor examines the machine.",
        _is_stalled,
        "no step",
    ),
    AlertRule(
        "HeadwayCheckpointTooOld",
        "warning",
        f"(time() - ({{run/last_saved_timestamp_seconds}} or {{run/started_timestamp_seconds}})) > {_SAVE_SECONDS}"
        f" and {_LIVE}",
        "5m",
        "The newest checkpoint of {{ $labels.run }} is {{ $value | humanizeDuration }} old",
        "checkpoint.every says how often the run saves; its log says why a save failed.",
        _is_unsaved,
        "checkpoint old",
    ),
    AlertRule(
        "HeadwaySaveFailing",
        "critical",
        f"increase({{run/save_failures}}[30m]) > 0 or ({{run/failed_saves_in_row}} > 0 and {_LIVE})",
        "0m",
        "A checkpoint of {{ $labels.run }} could not be saved",
        "The log of the run says why: a full disk most often. Make room: checkpoint.max_failed_saves in a row end it.",
        _is_save_failing,
        "save failed",
    ),
    AlertRule(
        "HeadwayUploadFailing",
        "warning",
        "increase({run/upload_failures}[30m]) > 0",
        "0m",
        "A checkpoint of {{ $labels.run }} did not reach the remote tier",
        "The log of the run says why; the next checkpoint is tried again.",
    ),
    AlertRule(
        "HeadwayGpuHot",
        "warning",
        f"{{gpu/temperature_celsius/<gpu>}} > {_HOT_CELSIUS}",
        "5m",
        "GPU {{ $labels.gpu }} of {{ $labels.machine }} is at {{ $value }} degrees",
        "Check its cooling; a GPU that is too hot slows itself down.",
        _is_hot,
        "GPU hot",
    ),
    AlertRule(
        "HeadwayGpuUtilizationLow",
        "warning",
        f"avg_over_time({{gpu/utilization_share/<gpu>}}[15m]) < {_IDLE_SHARE} and {_LIVE}",
        "15m",
        "GPU {{ $labels.gpu }} of {{ $labels.machine }} is used {{ $value | humanizePercentage }} of the time",
        "headway profile shows what the steps wait for.",
    ),
    AlertRule(
        "HeadwayGpuErrors",
        "critical",
        "increase({gpu/uncorrected_errors/<gpu>}[1h]) > 0 or increase({gpu/xid_errors/<gpu>}[1h]) > 0",
        "0m",
        "GPU {{ $labels.gpu }} of {{ $labels.machine }} reports errors",
        "headway doctor says what they mean; a GPU with memory errors is reset or replaced.",
    ),
    AlertRule(
        "HeadwayDiskNearlyFull",
        "warning",
        f"{{system/disk_free_gib}} / {{system/disk_total_gib}} < {_DISK_SHARE}"
        f" or ({{health/checkpoints_that_fit}} < 2 and {_LIVE})",
        "2m",
        "The disk of {{ $labels.run }} is nearly full",
        "Free space there, or keep fewer checkpoints (checkpoint.keep, keep_every, keep_for).",
        _is_disk_full,
        "disk nearly full",
    ),
    AlertRule(
        "HeadwayMemoryNearlyUsedUp",
        "warning",
        f"{{system/memory_used_gib}} / {{system/memory_allowed_gib}} > {_MEMORY_SHARE}",
        "5m",
        "The main memory of {{ $labels.machine }} is nearly used up",
        "When it is, the kernel kills the run. checkpoint.memory_every, optimizer.offload and train.weights=bf16 keep"
        " state there: leave one out, or use a larger machine.",
    ),
    AlertRule(
        "HeadwayDataWaitHigh",
        "warning",
        f"avg_over_time({{speed/data_wait_share}}[10m]) > {DATA_WAIT_SHARE} and {_LIVE}",
        "10m",
        "{{ $labels.run }} waits for data {{ $value | humanizePercentage }} of the time",
        "Put the token store on a faster disk; headway profile shows the waits.",
    ),
    AlertRule(
        _ANOMALY,
        "warning",
        f"{{run/anomaly/<anomaly>}} == 1 and {_LIVE}",
        "1m",
        "{{ $labels.run }} is not as usual: {{ $labels.anomaly }}",
        "The label names the suspected cause; headway top RUNS --json and headway ui RUNS have the numbers.",
    ),
    AlertRule(
        "HeadwayGoodputLow",
        "warning",
        f"({{run/goodput_ratio}} < {_GOODPUT_RATIO}"
        f" and (time() - {{run/started_timestamp_seconds}}) > {_YOUNG_SECONDS}) and {_LIVE}",
        "15m",
        "Only {{ $value | humanizePercentage }} of the time of {{ $labels.run }} went into steps that count",
        "headway runs show RUN says where the rest went.",
    ),
    AlertRule(
        "HeadwayBudgetNearlySpent",
        "warning",
        f"{{cost/spent_usd}} / {{run/budget_usd}} > {_BUDGET_SHARE}",
        "0m",
        "{{ $labels.run }} has spent {{ $value | humanizePercentage }} of its budget",
        "Raise the budget, or let the run stop.",
        _is_nearly_spent,
        "budget nearly spent",
    ),
    AlertRule(
        "HeadwayRestartsNearlyUsedUp",
        "critical",
        f"({{run/recent_failures}} >= {{run/allowed_failures}} and {{run/allowed_failures}} > 0) and {_LIVE}",
        "0m",
        "One more failure ends {{ $labels.run }}",
        "attempts/ of the run directory has the reasons; supervise.max_failures allows more.",
        _is_last_restart_used,
        "last restart",
    ),
    AlertRule(
        "HeadwayRunEndedBadly",
        "critical",
        '{run/state/<state>}{{state=~"failed|died"}} == 1',
        "0m",
        "{{ $labels.run }} has ended: {{ $labels.state }}",
        "headway runs show RUN has the reason; the same command continues from the newest checkpoint.",
    ),
    AlertRule(
        "HeadwayExporterDown",
        "critical",
        "absent({run/state/<state>}) and absent(headway_build_info)",
        "5m",
        "No exporter of Headway answers, so that no other alert can fire",
        "headway top RUNS --serve :9400 must run beside the run directories.",
    ),
)


@dataclass(frozen=True)
class Alert:
    """A rule that holds for a run, or an anomaly of it."""

    name: str
    severity: str
    short: str
    text: str
    """What was seen, with numbers; empty if the few words say it all."""
    fix: str


def firing(snapshot: Snapshot, now: float) -> list[Alert]:
    """Return the alerts of a run that can be judged by one look, and hold now."""
    rules = [rule for rule in RULES if rule.check is not None and rule.check(snapshot, now)]
    return [
        *(Alert(rule.name, rule.severity, rule.short, "", rule.fix) for rule in rules),
        *(Alert(_ANOMALY, "warning", one.label, one.text, one.advice) for one in snapshot.anomalies),
    ]


def rules_document(rules: Sequence[AlertRule] = RULES) -> dict[str, Any]:
    """Return the rules as Prometheus reads them."""
    return {
        "groups": [
            {
                "name": "headway",
                "rules": [
                    {
                        "alert": rule.name,
                        "expr": rule.promql,
                        "for": rule.hold,
                        "labels": {"severity": rule.severity},
                        "annotations": {"summary": rule.summary, "description": rule.fix},
                    }
                    for rule in rules
                ],
            }
        ]
    }


def export_rules(folder: Path) -> Path:
    """Write the rules as YAML.

    Raises:
        OSError: they cannot be written.
    """
    import yaml

    path = folder / RULES_FILE
    with atomic_write(path, "w") as file:
        file.write("# Written by `headway alerts export`.\n")
        yaml.safe_dump(rules_document(), file, sort_keys=False, width=1000)
    return path
