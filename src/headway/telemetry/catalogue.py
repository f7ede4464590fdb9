"""The catalogue of metrics: every name that a run records or that a reader derives, with unit, kind, help and source.

Docs, Prometheus names, dashboards and alert rules are made from it; `tests/unit/telemetry/test_telemetry_catalogue.py`
fails for a recorded name that is not in it. To add a metric, add a line to its group below and run
`headway runs metrics --markdown > docs/metrics.md`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache


class Kind(Enum):
    """How values of a metric relate to each other."""

    GAUGE = "gauge"
    """A level, which rises and falls."""
    COUNTER = "counter"
    """A total since something began, recorded as such."""
    AMOUNT = "amount"
    """What one record adds; readers that want a total add the amounts up."""


class Unit(Enum):
    """The unit of a recorded value: its words, and suffix and factor of the Prometheus base unit."""

    NUMBER = ("", "", 1.0)
    STEPS = ("steps", "", 1.0)
    RATE = ("per second", "", 1.0)
    SECONDS = ("seconds", "seconds", 1.0)
    TIMESTAMP = ("Unix seconds", "seconds", 1.0)
    RATIO = ("0 to 1", "ratio", 1.0)
    GIB = ("GiB", "bytes", float(2**30))
    GIB_PER_SECOND = ("GiB per second", "bytes_per_second", float(2**30))
    USD = ("US dollars", "usd", 1.0)
    USD_PER_HOUR = ("US dollars per hour", "", 1.0)
    CELSIUS = ("degrees Celsius", "celsius", 1.0)
    WATTS = ("watts", "watts", 1.0)
    MEGAHERTZ = ("MHz", "hertz", 1e6)

    def __init__(self, words: str, suffix: str, factor: float) -> None:
        self.words = words
        self.suffix = suffix
        self.factor = factor


#: Endings of recorded names that the suffix of a base unit replaces.
_RECORDED_ENDINGS = ("_gib_per_second", "_gib", "_share", "_ratio", "_mhz")
_LABEL = re.compile(r"<(\w+)>$")


@dataclass(frozen=True)
class Metric:
    """One metric, or a family that has one for each value of a label: `data/share/<source>`."""

    name: str
    unit: Unit
    help: str
    """One sentence without its full stop."""
    kind: Kind = Kind.GAUGE
    source: str = field(default="", kw_only=True)
    """What records it."""

    @property
    def label(self) -> str | None:
        """The label of a family; None for a single metric."""
        found = _LABEL.search(self.name)
        return found[1] if found else None

    @property
    def prefix(self) -> str:
        """The name up to the label; the whole name of a single metric."""
        return _LABEL.sub("", self.name)

    @property
    def group(self) -> str:
        """The part of the name before the slash; empty for what every record has."""
        return self.name.rpartition("/")[0].partition("/")[0]

    def label_value(self, name: str) -> str | None:
        """Return the value of the label in a recorded name of this family; None for a single metric."""
        return name.removeprefix(self.prefix) if self.label else None

    @property
    def is_total(self) -> bool:
        """Whether Prometheus sees a counter."""
        return self.kind is not Kind.GAUGE

    @property
    def prometheus_name(self) -> str:
        """The name in Prometheus: `headway_` first, then the words, the base unit, and `_total` for counters."""
        group, _, word = self.prefix.strip("/").rpartition("/")
        suffix = self.unit.suffix
        if suffix and not word.endswith(suffix):
            ending = next((ending for ending in _RECORDED_ENDINGS if word.endswith(ending)), "")
            word = f"{word.removesuffix(ending)}_{suffix}"
        words = f"{group.replace('/', '_')}_{word}" if group else word
        return f"headway_{words}_total" if self.is_total else f"headway_{words}"


_Line = tuple[str, Unit, str] | tuple[str, Unit, str, Kind]

#: The source of what is read of a machine and not of a step; it has the label `machine` in Prometheus.
SYSTEM = "system readings"

#: Lines by source; a metric without a kind is a gauge.
_LINES: dict[str, tuple[_Line, ...]] = {
    "every record": (
        ("step", Unit.STEPS, "Finished steps"),
        ("attempt", Unit.NUMBER, "Number of the attempt, from 1"),
        ("time", Unit.TIMESTAMP, "When the record was written"),
    ),
    "training step": (
        ("train/loss", Unit.NUMBER, "Mean loss over the items of the global batch"),
        ("train/losses/<part>", Unit.NUMBER, "Mean of one part of the loss of a task of your own, by its name"),
        ("train/grad_norm", Unit.NUMBER, "Global norm of the mean gradient, before clipping"),
        ("train/learning_rate", Unit.NUMBER, "Learning rate of the step"),
        (
            "train/items",
            Unit.NUMBER,
            "Items that the loss is averaged over: tokens, or samples of other modules",
            Kind.AMOUNT,
        ),
        ("train/skipped_steps", Unit.STEPS, "Steps so far whose update was left out"),
        (
            "train/steps_without_target",
            Unit.STEPS,
            "Steps none of whose tokens is a target, which have no loss and no update",
            Kind.AMOUNT,
        ),
        ("train/left_out_steps", Unit.STEPS, "Steps so far whose rows a rollback has left out"),
        ("train/loss_scale", Unit.NUMBER, "Loss scale of fp16"),
        ("train/router_z_loss", Unit.NUMBER, "Router z-loss, mean over tokens and layers, without its weight"),
        (
            "train/router_balance_loss",
            Unit.NUMBER,
            "Balance loss of routers, mean over tokens and layers, without its weight",
        ),
        ("train/expert_load_max", Unit.NUMBER, "Largest load of an expert over the mean load; 1 is even"),
        ("train/dropped_share", Unit.RATIO, "Share of tokens that no expert computed"),
        ("speed/step_seconds", Unit.SECONDS, "Time of the step, without evaluation and checkpoints"),
        ("speed/tokens_per_second", Unit.RATE, "Items of the step over its time"),
        ("speed/data_wait_share", Unit.RATIO, "Share of the step's time that waited for data"),
        ("speed/mfu", Unit.RATIO, "Model FLOPs utilization; absent when the accelerator's peak is unknown"),
        ("memory/peak_gib", Unit.GIB, "Peak memory of the first worker: of its GPU, else resident memory"),
    ),
    "measured step": (
        ("communication/seconds", Unit.SECONDS, "Time of the step in which a collective ran"),
        (
            "communication/exposed_share",
            Unit.RATIO,
            "Share of the step in which a collective ran and nothing was computed",
        ),
        ("communication/sent_gib", Unit.GIB, "What the first worker handed over to collectives in the step"),
        ("communication/rate_gib_per_second", Unit.GIB_PER_SECOND, "The same by the time of collectives"),
    ),
    "evaluation": (
        ("evaluation/loss", Unit.NUMBER, "Loss on the validation data"),
        ("evaluation/losses/<part>", Unit.NUMBER, "One part of the validation loss of a task of your own"),
        ("evaluation/perplexity", Unit.NUMBER, "Exponential of the validation loss of a language model"),
        ("evaluation/replay_loss", Unit.NUMBER, "Loss on the validation data of replayed sources"),
        ("evaluation/replay_perplexity", Unit.NUMBER, "Exponential of the validation loss of replayed sources"),
        ("evaluation/benchmarks/<benchmark>", Unit.NUMBER, "Result of a benchmark's task, by its task and metric"),
        ("evaluation/benchmarks_step", Unit.STEPS, "Step of the checkpoint that benchmarks were run on"),
    ),
    "checkpoints": (
        ("checkpoint/stall_seconds", Unit.SECONDS, "Time that training waited for a checkpoint's copy", Kind.AMOUNT),
        ("checkpoint/hold_stall_seconds", Unit.SECONDS, "Time that training waited for a memory snapshot", Kind.AMOUNT),
        ("checkpoint/saved_step", Unit.STEPS, "Step of the checkpoint that was saved"),
        ("checkpoint/write_seconds", Unit.SECONDS, "Time from handing a checkpoint over until it was saved"),
        ("checkpoint/failed_step", Unit.STEPS, "Step of the checkpoint that could not be saved"),
        ("checkpoint/load_seconds", Unit.SECONDS, "Time to find and load the checkpoint of an attempt's start"),
        ("checkpoint/uploaded_step", Unit.STEPS, "Step of the checkpoint that reached the remote tier"),
        ("checkpoint/upload_seconds", Unit.SECONDS, "Time of an upload to the remote tier"),
        ("checkpoint/upload_failed_step", Unit.STEPS, "Step of the checkpoint whose upload failed"),
    ),
    "health": (
        ("health/loss_deviations", Unit.NUMBER, "Standard deviations of the loss above the usual"),
        ("health/grad_norm_deviations", Unit.NUMBER, "Standard deviations of the gradient norm above the usual"),
    ),
    "conditions": (
        ("health/disk_free_gib", Unit.GIB, "Free space where checkpoints are written"),
        ("health/checkpoints_that_fit", Unit.NUMBER, "Checkpoints like the newest that would still fit there"),
        ("health/memory_available_gib", Unit.GIB, "Main memory that is left to the run"),
        ("health/clock_jump_seconds", Unit.SECONDS, "Seconds by which the wall clock was set forward"),
        ("health/cpu_wait_share", Unit.RATIO, "Time in which a thread with work waited for a processor"),
        ("health/cpu_used_by_others", Unit.NUMBER, "Processors that other processes of the machine used"),
        ("health/cpu_stolen_share", Unit.RATIO, "Time of its processors that a hypervisor gave to other machines"),
        ("health/cpu_throttled_share", Unit.RATIO, "Time in which the quota of its control group was used up"),
        ("health/threads_sleep", Unit.NUMBER, "Whether OpenMP's threads sleep when they wait (1) or spin (0)"),
        ("health/gpu_temperature_celsius", Unit.CELSIUS, "Temperature of the hottest GPU of the first machine"),
    ),
    SYSTEM: (
        ("system/cpu_share", Unit.RATIO, "Share of the machine's processor time that was used"),
        ("system/memory_used_gib", Unit.GIB, "Main memory in use, of what the run may use"),
        ("system/memory_allowed_gib", Unit.GIB, "Main memory that the run may use"),
        ("system/disk_free_gib", Unit.GIB, "Free space of the file system of the run directory"),
        ("system/disk_total_gib", Unit.GIB, "Size of the file system of the run directory"),
        ("system/disk_read_gib", Unit.GIB, "Read from the machine's disks since it started", Kind.COUNTER),
        ("system/disk_written_gib", Unit.GIB, "Written to the machine's disks since it started", Kind.COUNTER),
        ("system/network_received_gib", Unit.GIB, "Received by the machine's network interfaces", Kind.COUNTER),
        ("system/network_sent_gib", Unit.GIB, "Sent by the machine's network interfaces", Kind.COUNTER),
        ("gpu/utilization_share/<gpu>", Unit.RATIO, "Share of the sample period in which a kernel ran"),
        ("gpu/memory_used_gib/<gpu>", Unit.GIB, "GPU memory in use, by all processes"),
        ("gpu/memory_total_gib/<gpu>", Unit.GIB, "Size of the GPU's memory"),
        ("gpu/temperature_celsius/<gpu>", Unit.CELSIUS, "Temperature of the GPU"),
        ("gpu/power_watts/<gpu>", Unit.WATTS, "Power that the GPU draws"),
        ("gpu/power_limit_watts/<gpu>", Unit.WATTS, "Power limit of the GPU"),
        ("gpu/sm_clock_mhz/<gpu>", Unit.MEGAHERTZ, "Clock of the multiprocessors"),
        ("gpu/memory_clock_mhz/<gpu>", Unit.MEGAHERTZ, "Clock of the GPU's memory"),
        (
            "gpu/uncorrected_errors/<gpu>",
            Unit.NUMBER,
            "Uncorrected memory errors since the driver was loaded",
            Kind.COUNTER,
        ),
        (
            "gpu/corrected_errors/<gpu>",
            Unit.NUMBER,
            "Corrected memory errors since the driver was loaded",
            Kind.COUNTER,
        ),
        (
            "gpu/xid_errors/<gpu>",
            Unit.NUMBER,
            "Xid messages of the kernel about the GPU since the attempt began",
            Kind.COUNTER,
        ),
    ),
    "copies of a logged step": (
        ("host_to_device/seconds", Unit.SECONDS, "Time of the step's copies of batches to the first worker's GPU"),
        ("host_to_device/copied_gib", Unit.GIB, "Size of the step's copies of batches to the first worker's GPU"),
        (
            "host_to_device/rate_gib_per_second",
            Unit.GIB_PER_SECOND,
            "Rate of the step's copies of batches to the first worker's GPU",
        ),
    ),
    "data": (
        ("data/share/<source>", Unit.RATIO, "Share of the step's rows that come from a source"),
        ("data/epochs/<source>", Unit.NUMBER, "How often a source was gone through"),
    ),
    "readers of the run directory": (
        ("run/state/<state>", Unit.NUMBER, "State of the run: 1 for the one that it is in, 0 for the others"),
        ("run/total_steps", Unit.STEPS, "Steps of the whole run"),
        ("run/started_timestamp_seconds", Unit.TIMESTAMP, "When the first attempt started"),
        ("run/running_seconds", Unit.SECONDS, "Time in which an attempt was running"),
        ("run/last_step_timestamp_seconds", Unit.TIMESTAMP, "When the last step was recorded"),
        ("run/last_saved_timestamp_seconds", Unit.TIMESTAMP, "When the newest checkpoint was published"),
        ("run/eta_seconds", Unit.SECONDS, "Time that the remaining steps take at the pace of recent ones"),
        ("run/goodput_ratio", Unit.RATIO, "Share of the time so far in steps that led to the newest weights"),
        ("run/failed_saves_in_row", Unit.NUMBER, "Saves that failed since the last one that succeeded"),
        ("run/recent_failures", Unit.NUMBER, "Failures within supervise.failure_window"),
        ("run/allowed_failures", Unit.NUMBER, "Most failures within that window that lead to a new attempt"),
        ("run/budget_usd", Unit.USD, "Budget of the run"),
        ("run/anomalies", Unit.NUMBER, "Anomalies of a run that trains"),
        ("run/anomaly/<anomaly>", Unit.NUMBER, "Whether the run has this anomaly, labelled with its suspected cause"),
        ("run/steps", Unit.STEPS, "Steps that were computed, those that were repeated included", Kind.COUNTER),
        ("run/saves", Unit.NUMBER, "Checkpoints that were saved", Kind.COUNTER),
        ("run/save_failures", Unit.NUMBER, "Checkpoints that could not be saved", Kind.COUNTER),
        ("run/uploads", Unit.NUMBER, "Checkpoints that reached the remote tier", Kind.COUNTER),
        ("run/upload_failures", Unit.NUMBER, "Uploads that failed", Kind.COUNTER),
    ),
    "cost": (
        ("cost/spent_usd", Unit.USD, "What the run has cost so far, over all attempts"),
        ("cost/usd_per_hour", Unit.USD_PER_HOUR, "Price of all machines of the attempt for an hour"),
        ("cost/idle_usd", Unit.USD, "Part of the cost between attempts, while the machines were held"),
        ("cost/storage_usd", Unit.USD, "Part of the cost of keeping checkpoints"),
    ),
    "goodput": (
        ("goodput/ratio", Unit.RATIO, "Share of the time before this attempt in steps that were kept"),
        ("goodput/wall_seconds", Unit.SECONDS, "Time of the run before this attempt"),
        ("goodput/lost_seconds/<cause>", Unit.SECONDS, "Time of the run before this attempt that was lost"),
        ("goodput/lost_steps", Unit.STEPS, "Steps before this attempt that were computed again or left out later"),
    ),
}

#: Every metric by its name; families by the name with the label in angle brackets.
CATALOGUE: dict[str, Metric] = {
    line[0]: Metric(*line, source=source) for source, lines in _LINES.items() for line in lines
}
_FAMILIES = tuple(metric for metric in CATALOGUE.values() if metric.label)


@lru_cache(4096)  # names of a user's own code may be without number
def metric(name: str) -> Metric | None:
    """Return the metric of a recorded name, or its family; None for one that a user's own code records."""
    known = CATALOGUE.get(name)
    if known is not None:
        return known
    return next((family for family in _FAMILIES if name.startswith(family.prefix) and name != family.prefix), None)


def reference() -> str:
    """Write the catalogue as a page of Markdown, one table for each group, with a final line break."""
    return "\n".join([_HEAD, *_tables()]) + "\n"


def _tables() -> Iterator[str]:
    groups = dict.fromkeys(entry.group for entry in CATALOGUE.values())
    for group in groups:
        yield f"## `{group}/`\n" if group else "## Every record\n"
        yield "| name | unit | kind | meaning | recorded by | in Prometheus |"
        yield "|---|---|---|---|---|---|"
        for entry in CATALOGUE.values():
            if entry.group == group:
                in_prometheus = f"`{entry.prometheus_name}`"
                if entry.label:
                    in_prometheus += f", label `{entry.label}`"
                cells = [f"`{entry.name}`", entry.unit.words, entry.kind.value, entry.help, entry.source, in_prometheus]
                yield f"| {' | '.join(cells)} |"
        yield ""


_HEAD = """# Metrics

Written by `headway runs metrics --markdown`; do not edit. One line of `metrics.jsonl` holds `step`, `attempt`, `time`
and any of the other values; what is unknown is absent. [telemetry](rooms/telemetry.md#metrics) says how records add up.

A *gauge* rises and falls, a *counter* is a total, and an *amount* is what one record adds. Prometheus sees base units
(bytes, seconds, ratios), and a counter with `_total` for counters and amounts. A name in angle brackets stands for a
family, with one metric for each value. Names that your own callbacks and models record are not listed.
"""
