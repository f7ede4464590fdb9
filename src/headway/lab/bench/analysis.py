"""Comparison of results: means with intervals, scaling efficiency, and cells that belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.core.format import counted
from headway.lab.bench.results import CellResult, Measurement, model_place
from headway.lab.bench.statistics import Difference, Mean, difference, mean_of


@dataclass(frozen=True)
class Metric:
    """One number of a measurement."""

    name: str
    """Its column in `metrics.csv`, with the unit."""
    read: Callable[[Measurement], float | None]


def _of(name: str) -> Metric:
    return Metric(name, lambda found: getattr(found, name))


SPEED = _of("tokens_per_second")
MEMORY = _of("peak_memory_bytes")
LOSS = _of("mean_loss")
RESIDENT = _of("resident_growth_bytes")


def _share_of_time(kind: str) -> Metric:
    return Metric(f"communication_{kind}_share", lambda found: getattr(found.communication, f"{kind}_share", None))


COMMUNICATION = (_share_of_time("total"), _share_of_time("exposed"), _share_of_time("overlapped"))
METRICS = (
    SPEED,
    _of("tokens_per_second_per_device"),
    _of("mean_step_seconds"),
    _of("p50_step_seconds"),
    _of("p95_step_seconds"),
    MEMORY,
    _of("peak_reserved_bytes"),
    _of("peak_resident_bytes"),
    RESIDENT,
    _of("host_to_device_gb_per_second"),
    LOSS,
    _of("mfu"),
    _of("hfu"),
    _of("model_flops_per_second"),
    _of("measured_product_flops_per_second"),
    _of("share_of_measured_products"),
    *COMMUNICATION,
    _of("gpu_utilization_mean"),
    _of("gpu_utilization_p95"),
    Metric("energy_joules_per_token", lambda m: m.energy.joules / m.items if m.energy else None),
)


class Setting(NamedTuple):
    """The common properties of cells that are compared, apart from strategy and number of workers."""

    model: str
    precision: str
    micro_batch: int
    sequence_length: int
    scaling: str
    workers_per_machine: int
    """0 where numbers of workers are compared, not numbers of machines."""
    conditions: str
    """Hardware, software, and how it was measured."""

    @classmethod
    def of(cls, result: CellResult) -> Setting:
        """Return the setting of a result."""
        cell = result.cell
        axes = cell.model, cell.precision, cell.micro_batch, cell.sequence_length, cell.scaling
        return cls(*axes, result.workers_per_machine or 0, result.conditions)

    @property
    def parts(self) -> tuple[str, ...]:
        """The setting in words, without the conditions."""
        rows = f"micro-batches of {self.micro_batch} x {self.sequence_length:,} tokens"
        each = self.workers_per_machine
        machines = [f"{counted(each, 'worker')} per machine"] if each else []
        return self.model, self.precision, rows, f"{self.scaling} scaling", *machines


def setting_in_words(setting: Setting, settings: Iterable[Setting]) -> str:
    """Describe a setting, with its conditions if another setting differs only in these."""
    alike = [other for other in settings if other._replace(conditions="") == setting._replace(conditions="")]
    return ", ".join(_with_conditions(setting, setting.parts, alike))


def common_parts(settings: Iterable[Setting]) -> tuple[str, ...]:
    """Describe what all settings have in common."""
    every = [setting.parts for setting in settings]
    return tuple(part for part in every[0] if all(part in parts for parts in every)) if every else ()


def differing_in_words(setting: Setting, settings: Iterable[Setting]) -> str:
    """Describe how a setting differs from the others."""
    settings = list(settings)
    common = common_parts(settings)
    parts = [part for part in setting.parts if part not in common]
    alike = [other for other in settings if other.parts == setting.parts]
    return ", ".join(_with_conditions(setting, parts, alike))


def _with_conditions(setting: Setting, parts: Sequence[str], alike: Sequence[Setting]) -> Sequence[str]:
    """Add the conditions if there are other settings that are otherwise alike."""
    return [*parts, f"conditions {setting.conditions}"] if len(alike) > 1 else parts


def label(result: CellResult, results: Iterable[CellResult]) -> str:
    """Return the name of a cell, with its conditions if the same cell was measured under others, too."""
    name = result.cell.name
    several = any(other.cell.name == name and other.key != result.key for other in results)
    return f"{name} [{result.conditions}]" if several else name


def values(result: CellResult, metric: Metric) -> list[float]:
    """Return the values of all repeats that have one."""
    return [value for found in result.measured if (value := metric.read(found)) is not None]


def mean(result: CellResult, metric: Metric) -> Mean | None:
    """Return the mean over the repeats with its 95 % confidence interval; None if it is unknown."""
    return mean_of(values(result, metric))


def compare(first: CellResult, second: CellResult, metric: Metric) -> Difference | None:
    """Compare the first to the second; None if one is unknown."""
    return difference(values(first, metric), values(second, metric))


def by_setting(results: Iterable[CellResult]) -> dict[Setting, list[CellResult]]:
    """Group results that may be compared with each other; small models come first."""
    groups: dict[Setting, list[CellResult]] = {}
    for result in results:
        groups.setdefault(Setting.of(result), []).append(result)
    return dict(sorted(groups.items(), key=lambda pair: (*model_place(pair[0].model), pair[0])))


def good(results: Iterable[CellResult]) -> list[CellResult]:
    """Return the results with a comparable speed: a step without an update does less work than one of training."""
    return [result for result in results if result.status == "ok" and result.doubt is None]


def base_of(result: CellResult, results: Sequence[CellResult]) -> CellResult | None:
    """Return the base of scaling: the successful result with the fewest workers."""
    setting = Setting.of(result)
    same = [r for r in good(results) if r.cell.strategy == result.cell.strategy and Setting.of(r) == setting]
    return min(same, key=lambda r: r.cell.workers, default=None)


def efficiency(result: CellResult, results: Sequence[CellResult]) -> float | None:
    """Return tokens/s per worker, as a share of that with the fewest workers.

    In weak scaling this compares the time of a step with equally many rows per worker, in strong scaling the speed-up
    of one step by the number of workers. None for the base itself, without a base, and for what may not be compared.
    """
    base = base_of(result, results)
    speed = mean(result, SPEED)
    if base is None or speed is None or result.doubt is not None or base.cell.workers == result.cell.workers:
        return None
    before = mean(base, SPEED)
    assert before is not None, "it succeeded"
    return (speed.value / result.cell.workers) / (before.value / base.cell.workers)


def ideal_efficiency(result: CellResult, base: CellResult | None = None) -> float:
    """Return the possible efficiency: workers on processors share these, other devices belong to one worker each.

    The share is relative to that of the base's workers, as in `efficiency`.
    """
    return _share_of_cores(result) / (1.0 if base is None else _share_of_cores(base))


def _share_of_cores(result: CellResult) -> float:
    found = result.measured[0]
    cores: int | None = (result.environment.get("hardware") or {}).get("cores_usable")
    if found.device_type != "cpu" or not cores:
        return 1.0
    return min(1.0, cores / (result.cell.workers // result.cell.machines * found.threads))
