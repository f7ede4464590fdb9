"""The result of a cell: one JSON file with a version and a schema, checked whenever it is read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headway.config.loading.reference import descriptions
from headway.config.strategies import STRATEGIES
from headway.core.errors import DataError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json
from headway.core.files.hashes import fingerprint
from headway.core.format import counted
from headway.lab.bench.suite import Cell, FileName, flattened

SCHEMA_VERSION = 1
CELLS = "cells"
LOGS = "logs"
#: Folder for results measured under other conditions, which come back when they match again.
EARLIER = "earlier"
#: Folder for results that are measured anew. It is never read, or a stopped matrix that continues would mix old and new
#: results.
DISCARDED = "discarded"

Status = Literal["ok", "failed", "killed", "timeout", "out_of_memory", "refused", "excluded"]
#: Statuses of a cell that cannot run at all; another attempt would meet the same error.
FINAL: tuple[Status, ...] = ("refused", "excluded", "out_of_memory")
#: A cell that failed so often without success would hardly succeed the next time.
_GIVEN_UP = 2

#: Times from here on cannot be shown as a date.
_YEAR_10000 = 253_402_300_800
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmbt])", re.IGNORECASE)


class Record(BaseModel):
    """A part of a result; unknown keys are errors, and numbers must be finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Communication(Record):
    """Time of the profiled steps as shares, averaged over all workers."""

    steps: int
    total_share: float
    """A collective was running, including the wait for the slowest worker."""
    exposed_share: float
    """... and this worker computed nothing meanwhile."""
    overlapped_share: float
    """... and this worker computed."""


class Energy(Record):
    """Energy over the measured steps."""

    joules: float
    source: str
    """The source: the driver of the GPUs, or the processors with all that ran on them meanwhile."""


class Measurement(Record):
    """The results of one measurement of a cell. Unknown values are null."""

    device: str
    """Product name of the first worker's device."""
    device_type: str
    threads: int = Field(gt=0)
    """CPU threads of a worker."""
    parameters: int
    items: int = Field(gt=0)
    """Tokens of the measured steps, over all workers."""
    step_seconds: list[float] = Field(min_length=1)
    """The measured steps, as the first worker saw them."""
    tokens_per_second: float = Field(gt=0)
    tokens_per_second_per_device: float = Field(gt=0)
    mean_step_seconds: float
    p50_step_seconds: float
    p95_step_seconds: float
    mean_loss: float | None
    """Over the measured steps; null when one was not finite."""
    skipped_steps: int | None = None
    """Measured steps without an update, since loss or gradient were not finite."""
    peak_memory_bytes: int | None
    """What tensors take, of the worker that has most: on GPUs the most that PyTorch had allocated so far, on the CPU
    the most within one step."""
    peak_memory_bytes_by_worker: list[int | None]
    peak_reserved_bytes: int | None
    """On GPUs: what PyTorch's allocator kept there, free blocks included; of the worker that has most."""
    peak_resident_bytes: int | None
    """Resident memory of the process that has most: with libraries, buffers of gloo, and what is freed and kept."""
    resident_growth_bytes: int | None
    """By how much that grew from before the model was built to its peak."""
    host_to_device_gb_per_second: float | None
    """From page-locked memory, the mean of all workers copying at the same time; null on the CPU."""
    flops_per_token: float | None
    """Of the model, as MFU counts them (Chowdhery et al. 2022, appendix B)."""
    model_flops_per_second: float | None
    """Of all workers."""
    mfu: float | None
    """Null where the device's peak is not known."""
    hfu: float | None
    """With what is computed again in the backward pass; null where that is not known."""
    measured_product_flops_per_second: float | None
    """What all workers reach together at the same time in products of large matrices, on the CPU."""
    share_of_measured_products: float | None
    """`model_flops_per_second` as a share of that."""
    communication: Communication | None
    """Null with one worker, or where the profiler saw no collective."""
    energy: Energy | None
    gpu_utilization_mean: float | None = None
    """Share of the time of the measured steps in which a kernel ran, the mean of all GPUs; null where the driver does
    not say."""
    gpu_utilization_p95: float | None = None
    """95th percentile of the samples of all GPUs."""


class Repeat(Record):
    """One measurement, in processes of its own."""

    number: int
    """From 1."""
    status: Status
    reason: str | None = None
    """Why it failed, or how its processes ended after they had measured."""
    attempts: int = 1
    started: float = Field(ge=0, lt=_YEAR_10000)
    """Unix seconds."""
    busy_before: float | None = None
    """Share of the processors that other programs used right before."""
    wall_seconds: float | None = None
    """With starting and ending the processes."""
    log_tail: list[str] = []
    """The last lines of the log of a failed repeat."""
    measured: Measurement | None = None

    @model_validator(mode="after")
    def _ok_has_measured(self) -> Self:
        if self.status == "ok" and self.measured is None:
            raise ValueError("a successful repeat has no figures")
        return self


class CellResult(Record):
    """All results of a cell."""

    schema_version: Literal[1] = 1
    suite: str
    cell: Cell
    key: FileName
    """Of the cell, how it was measured, and the environment."""
    environment_id: str
    environment: dict[str, Any]
    """Hardware and software that the result depends on."""
    settings: dict[str, Any]
    """How it was measured: steps, data, the suite's keys of the config."""
    repeats: list[Repeat] = Field(min_length=1)

    @property
    def conditions(self) -> str:
        """A short name for the environment and the measurement: only results with equal names may be compared."""
        return conditions_of(self.environment, self.settings)

    @property
    def known_conditions(self) -> dict[str, Any]:
        """The conditions as dotted keys and values; for accelerators only their names."""
        known = dict(flattened({**self.environment, **_how(self.settings)}))
        accelerators = known.get("hardware.accelerators") or []
        return {**known, "hardware.accelerators": [device.get("name") for device in accelerators]}

    @property
    def measured(self) -> list[Measurement]:
        """The successful repeats."""
        return [repeat.measured for repeat in self.repeats if repeat.measured is not None]

    @property
    def last_failure(self) -> Repeat | None:
        """The newest repeat that failed."""
        failures = (repeat for repeat in self.repeats if repeat.status != "ok")
        return max(failures, key=lambda repeat: repeat.started, default=None)

    @property
    def repeats_asked(self) -> int:
        """The number of repeats that the suite wants; the number present if unknown."""
        asked = self.settings.get("repeats")
        return asked if isinstance(asked, int) and asked > 0 else len(self.repeats)

    @property
    def odd_endings(self) -> list[str]:
        """How processes ended that measured successfully but then failed."""
        return list(dict.fromkeys(r.reason for r in self.repeats if r.status == "ok" and r.reason))

    @property
    def skipped_steps(self) -> int:
        """Measured steps without an update, over all repeats."""
        return sum(found.skipped_steps or 0 for found in self.measured)

    @property
    def status(self) -> Status:
        """`ok` if there is something to compare, otherwise why not."""
        failure = self.last_failure
        return "ok" if self.measured or failure is None else failure.status

    @property
    def doubt(self) -> str | None:
        """Why its speed is not that of training, although it succeeded; None if it is."""
        if any(found.mean_loss is None for found in self.measured):
            return "its loss is not finite"
        skipped = self.skipped_steps
        steps = sum(len(found.step_seconds) for found in self.measured)
        return f"{skipped} of {counted(steps, 'measured step')} made no update" if skipped else None

    @property
    def started(self) -> float:
        """Start of its newest repeat."""
        return max(repeat.started for repeat in self.repeats)

    @property
    def workers_per_machine(self) -> int | None:
        """Workers of each machine, if the suite compares numbers of machines; None if it compares those of workers."""
        return self.cell.workers // self.cell.machines if "machines" in self.settings else None

    def is_done(self, repeats: int) -> bool:
        """Return whether nothing is left to measure: all repeats exist, or failures are conclusive."""
        if any(repeat.status in FINAL for repeat in self.repeats):
            return True
        return len(self.repeats) >= (repeats if self.measured else min(repeats, _GIVEN_UP))

    @property
    def file_name(self) -> str:
        """Name of its file in the folder of results."""
        return f"{self.cell.name}-{self.key[:8]}.json"


def conditions_of(environment: dict[str, Any], settings: dict[str, Any]) -> str:
    """Return a short name for conditions, as `CellResult.conditions`."""
    return fingerprint({"environment": environment, "how": _how(settings)})[:8]


def _how(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in ("description", "faults", "repeats")}


def write_result(folder: Path, result: CellResult) -> Path:
    """Write or replace a result atomically."""
    path = folder / CELLS / result.file_name
    write_json(path, result.model_dump(mode="json"))
    return path


def parse_result(value: Any, where: str) -> CellResult:
    """Parse a result from JSON.

    Raises:
        DataError: it is not a result, or of another version.
    """
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise DataError(
            f"a benchmark result of version {version} cannot be read; this Headway knows {SCHEMA_VERSION}",
            where=where,
            fix="measure into another folder, or read it with the version that has written it",
        )
    try:
        return CellResult.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise DataError(
            f"not a benchmark result: {key}: {first['msg']}", where=where, fix="remove it, and measure again"
        ) from None


def read_results(folder: Path, below: str = CELLS) -> list[CellResult]:
    """Read all results of a folder, by name; none if there is no such folder.

    Raises:
        DataError: a file is not a result.
    """
    results = []
    for path in sorted((folder / below).glob("*.json")):
        try:
            value = read_json(path)
        except OSError as error:
            raise DataError(
                f"the result cannot be read: {error.strerror}", where=str(path), fix="remove it, and measure again"
            ) from None
        except ValueError as error:
            what = f"the result {error}"
            raise DataError(what, where=str(path), fix="remove the file, and measure again") from None
        results.append(parse_result(value, str(path)))
    return results


def authority(repeat: Repeat) -> int:
    """Rank a worker's report on a repeat: a worker that has lost a peer reports only that."""
    if repeat.status == "ok":
        return 3
    return 2 if repeat.status == "killed" else 1 if repeat.status in FINAL else 0


def merge_results(results: Iterable[CellResult]) -> list[CellResult]:
    """Merge results so that each cell appears once: repeats of one cell and environment, the newest of each number."""
    merged: dict[str, CellResult] = {}
    for result in results:
        before = merged.get(result.key)
        merged[result.key] = result if before is None else _together(before, result)
    return sorted(merged.values(), key=_place)


def strategy_place(name: str) -> tuple[int, str]:
    """Return the position in the order of the config's reference; strategies of other versions come last."""
    return list(STRATEGIES).index(name) if name in STRATEGIES else len(STRATEGIES), name


def model_place(name: str) -> tuple[float, str]:
    """Return the position by size, as far as the name shows it: "117m" before "1b"; others come last."""
    found = _SIZE.match(name)
    return (float(found[1]) * 1000 ** "kmbt".index(found[2].lower()) if found else math.inf), name


def _place(result: CellResult) -> tuple[Any, ...]:
    """Return the position in a table: small cells first."""
    cell = result.cell
    return (
        cell.workers,
        cell.scaling == "strong",
        strategy_place(cell.strategy),
        model_place(cell.model),
        cell.name,
        result.key,
    )


def _together(first: CellResult, second: CellResult) -> CellResult:
    """Merge all repeats, under the description and the number of repeats of the newest result."""
    by_number = {repeat.number: repeat for repeat in first.repeats}
    for repeat in second.repeats:
        before = by_number.get(repeat.number)
        # A worker's own report comes before that of its launcher, which knows less. Among reports of equal rank, the
        # worker that met the error reports first.
        if before is None or _order(repeat) > _order(before):
            by_number[repeat.number] = repeat
    newest = max(first, second, key=lambda result: result.started)
    return newest.model_copy(update={"repeats": [by_number[number] for number in sorted(by_number)]})


def _order(repeat: Repeat) -> tuple[float, bool, int]:
    """Rank reports on a repeat: newer ones, and among equal ones those that say most."""
    return repeat.started, repeat.wall_seconds is not None, authority(repeat)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a result."""
    found = CellResult.model_json_schema()
    models = (CellResult, Repeat, Measurement, Communication, Energy, Cell)
    for model in models:
        described = found if model is CellResult else found["$defs"][model.__name__]
        for name, text in descriptions(model).items():
            described["properties"][name]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
