"""The contents of a run directory, whatever state the run is in.

Reading is tolerant: a file or a field that is missing or broken is unknown, never an error. The runs that are most
interesting to examine are those that died.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.config import Batches, BatchStage
from headway.config.loading.document import parse
from headway.config.loading.load import CONFIG_BYTES
from headway.config.sections.segments import Segment, batches_before, begin, up_to
from headway.core.coordination.lease import read_lease
from headway.core.coordination.outcomes import BUDGET_REACHED, CANCELLED, FAILED, FINISHED, PREEMPTED
from headway.core.credentials.secrets import redact_arguments, redact_values
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.foreign import (
    as_number,
    read_json_lines,
    read_json_or_empty,
    read_text,
)
from headway.core.machine.system import host_name
from headway.telemetry.metrics import FILE_NAME, Metrics, Span, read_metrics, read_records
from headway.telemetry.work import Work

RUNNING = "running"
DIED = "died"
#: The newest attempt restored an earlier checkpoint (`headway checkpoints restore`), and trained nothing.
RESTORED = "restored"

#: The newest attempt has no recorded end, ran on another host, and has no lease (`core.coordination.lease`), so its
#: state cannot be determined here.
NOT_ENDED = "not ended"

#: The run has no attempt, or only one that was refused before its first step: the config is wrong.
NOT_STARTED = "not started"

#: A study of `headway tune` is a folder with this file, and the runs of its trials are in a folder below it.
STUDY_FILE = "study.yaml"
STUDY_RUNS = "runs"

STATES = (RUNNING, FINISHED, PREEMPTED, BUDGET_REACHED, CANCELLED, FAILED, DIED, RESTORED, NOT_ENDED, NOT_STARTED)

#: The end of the year 9999 as Unix seconds, after which Python has no dates.
_LAST_MOMENT = 253_402_300_800


@dataclass(frozen=True)
class Attempt:
    """One start of a run. Times are Unix seconds."""

    number: int
    outcome: str
    """The outcome that the attempt recorded at its end; else `running`, `died` or `not ended`."""
    exit_code: int | None = None
    command: str | None = None
    host: str | None = None
    pid: int | None = None
    started: float | None = None
    ended: float | None = None
    """For an attempt that died: its last sign of life."""
    first_step: int | None = None
    last_step: int | None = None
    measured: float | None = None
    """Seconds that it ran, by a monotonic clock; None if it did not end by itself."""
    clock_jumped: float = 0.0
    """Seconds by which the wall clock was seen to be set forward meanwhile; negative if back."""

    @property
    def seconds(self) -> float | None:
        """How long it ran, up to its last sign of life if it has no recorded end, without jumps of the wall clock that
        the attempt saw."""
        if self.measured is not None:
            return self.measured
        if self.started is None or self.ended is None:
            return None
        return max(0.0, self.ended - self.started - self.clock_jumped)


@dataclass(frozen=True)
class Checkpoint:
    """One published checkpoint, from its manifest."""

    step: int
    time: float | None
    bytes: int | None
    attempt: int | None
    state_sha256: str | None


@dataclass(frozen=True)
class Run:
    """The contents of one run directory, each read when it is first needed."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.yaml`, without credentials that earlier versions may have left in it; empty if unreadable."""
        return dict(redact_values(_read_yaml(self.path / "config.yaml")))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """`run.json`, without credentials as well; empty when it cannot be read."""
        return dict(redact_values(read_json_or_empty(self.path / "run.json")))

    @property
    def metrics(self) -> Metrics:
        """The history that counts."""
        return self._history[0]

    @property
    def work(self) -> Work:
        """Work of every attempt, superseded steps included."""
        return self._history[1]

    @cached_property
    def _history(self) -> tuple[Metrics, Work]:
        return self._read_history()

    def pass_history_to(self, reader: Callable[[Mapping[str, Any]], None]) -> None:
        """Pass every record, as it was written, to a reader, and keep `metrics` and `work` from the same pass."""
        self.__dict__["_history"] = self._read_history(reader)  # as `cached_property` does

    def _read_history(self, *readers: Callable[[Mapping[str, Any]], None]) -> tuple[Metrics, Work]:
        metrics = Metrics()
        work = Work()
        for record in read_records(self.path):
            for read in (metrics.add, work.add, *readers):
                read(record)
        return self._shortened(metrics), work

    def newest_metrics(self) -> Metrics:
        """Read the last few hundred records only, which is quick for any length."""
        return self._shortened(read_metrics(self.path, newest=True))

    def _shortened(self, metrics: Metrics) -> Metrics:
        """Leave out steps that the run has been shortened by.

        No record supersedes those steps if an earlier attempt ended beyond the new end: the last one has none to do.
        """
        records = self.attempt_records
        total = self.total_steps
        last = max(records, default=None)
        if last is not None and last not in metrics.spans and records[last].get("outcome") == FINISHED and total:
            metrics.drop_after(total)
        return metrics

    @property
    def is_language_model(self) -> bool:
        """Whether the run trains the native decoder, which has a tokenizer; otherwise a module of the user's own, for
        which tokens, a preset and a perplexity mean nothing."""
        known = dig(self.facts, "fingerprints")
        return not isinstance(known, dict) or "data" not in known or "tokenizer" in known

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @cached_property
    def attempt_records(self) -> dict[int, dict[str, Any]]:
        """`attempt.json` by attempt number, rising."""
        folders = [path for path in (self.path / "attempts").glob("*") if path.name.isdigit()]
        in_order = sorted(folders, key=lambda path: int(path.name))
        return {int(path.name): read_json_or_empty(path / "attempt.json") for path in in_order}

    @cached_property
    def attempts(self) -> list[Attempt]:
        """Attempts by rising number."""
        return [
            _attempt(
                self.path,
                number,
                record,
                span=self.metrics.spans.get(number),
                newest=number == max(self.attempt_records),
            )
            for number, record in self.attempt_records.items()
        ]

    def has_done(self, attempt: int, step: int) -> bool:
        """Return whether an attempt is known to have done a step here; wherever a run is continued, numbers restart at
        1."""
        found = (one for one in self.attempts if one.number == attempt)
        return any(one.first_step is not None and one.first_step < step <= (one.last_step or 0) for one in found)

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """Checkpoints by rising step; their bytes are not verified."""
        manifests = sorted((self.path / "checkpoints").glob("step-*/manifest.json"))
        found = [_checkpoint(read_json_or_empty(path)) for path in manifests]
        return sorted((item for item in found if item is not None), key=lambda item: item.step)

    @property
    def outcome(self) -> str:
        """How the newest attempt ended, or that it has not ended."""
        number, record = newest_of(self.attempt_records)
        return attempt_outcome(self.path, number, record, newest=True) if number else NOT_STARTED

    @property
    def state(self) -> str:
        """The outcome in one or two words (`state_of`)."""
        return state_of(self.path, newest_of(self.attempt_records)[1], self.outcome)

    @cached_property
    def data_manifest(self) -> dict[str, Any]:
        """`manifest.json` of the token store; empty when the store is elsewhere or gone."""
        store = self.get("data.store")
        if not isinstance(store, str):
            return {}
        # A relative path is relative to the folder in which the run was started.
        started_in = self.facts.get("folder")
        folders = [Path(started_in)] if isinstance(started_in, str) else []
        manifests = (read_json_or_empty(folder / store / "manifest.json") for folder in [*folders, Path()])
        return next(filter(None, manifests), {})

    def get(self, key: str) -> Any:
        """Return a value of the config by its dotted key; None if it is absent."""
        return dig(self.config, *key.split("."))

    @property
    def step(self) -> int:
        """Finished steps."""
        return finished_steps(self.attempt_records, self.metrics)

    @property
    def total_steps(self) -> int | None:
        """The number of steps of the run."""
        return as_int(self.get("train.steps"))

    @property
    def batches(self) -> Batches | None:
        """The rows and tokens of every step."""
        rows = as_int(self.get("train.global_batch"))
        length = as_int(self.get("train.sequence_length"))
        if not (rows and length):
            return None
        try:
            stages = [BatchStage.model_validate(stage) for stage in self.get("train.batch_ramp") or []]
            before, begins = batches_before(self.segments) or (None, 0)
            return Batches.planned(stages, rows, length, before, begins)
        except (TypeError, ValueError):  # written by hand, or by a version that knew other keys
            return None

    @cached_property
    def segments(self) -> list[Segment]:
        """The segments of a run that was changed on the way; empty if it was not, or if they cannot be read."""
        try:
            return [Segment.model_validate(segment) for segment in self.get("segments") or []]
        except (TypeError, ValueError):
            return []

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens in one global batch, after the ramp if there was one."""
        return None if self.batches is None else self.batches.parts[-1][1] * self.batches.sequence_length

    @property
    def tokens(self) -> int | None:
        """Tokens that led to the newest weights: without steps that were repeated or left out."""
        batches = self.batches
        step = self.step
        if batches is None or not self.is_language_model:
            return None
        skipped = {n for first, last in self.skipped_ranges for n in range(first, min(last, step))}
        lost = sum(batches.tokens_before(n + 1) - batches.tokens_before(n) for n in skipped)
        return batches.tokens_before(step) - lost

    @cached_property
    def skipped_ranges(self) -> list[tuple[int, int]]:
        """Ranges of steps whose rows a decision left out, counted from 0: first step, and the one after the last."""
        found: list[tuple[int, int]] = []
        segments: list[Segment] = []
        for line in self._ledger():
            first = as_int(line.get("first_step"))
            last = as_int(line.get("last_step"))
            if line.get("action") == "rollback" and first is not None and last is not None:
                found.append((first, last))
            elif line.get("kind") == "segment":
                with suppress(ValueError):
                    segments, step = begin(segments, Segment.model_validate(line.get("segment")))
                    found = up_to(found, step)
        return found

    def _ledger(self) -> list[dict[str, Any]]:
        try:
            return list(read_json_lines(self.path / "ledger.jsonl"))
        except OSError:
            return []

    @property
    def vocab_size(self) -> int | None:
        """Tokens in the vocabulary, from the data's manifest or what the run recorded of its model."""
        recorded = dig(self.data_manifest, "tokenizer", "vocab_size"), dig(self.facts, "model", "vocab_size")
        return next((size for value in recorded if (size := as_int(value))), None)

    @property
    def seconds(self) -> float | None:
        """Time in which an attempt was running; the time between attempts does not count."""
        known = [attempt.seconds for attempt in self.attempts if attempt.seconds is not None]
        return sum(known) if known else None

    @property
    def updated(self) -> float | None:
        """Last sign of life."""
        times = [attempt.ended or attempt.started or 0.0 for attempt in self.attempts]
        return max(times, default=0.0) or None


def finished_steps(records: Mapping[int, Mapping[str, Any]], metrics: Metrics) -> int:
    """Return the steps of the newest state; after a manual restore, fewer than recorded until training continues."""
    for number in sorted(records, reverse=True):
        step = as_int(records[number].get("last_step"))
        if records[number].get("outcome") == RESTORED and step is not None:
            return step
        if number in metrics.spans:
            break
    return metrics.last_step


def open_run(path: Path) -> Run:
    """Read a run directory.

    Raises:
        CheckpointError: there is none at `path`.
    """
    if not is_run(path):
        what = "is not a run directory" if path.exists() else "does not exist"
        near = Path("runs") / path  # the run's name alone, where runs are by default
        raise CheckpointError(
            f"'{path}' {what}",
            where=str(path.absolute()),
            fix=f"did you mean {near}?" if is_run(near) else f"headway runs list {path.parent} shows the runs there",
        )
    return Run(path)


def check_runs_folder(path: Path) -> None:
    """Check that the folder that holds run directories is there.

    Raises:
        CheckpointError: it is not.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"there is no folder '{path}'",
            where=str(path.absolute()),
            fix="name the folder that holds the run directories (`runs` in the config)",
        )


def is_run(path: Path) -> bool:
    """Return whether a folder is a run directory (a token store, for example, has no `config.yaml`)."""
    try:
        return (path / "config.yaml").is_file() or (path / FILE_NAME).is_file()
    except OSError:  # a folder without permission
        return False


def stored_bytes(run: Path) -> int:
    """Return the size of the checkpoints that a run directory holds."""
    found = 0
    for file in (run / "checkpoints").glob("step-*/*"):
        with suppress(OSError):  # it may be deleted meanwhile
            found += file.stat().st_size
    return found


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        value = parse(read_text(path, CONFIG_BYTES), str(path)).plain()
    except (OSError, ValueError, ConfigError):
        return {}
    return value if isinstance(value, dict) else {}


def dig(value: Any, *keys: str) -> Any:
    """Return a value inside nested mappings; None if it is absent."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def as_int(value: Any) -> int | None:
    """Return a recorded integer; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_text(value: Any) -> str | None:
    """Return a recorded text, or a list of words as one line; None for anything else."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value if isinstance(value, str) else None


def as_time(value: Any) -> float | None:
    """Return a time as Unix seconds, from a number or an ISO 8601 text; None if it is neither."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
    moment = as_number(value)
    return moment if moment is not None and 0 <= moment < _LAST_MOMENT else None


def _command(text: str | None) -> str | None:
    """Return a command line without the credentials that earlier versions recorded."""
    try:
        words = shlex.split(text or "")
    except ValueError:
        return text
    shown = redact_arguments(words)
    return text if shown == words else shlex.join(shown)


def _attempt(run: Path, number: int, record: dict[str, Any], *, span: Span | None, newest: bool) -> Attempt:
    ended = as_time(record.get("ended"))
    first = as_int(record.get("first_step"))
    last = as_int(record.get("last_step"))
    return Attempt(
        number=number,
        outcome=attempt_outcome(run, number, record, newest),
        exit_code=as_int(record.get("exit_code")),
        command=_command(as_text(record.get("command"))),
        host=as_text(record.get("host")),
        pid=as_int(record.get("pid")),
        started=as_time(record.get("started")),
        ended=ended or (span.last_time if span else None),
        first_step=first if first is not None or span is None else span.first_step - 1,
        last_step=last if last is not None or span is None else span.last_step,
        measured=as_time(record.get("seconds")),
        clock_jumped=span.clock_jumped if span else 0.0,
    )


def newest_of(records: Mapping[int, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Return number and record of a run's newest attempt; 0 and an empty record if there is none."""
    number = max(records, default=0)
    return number, records.get(number, {})


def state_of(run: Path, record: Mapping[str, Any], outcome: str) -> str:
    """Return the outcome of a run's newest attempt in one or two words.

    It is `failed` for an outcome that is an error message, but `not started` for one that says that the config is
    wrong, if the run has not done a step.
    """
    if outcome in STATES:
        return outcome
    refused = as_int(record.get("exit_code")) == ConfigError.exit_code
    return NOT_STARTED if refused and not _has_metrics(run) else FAILED


def _has_metrics(run: Path) -> bool:
    try:
        return (run / FILE_NAME).stat().st_size > 0
    except OSError:
        return False


def attempt_outcome(run: Path, number: int, record: dict[str, Any], newest: bool) -> str:
    """Return the outcome that the attempt recorded at its end; otherwise whether it is still alive."""
    outcome = as_text(record.get("outcome"))
    if outcome is not None:
        return outcome
    host = as_text(record.get("host"))
    pid = as_int(record.get("pid"))
    started = as_time(record.get("started"))
    if not newest or host is None or pid is None:
        return DIED
    if host != host_name():
        lease = read_lease(run)
        if lease is None or lease.attempt != number:
            return NOT_ENDED
        return RUNNING if lease.is_valid else DIED
    import psutil

    try:
        born = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return DIED
    except psutil.Error:
        return NOT_ENDED
    # Process numbers are reused: a process that was born after the attempt started is another one. The two times come
    # from different clocks of the kernel, which may differ by a little.
    return DIED if started is not None and born > started + 5 else RUNNING


def _checkpoint(manifest: dict[str, Any]) -> Checkpoint | None:
    step = as_int(manifest.get("step"))
    if step is None:
        return None
    files = manifest.get("files")
    sizes = [as_int(dig(entry, "bytes")) for entry in files.values()] if isinstance(files, dict) else []
    known = [size for size in sizes if size is not None]
    return Checkpoint(
        step=step,
        time=as_time(dig(manifest, "context", "time")),
        bytes=sum(known) if known else None,
        attempt=as_int(dig(manifest, "context", "attempt")),
        state_sha256=as_text(manifest.get("state_sha256")),
    )
