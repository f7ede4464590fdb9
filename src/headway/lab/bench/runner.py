"""Execution of a matrix: every measurement runs in fresh processes, and every outcome is a result."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import filterfalse
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from headway.core.console import notice, say
from headway.core.coordination.train_command import check_not_a_worker
from headway.core.errors import ConfigError, HeadwayError, Preempted
from headway.core.files.atomic import write_json
from headway.core.format import counted, format_bytes, format_count, format_seconds
from headway.core.process.faults import FAULTS_VARIABLE, RESTARTS_VARIABLE
from headway.core.process.signals import TERMINATION_SIGNALS, handled
from headway.lab.bench.blocks import MARKER, block, find_blocks
from headway.lab.bench.environment import describe_environment, environment_id
from headway.lab.bench.launchers import LOCAL, launch_command, lead_file, run_command
from headway.lab.bench.machines import SuiteMachines
from headway.lab.bench.matrix import PlannedCell, plan_matrix, rows_for_workers, unused_patterns
from headway.lab.bench.results import (
    CELLS,
    DISCARDED,
    EARLIER,
    FINAL,
    LOGS,
    CellResult,
    Repeat,
    authority,
    conditions_of,
    merge_results,
    read_results,
    write_result,
)
from headway.lab.bench.spec import Spec
from headway.lab.bench.suite import Cell, Suite
from headway.run.supervisor.watchdog import in_words

_LOOK_SECONDS = 0.5
_TAIL_LINES = 20
_TAIL_CHARACTERS = 4000
#: torchrun's message about a worker that a signal has ended.
_TORCHRUN_SIGNAL = re.compile(r"rank\s*: (\d+)[^\n]*\n\s*exitcode\s*: -(\d+)")


@dataclass(frozen=True)
class MeasureOptions:
    """What to do about existing results."""

    again: bool = False
    """Measure everything anew."""
    failed_again: bool = False
    """Measure failed cells anew."""

    def renews(self, repeat: Repeat) -> bool:
        """Return whether a repeat is to be measured anew."""
        return self.again or (self.failed_again and repeat.status != "ok")


@dataclass
class Matrix:
    """A suite in progress: the plan, and the results so far."""

    suite: Suite
    folder: Path
    launcher: str
    environment: dict[str, Any]
    cells: list[PlannedCell]
    results: dict[str, CellResult] = field(default_factory=dict)
    """Results by key."""
    discarded: list[CellResult] = field(default_factory=list)
    """Existing repeats that are to be measured anew."""
    machines: SuiteMachines | None = None
    """The machines that measure with this one."""


def parse_part(text: str) -> tuple[int, int]:
    """Parse K/N, the K-th of N parts of a matrix.

    Raises:
        ConfigError: it is none.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"'{text}' is no part", where="--part", fix="--part 1/4, up to --part 4/4")
    return int(number), int(count)


def open_matrix(
    suite: Suite,
    folder: Path,
    launcher: str = LOCAL,
    measure_options: MeasureOptions = MeasureOptions(),
    part: tuple[int, int] = (1, 1),
    *,
    machines: SuiteMachines | None = None,
) -> Matrix:
    """Plan a suite and load the results of earlier runs. Nothing is written.

    Args:
        suite: The suite.
        folder: Its folder of results.
        launcher: What starts the workers of a cell.
        measure_options: What to do about existing results.
        part: Take the first of so many parts of the cells, or another one: every N-th cell, so that parts take about
            as long as each other.
        machines: The machines that measure with this one.

    Raises:
        ConfigError: the suite's config is wrong, there is no such launcher, or this process was started as one of
            several workers.
    """
    check_not_a_worker("bench")  # cells would be checked, and worked on, as parts of that
    launch_command(launcher, Path("spec.json"), max(suite.workers), max(suite.machines))
    environment = describe_environment(launcher)
    number, count = part
    cells = plan_matrix(suite, environment)[number - 1 :: count]
    if not cells:
        raise ConfigError(f"part {number} of {count} has no cell", where="--part", fix="take fewer parts")
    for text in unused_patterns(suite):
        notice(text)
    matrix = Matrix(suite, folder, launcher, environment, cells, machines=machines)
    keys = {planned.key for planned in cells}
    for result in merge_results([*read_results(folder), *read_results(folder, EARLIER)]):
        if result.key not in keys:
            continue
        if stays := list(filterfalse(measure_options.renews, result.repeats)):
            matrix.results[result.key] = result.model_copy(update={"repeats": stays})
        if anew := list(filter(measure_options.renews, result.repeats)):
            matrix.discarded.append(result.model_copy(update={"repeats": anew}))
    return matrix


def to_do(matrix: Matrix) -> list[tuple[int, PlannedCell]]:
    """Return the missing measurements in order: the first repeat of all cells, then the second of all."""
    missing = []
    for number in range(1, matrix.suite.repeats + 1):
        for planned in matrix.cells:
            result = matrix.results.get(planned.key)
            numbers = {repeat.number for repeat in result.repeats} if result else set()
            if number not in numbers and not (result and result.is_done(matrix.suite.repeats)):
                missing.append((number, planned))
    return missing


def run_matrix(matrix: Matrix, *, print_results: bool = False) -> list[CellResult]:
    """Measure what is missing.

    Args:
        print_results: Also print every result for the log of a pod (`blocks`), those that are there already first:
            the log of an earlier pod may be gone with it.

    Raises:
        ConfigError: another process uses the folder.
    """
    with _owned(matrix.folder):
        _set_aside_others(matrix)
        missing = to_do(matrix)
        done = len(matrix.cells) * matrix.suite.repeats - len(missing)
        if done:
            notice(f"{done} of {len(matrix.cells) * matrix.suite.repeats} measurements are there already")
        for there in matrix.results.values():
            _hand_on(matrix, there, print_results)
        for place, (number, planned) in enumerate(missing, 1):
            result = matrix.results.get(planned.key)
            if result is not None and result.is_done(matrix.suite.repeats):
                continue  # what came of earlier repeats of it says enough
            repeat = _measure(matrix, planned, number)
            result = _result(matrix, planned, [*(result.repeats if result else ()), repeat])
            matrix.results[planned.key] = result
            write_result(matrix.folder, result)
            notice(f"[{place}/{len(missing)}] {planned.cell.name}: {_in_words(repeat, matrix.suite.repeats)}")
            _hand_on(matrix, result, print_results)
    return [matrix.results[planned.key] for planned in matrix.cells]


def _hand_on(matrix: Matrix, result: CellResult, print_results: bool) -> None:
    if print_results:
        say(block(result.model_dump(mode="json")))
    if matrix.machines is not None:
        matrix.machines.keep(result)


def _result(matrix: Matrix, planned: PlannedCell, repeats: Sequence[Repeat]) -> CellResult:
    return CellResult(
        suite=matrix.suite.name,
        cell=planned.cell,
        key=planned.key,
        environment_id=environment_id(matrix.environment),
        environment=matrix.environment,
        settings=_settings(matrix.suite, planned.cell, planned.faults),
        repeats=list(repeats),
    )


def _settings(suite: Suite, cell: Cell, faults: str) -> dict[str, Any]:
    """Return how a cell is measured."""
    keys = (
        "description",
        "data",
        "vocab_size",
        "micro_batches",
        "warmup_steps",
        "steps",
        "profiled_steps",
        "repeats",
        "seed",
        "config",
    )
    rows = rows_for_workers(suite, cell.scaling)
    settings = {**{key: getattr(suite, key) for key in keys}, "rows_for_workers": rows, "faults": faults}
    return settings if suite.machines == [1] else {**settings, "machines": suite.machines}


def _in_words(repeat: Repeat, repeats: int) -> str:
    found = repeat.measured
    if found is None:
        return f"{repeat.status.replace('_', ' ')}: {repeat.reason}"
    memory = format_bytes(found.peak_memory_bytes)
    speed = f"{format_count(found.tokens_per_second)} tokens/s, {found.p50_step_seconds * 1000:,.0f} ms per step"
    return f"{speed}, {memory} (repeat {repeat.number} of {repeats}, {format_seconds(repeat.wall_seconds)})"


# One measurement ------------------------------------------------------------------------------------------------------


def _measure(matrix: Matrix, planned: PlannedCell, number: int) -> Repeat:
    """Measure one repeat of a cell, with as many retries as the suite allows."""
    now = time.time()
    if planned.excluded is not None:
        return Repeat(number=number, status="excluded", reason=planned.excluded, started=now)
    if planned.config is None:
        return Repeat(number=number, status="refused", reason=planned.refused, started=now)
    for attempt in range(1, matrix.suite.retries + 2):
        repeat = _attempt(matrix, planned, number, attempt)
        if repeat.status in ("ok", *FINAL):
            break
        if attempt <= matrix.suite.retries:
            notice(f"{planned.cell.name}: {repeat.status}: {repeat.reason}; once more")
    return repeat


def _attempt(matrix: Matrix, planned: PlannedCell, number: int, attempt: int) -> Repeat:
    suite = matrix.suite
    config = planned.config
    assert config is not None
    busy = round(psutil.cpu_percent(_LOOK_SECONDS) / 100, 3)  # nothing of this matrix is running
    started = round(time.time(), 3)
    begun = Repeat(number=number, status="failed", attempts=attempt, started=started, busy_before=busy)
    base = matrix.folder / LOGS / f"{planned.cell.name}-{planned.key[:8]}.r{number}.a{attempt}"
    spec_path = base.with_name(base.name + ".json")
    log_path = base.with_name(base.name + ".log")
    spec = Spec(
        _result(matrix, planned, [begun]),
        config,
        suite.data,
        suite.vocab_size,
        suite.warmup_steps,
        suite.steps,
        suite.profiled_steps,
    )
    write_json(spec_path, spec.dump())
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", RESTARTS_VARIABLE: str(attempt - 1)}
    environment[FAULTS_VARIABLE] = planned.faults
    command = launch_command(matrix.launcher, spec_path, planned.cell.workers, planned.cell.machines)
    lead_file(spec_path).unlink(missing_ok=True)  # of an attempt that was killed
    start = time.monotonic()
    try:
        with log_path.open("wb") as log:
            if matrix.machines is None:
                code = run_command(command, environment, log, suite.timeout_seconds)
            else:
                code = matrix.machines.run(spec_path, environment, log, suite.timeout_seconds)
    finally:
        spec_path.unlink()
        lead_file(spec_path).unlink(missing_ok=True)
    wall_seconds = round(time.monotonic() - start, 3)
    end = _ending(begun, code, log_path.read_text(encoding="utf-8", errors="replace"), suite.timeout_seconds)
    end = end.model_copy(update={"wall_seconds": wall_seconds})
    # Workers do not know everything: one that took too long or was killed has reported nothing.
    with log_path.open("a", encoding="utf-8") as log:
        log.write(f"\n{block(_result(matrix, planned, [end]).model_dump(mode='json'))}\n")
    return end


def _ending(begun: Repeat, code: int | None, log: str, timeout_seconds: int) -> Repeat:
    """Return the outcome of an attempt, from its exit code and its log."""
    told = [CellResult.model_validate(value).repeats[0] for value in find_blocks(log.splitlines()).values]
    told = [repeat for repeat in told if (repeat.number, repeat.started) == (begun.number, begun.started)]
    good = next((repeat for repeat in told if repeat.status == "ok"), None)
    if good is not None:
        reason = None if code == 0 else f"measured, and then ended with {_code_in_words(code)}"
        return good.model_copy(update={"reason": reason})
    final = next((repeat for repeat in told if repeat.status in FINAL), None)
    if code is None and final is not None:
        end = final  # the others waited for the worker or machine that cannot run
    elif code is None:
        end = begun.model_copy(update={"status": "timeout", "reason": f"not done after {timeout_seconds} s"})
    else:
        end = _failure(begun, code, log, told)
    return end.model_copy(update={"log_tail": _tail(log)})


def _failure(begun: Repeat, code: int, log: str, told: Sequence[Repeat]) -> Repeat:
    # The worker that met the error reports first; the others lose a peer.
    first = max(told, key=authority, default=None)
    # The agent itself ends the others by SIGTERM.
    signalled = [(rank, number) for rank, number in _TORCHRUN_SIGNAL.findall(log) if number != "15"]
    if signalled and (first is None or first.status == "failed"):
        reason = "worker {} died (signal {})".format(*signalled[0])
        return begun.model_copy(update={"status": "killed", "reason": reason})
    if first is not None:
        return first
    status = "killed" if code < 0 else "failed"
    return begun.model_copy(update={"status": status, "reason": f"ended with {_code_in_words(code)}"})


def _code_in_words(code: int | None) -> str:
    return "no exit code" if code is None else in_words(code)


def _tail(log: str) -> list[str]:
    lines = [line for line in log.splitlines() if line.strip() and MARKER not in line][-_TAIL_LINES:]
    while sum(map(len, lines)) > _TAIL_CHARACTERS and len(lines) > 1:
        lines.pop(0)
    return [line[:_TAIL_CHARACTERS] for line in lines]


@contextmanager
def stoppable(measure_options: MeasureOptions) -> Iterator[None]:
    """End cleanly on a stop signal: end the running measurement, and keep the finished ones."""
    option = "--again" if measure_options.again else "--failed-again" if measure_options.failed_again else None
    fix = "run the same command again" + (f", without {option}" if option else "")

    def stop(number: int, frame: FrameType | None) -> None:
        raise Preempted(f"stopped by {signal.Signals(number).name}; what is measured is kept", fix=fix)

    with handled(TERMINATION_SIGNALS, stop):
        yield


# The folder -----------------------------------------------------------------------------------------------------------


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Lock the folder: two measuring processes would spoil each other's figures and files."""
    import fcntl

    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise HeadwayError(
                "another process measures into this folder", where=str(folder), fix="wait for it, or choose --output"
            ) from None
        yield


def _set_aside_others(matrix: Matrix) -> None:
    """Keep only results in the folder that may be compared, one for each cell.

    Others are put aside, out of the report's way, and come back when they match again. Results of cells that this
    matrix does not have stay. Results that are to be measured anew never come back.
    """
    for result in matrix.discarded:
        _discard(matrix.folder, result, matrix.results.get(result.key))
    kept = {result.file_name for result in matrix.results.values()}
    names = {planned.cell.name for planned in matrix.cells}
    settings = _settings(matrix.suite, matrix.cells[0].cell, "")
    rows = {planned.cell.scaling: rows_for_workers(matrix.suite, planned.cell.scaling) for planned in matrix.cells}
    aside = 0
    for result in read_results(matrix.folder):
        # Strong cells share a step's rows with this matrix's; without such cells here, with each other.
        shared = rows.get(result.cell.scaling, result.settings.get("rows_for_workers"))
        wanted = conditions_of(matrix.environment, {**settings, "rows_for_workers": shared})
        fits = result.conditions == wanted and result.cell.name not in names
        if result.file_name not in kept and not fits:
            _put(matrix.folder, result, EARLIER)
            (matrix.folder / CELLS / result.file_name).unlink()
            aside += 1
    for result in matrix.results.values():
        write_result(matrix.folder, result)
    if aside:
        notice(f"{aside} results that were measured otherwise are kept in {matrix.folder / EARLIER}")
    if matrix.discarded:
        cells = counted(len(matrix.discarded), "cell")
        notice(f"{cells} to be measured anew; what was there is in {matrix.folder / DISCARDED}")


def _discard(folder: Path, result: CellResult, kept: CellResult | None) -> None:
    """Put repeats aside, with their part of the logs; others of the same cell stay."""
    _put(folder, result, DISCARDED, {repeat.number for repeat in kept.repeats} if kept else frozenset())
    if kept is not None:
        write_result(folder, kept)
    else:
        (folder / CELLS / result.file_name).unlink(missing_ok=True)
    (folder / EARLIER / result.file_name).unlink(missing_ok=True)


def _put(folder: Path, result: CellResult, target: str, kept: Collection[int] = ()) -> None:
    """Write a result into another folder, and move the logs of its cell there, except those of some repeats."""
    write_json(folder / target / result.file_name, result.model_dump(mode="json"))
    logs = folder / target / LOGS
    logs.mkdir(exist_ok=True)
    stem = result.file_name.removesuffix(".json")
    for source in (folder / LOGS, folder / EARLIER / LOGS):
        for path in source.glob(f"{stem}.r*.log"):
            if not any(path.name.startswith(f"{stem}.r{number}.") for number in kept):
                path.replace(logs / path.name)
