"""`metrics.jsonl`: one JSON object per line, written during a run, read back as one consistent history.

A record holds `step` (completed optimizer steps: 1 after the first), `attempt`, `time` (Unix seconds) and any number of
named values. A step may have more than one record (an evaluation comes after the step's own); their values add up.

An attempt that died may have recorded steps after the checkpoint from which the next attempt resumes. Only the history
that led to the newest weights counts. So when an attempt's first record is for step N, everything that earlier attempts
recorded for step N and later is superseded. This also holds when an attempt rolls back: its next record is of an
earlier step, or it leaves out the very step that it recorded last. A record of an event after a step (an evaluation,
the outcome of a save) supersedes only later steps, not that step. A worker of an abandoned attempt may wake up and
write: records of an attempt after those of a later one do not count.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headway.core.arrays import Floats, Ints
from headway.core.console import notice, warning
from headway.core.errors import CheckpointError, ConfigError, fix_for, needing
from headway.core.files.atomic import ends_with_newline
from headway.core.files.foreign import as_number, open_regular, parse_json_lines, read_end, read_json_lines
from headway.core.files.reserve import take_reserve, write_with_reserve
from headway.core.files.timeout_writer import TimeoutWriter
from headway.telemetry.plot import Plot

if TYPE_CHECKING:
    from pandas import DataFrame


FILE_NAME = "metrics.jsonl"
#: The number of steps left out so far; in the only record that a left-out step has of its own.
LEFT_OUT = "train/left_out_steps"
#: 1, in the records of steps that had no target; such a record has no loss and no gradient norm.
WITHOUT_TARGET = "train/steps_without_target"
#: Seconds by which the wall clock was set forward since the last reading; negative if back.
CLOCK_JUMP = "health/clock_jump_seconds"

#: A record with only these is not the step's own: it was written at a step that may be another attempt's.
_NOT_OWN = ("checkpoint/", "evaluation/")
NO_VALUES = frozenset(("step", "attempt", "time"))

# JSON has no such numbers. The words are those of the Protocol Buffers JSON mapping, and float() reads them.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_WORDS = {str(value): word for word, value in _NOT_FINITE.items()}

#: How long a disk may take for a record before a warning; while it writes a checkpoint, seconds are normal.
_SILENT_SECONDS = 10.0
_NO_ANSWER = "the disk does not answer"

#: Size of several hundred records.
_TAIL_BYTES = 256 * 1024


class MetricsLog:
    """Appends records, each at once to the operating system: a killed process loses at most a record that it had begun.

    On a full disk the reserve of the run directory is used up first. Then, and while a disk hangs, records wait in
    memory. Training continues without checkpoints, and must neither end for lack of metrics nor wait for them.

    Args:
        path: The file; created with its folder if it does not exist, continued otherwise.
        attempt: Number of the attempt that writes.
        may_write: Called before each record, on the thread that writes; raises an error when nothing more may be
            recorded.

    Raises:
        CheckpointError: the file cannot be opened.
    """

    def __init__(self, path: Path, attempt: int, may_write: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._attempt = attempt
        self._may_write = may_write
        self._waiting: deque[bytes] = deque()
        self._trouble: str | None = None
        self._error: str | None = None
        self._refusal: CheckpointError | None = None
        self._closed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_regular(path, "ab")
            if path.stat().st_size and not ends_with_newline(path):
                self._file.write(b"\n")  # the previous attempt was killed in mid-line
        except OSError as error:
            raise CheckpointError(
                f"metrics cannot be written: {error.strerror or error}",
                where=str(path),
                fix=fix_for(
                    error, "free some disk space, check the folder's permissions, and run the same command again"
                ),
            ) from error
        self._writer = TimeoutWriter()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of one step. Floats are written with all their digits; NaN and infinities as words.

        Raises:
            CheckpointError: `may_write` forbids this record, or has forbidden an earlier one.
        """
        self._add(step, values)
        self._check(self._writer(self._write_all))

    def begin(self, step: int, values: Mapping[str, float]) -> None:
        """Record values without waiting; the next record, or `settle`, reports errors."""
        self._add(step, values)
        self._check(self._writer.begin(self._write_all))

    def settle(self) -> None:
        """Wait until all records are written.

        Raises:
            CheckpointError: as `write`.
        """
        self._check(self._writer(self._write_all))

    def restore_reserve(self) -> None:
        """Allocate the reserve again if it was used up and there is room now."""
        self._writer(partial(take_reserve, self._path.parent))

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        record: dict[str, Any] = {"step": step, "attempt": self._attempt, "time": round(time.time(), 3)}
        for name, value in values.items():
            record[name] = value if math.isfinite(value) else _WORDS[str(value)]
        self._waiting.append(json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n")

    def _check(self, done: bool) -> None:
        if self._refusal is not None:
            raise self._refusal
        if done:
            self._report(self._error)
        elif self._writer.late_seconds >= _SILENT_SECONDS:
            self._report(_NO_ANSWER)

    def _report(self, trouble: str | None) -> None:
        """Report whether writing works, if that has changed."""
        if trouble is not None and self._trouble is None:
            warning(f"metrics cannot be written ({trouble}): they are kept in memory, and tried again")
        elif trouble is None and self._trouble is not None:
            notice(f"metrics are written again: {self._path}")
        self._trouble = trouble

    def _write_all(self) -> None:
        """Write the waiting records. No other thread removes any."""
        self._error = None
        try:
            write_with_reserve(self._path.parent, self._write_waiting)
        except CheckpointError as error:
            self._refusal = error
        except OSError as error:
            self._error = error.strerror or str(error)

    def _write_waiting(self) -> None:
        while self._waiting and self._refusal is None:
            self._may_write()
            written = self._file.write(self._waiting[0])
            rest = self._waiting.popleft()[written:]
            if rest:  # the disk has become full in mid-line
                self._waiting.appendleft(rest)

    def _finish(self) -> None:
        self._write_all()
        self._file.close()

    def close(self) -> None:
        """Close the file. Further calls have no effect."""
        if self._closed:
            return
        self._closed = True
        finished = self._writer.end(self._finish)
        if self._refusal is not None:  # already reported
            return
        if finished:
            self._report(self._error)
        else:
            self._trouble = _NO_ANSWER
        if missing := len(self._waiting):
            what = "1 record is" if missing == 1 else f"{missing:,} records are"
            warning(f"{what} missing in {self._path}: {self._trouble}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def place_of(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return step and attempt of a record; None if it is no record of a step."""
    step = record.get("step")
    attempt = record.get("attempt", 0)
    if not isinstance(step, int) or not isinstance(attempt, int) or not (0 <= step < 2**63 and 0 <= attempt < 2**63):
        return None
    return step, attempt


def is_own(record: Mapping[str, Any]) -> bool:
    """Return whether a record is of a step itself, not only of an event after it."""
    return any(name not in NO_VALUES and not name.startswith(_NOT_OWN) for name in record)


def recorded_number(value: Any) -> float | None:
    """Return a recorded value as a float; None if it is not a number."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    return as_number(value)


class _Column:
    """Values of one name by rising step, in arrays: a history of millions of dicts would not fit in memory."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def put(self, step: int, value: float) -> None:
        if self.steps and self.steps[-1] == step:
            self.values[-1] = value
        else:
            self.steps.append(step)
            self.values.append(value)

    def drop_from(self, step: int) -> int:
        """Remove this step and later ones; return the number of removed values."""
        start = bisect_left(self.steps, step)
        dropped = len(self.steps) - start
        del self.steps[start:], self.values[start:]
        return dropped


@dataclass
class Span:
    """The records of one attempt, superseded steps included."""

    first_step: int
    """The first step that it did itself; one more than the last if it did none."""
    last_step: int
    first_time: float | None
    last_time: float | None
    clock_jumped: float = 0.0
    """Seconds by which the wall clock was seen to be set forward meanwhile; negative if back."""


class Metrics:
    """The history that counts, by columns."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {"attempt": _Column()}
        self._step = -1
        self._attempt = -1
        self.spans: dict[int, Span] = {}
        """By attempt number."""
        self.repeated_steps = 0
        """Steps that had to be repeated after a restart."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the next record of the file; skip it if it is not a record of a step."""
        place = place_of(record)
        if place is None or place[1] < self._attempt:
            return
        step, attempt = place
        # A rollback to just before a bad step continues with that step, which is now left out.
        goes_back = step < self._step or (step == self._step and LEFT_OUT in record)
        if attempt != self._attempt or goes_back:
            self._restart_at(step if is_own(record) else step + 1, attempt)
        self._step = step
        self._attempt = attempt
        for name, value in record.items():
            # Nearly all values are plain floats, and histories are long.
            number = value if type(value) is float else recorded_number(value)
            if number is not None and name not in ("step", "attempt"):
                column = self._columns.get(name)
                if column is None:
                    column = self._columns[name] = _Column()
                column.put(step, number)
        done = self._columns["attempt"]
        if not done.steps or done.steps[-1] != step:  # otherwise the step remains that of the attempt that did it
            done.put(step, attempt)
        span = self.spans[attempt]
        moment = recorded_number(record.get("time"))
        span.first_time = moment if span.first_time is None else span.first_time
        span.last_step = step
        span.last_time = moment
        jump = recorded_number(record.get(CLOCK_JUMP)) if CLOCK_JUMP in record else None
        if jump is not None and math.isfinite(jump):
            span.clock_jumped += jump

    def _restart_at(self, step: int, attempt: int) -> None:
        """Start the history of an attempt at this step: it supersedes all later records."""
        self.repeated_steps += self._columns["attempt"].drop_from(step)
        for known in self._columns.values():
            known.drop_from(step)
        span = self.spans.setdefault(attempt, Span(step, step - 1, None, None))
        span.first_step = min(span.first_step, step)  # a rollback may lead to before its first step

    def drop_after(self, step: int) -> None:
        """Remove the records of all later steps."""
        for known in self._columns.values():
            known.drop_from(step + 1)

    @property
    def size(self) -> int:
        """Number of values."""
        return sum(len(column.steps) for column in self._columns.values())

    @property
    def names(self) -> list[str]:
        """Names that have at least one value."""
        return sorted(name for name, column in self._columns.items() if column.steps)

    @property
    def last_step(self) -> int:
        """The newest step with a record; 0 when there is none."""
        steps = self._columns["attempt"].steps
        return steps[-1] if steps else 0

    def series(self, name: str) -> tuple[Ints, Floats]:
        """Return steps (rising, each once) and values of one name, both of shape `(points,)`; empty if unknown."""
        column = self._columns.get(name) or _Column()
        return np.array(column.steps, dtype=np.int64), np.array(column.values, dtype=np.float64)

    def finite(self, name: str) -> tuple[Ints, Floats]:
        """Return `series` without NaN and infinite values."""
        steps, values = self.series(name)
        keep = np.isfinite(values)
        return steps[keep], values[keep]

    def not_finite_since(self, name: str) -> int | None:
        """Return the step since which all values of one name are not finite; None if the newest is finite."""
        steps, values = self.series(name)
        finite = np.flatnonzero(np.isfinite(values))
        start = int(finite[-1]) + 1 if len(finite) else 0
        return int(steps[start]) if start < len(steps) else None

    def last(self, name: str) -> float | None:
        """Return the newest value of one name."""
        column = self._columns.get(name)
        return column.values[-1] if column and column.values else None

    def to_pandas(self) -> DataFrame:
        """Return the history that counts as a table: a row for each step, a column for each metric, NaN where there is
        no value.

        Raises:
            ConfigError: pandas is not installed.
        """
        with needing("pandas", "pandas", "A table of metrics"):
            import pandas
        columns = {name: pandas.Series(column.values, column.steps) for name, column in self._columns.items()}
        table = pandas.DataFrame({name: columns[name] for name in self.names}).rename_axis("step")
        return table.sort_index()

    def plot(self, *names: str) -> Plot:
        """Return the curves of some metrics by step, for a notebook to show; `.save("loss.svg")` writes them.

        Raises:
            ConfigError: nothing is recorded under a name, or none is given.
        """
        known = [name for name in self.names if name not in NO_VALUES]
        for name in names or ("",):
            if name not in known:
                near = get_close_matches(name, known) or known[:5]
                raise ConfigError(f"nothing is recorded under '{name}'", fix=f"for example {', '.join(near)}")
        return Plot({name: self.finite(name) for name in names})


def read_metrics(run_dir: Path, *, newest: bool = False) -> Metrics:
    """Read the history of a run directory; empty if nothing was recorded yet, or it cannot be read.

    Args:
        run_dir: The run directory.
        newest: Read the last few hundred records only, which is quick for any length.
    """
    metrics = Metrics()
    for record in read_records(run_dir, newest=newest):
        metrics.add(record)
    return metrics


def read_records(run_dir: Path, *, newest: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the records as they were written, superseded ones included; none if they cannot be read."""
    path = run_dir / FILE_NAME
    with suppress(OSError):
        yield from parse_json_lines(read_end(path, _TAIL_BYTES)[0].splitlines()) if newest else read_json_lines(path)
