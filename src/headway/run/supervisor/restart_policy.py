"""The outcome of an attempt, and whether the run continues by itself.

Failures are limited (`supervise.max_failures`), preemptions are not. Errors that would recur (a mistake in the config,
damaged data, divergence) are never retried, and a fault that recurs at the same step with the same stack is a bug.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headway.checkpoint.format.folders import checkpoint_folders
from headway.config.sections.supervise import SuperviseConfig
from headway.core.coordination.outcomes import FINAL_CODES
from headway.core.errors import Preempted, SavesFailed
from headway.core.format import format_seconds

#: Signals that only a scheduler, a person or the operating system sends: SIGHUP, SIGINT, SIGUSR1, SIGTERM, SIGPWR.
_FROM_OUTSIDE = (1, 2, 10, 15, 30) if sys.platform == "linux" else (1, 2, 15, 30)

#: Modules of `headway.run.supervisor` between a command and a worker.
_STARTERS = (
    "agent",
    "attempt_client",
    "attempt_monitor",
    "attempt_process",
    "attempt_training",
    "supervisor",
    "worker",
)

#: A frame in a dump of `faulthandler`: `  File "/x/y.py", line 3 in name`.
_DUMP_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
_FIRST_DELAY_SECONDS = 1.0


@dataclass(frozen=True)
class AttemptOutcome:
    """Why and how an attempt ended."""

    kind: Literal["finished", "preempted", "budget", "cancelled", "error", "died", "hung", "slow", "lost"]
    what: str
    exit_code: int
    where: str | None = None
    fix: str | None = None
    rank: int | None = None
    """The worker to blame; None if there is none in particular."""
    step: int | None = None
    """Finished steps of that worker."""
    signal: int | None = None
    error: str | None = None
    """Type of the exception."""
    frames: tuple[str, ...] = ()
    """Frames of Headway and of the user's code, innermost last, as `file:line function`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More for the record: phase, last exchange, host, waiting workers, files of stacks."""

    @property
    def signature(self) -> tuple[object, ...] | None:
        """A value that is equal for the same fault at the same step; None without a stack to compare."""
        return (self.kind, self.error, self.signal, self.step, self.frames) if self.frames else None

    @property
    def is_final(self) -> bool:
        """Whether another attempt would meet the same error."""
        return self.exit_code in FINAL_CODES

    @property
    def is_from_outside(self) -> bool:
        """Whether a signal from outside (a scheduler, a person, the operating system) ended a worker."""
        return self.kind == "died" and self.signal in _FROM_OUTSIDE

    def record(self) -> dict[str, Any]:
        """Return the fields for `attempt.json`; unknown ones are absent."""
        known = {
            "kind": self.kind,
            "rank": self.rank,
            "step": self.step,
            "signal": self.signal,
            "error": self.error,
            "frames": list(self.frames) or None,
            "where": self.where,
            "fix": self.fix,
            **self.facts,
        }
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class Decision:
    """Whether the run continues by itself, and why."""

    continues: bool
    why: str
    delay_seconds: float = 0.0
    is_bug: bool = False
    """Whether the fault recurred at the same step with the same stack."""


class RestartPolicy:
    """Counts failures over the attempts of one command, and decides whether another attempt follows.

    Args:
        config: The section `supervise`.
        clock: Returns seconds that never decrease.
    """

    def __init__(self, config: SuperviseConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._failures: deque[float] = deque()
        self._seen: set[tuple[object, ...]] = set()
        # -1 is a run that has no checkpoint yet
        self._furthest = -2
        self._without_progress = 0

    def decide(self, outcome: AttemptOutcome, newest_step: int) -> Decision:
        """Decide what follows from an outcome.

        Args:
            newest_step: Step of the newest checkpoint; more than ever before is progress.
        """
        if outcome.kind == "finished":
            return Decision(False, "finished")
        if outcome.kind == "budget":
            return Decision(False, "the budget is reached")
        if outcome.is_final:
            return Decision(False, "another attempt would meet the same error")
        if outcome.error == SavesFailed.__name__:
            return Decision(False, "no checkpoint can be saved on this machine")
        delay = self._delay(newest_step)
        if outcome.exit_code == Preempted.exit_code and outcome.kind == "preempted":
            if self._config.restart_preempted:
                return Decision(True, "preempted, which does not count as a failure", delay)
            return Decision(False, "preempted")
        if outcome.kind == "lost" and not self._without_progress:
            return Decision(True, "a lost machine does not count as a failure", delay)
        if outcome.is_from_outside:
            return Decision(True, "ended by a signal from outside, which does not count as a failure", delay)
        if outcome.signature is not None and outcome.signature in self._seen:
            why = "the same fault at the same step with the same stack: this is a bug, not bad luck"
            return Decision(False, why, delay, is_bug=True)
        if outcome.signature is not None:
            self._seen.add(outcome.signature)
        return self._count(delay)

    def _count(self, delay: float) -> Decision:
        now = self._clock()
        window = self._config.failure_window.amount
        while self._failures and now - self._failures[0] > window:
            self._failures.popleft()
        self._failures.append(now)
        count = len(self._failures)
        limit = self._config.max_failures
        within = f"within {format_seconds(window)}"
        if limit == 0:
            return Decision(False, "supervise.max_failures is 0")
        if count > limit:
            return Decision(False, f"failure {count} {within}; supervise.max_failures is {limit}")
        return Decision(True, f"failure {count} of {limit} {within}", delay)

    def _delay(self, newest_step: int) -> float:
        """Return the seconds until the next attempt: 0 after progress, then growing."""
        self._without_progress = 0 if newest_step > self._furthest else self._without_progress + 1
        self._furthest = max(self._furthest, newest_step)
        if not self._without_progress:
            return 0.0
        return min(self._config.max_delay_seconds, _FIRST_DELAY_SECONDS * 2.0 ** (self._without_progress - 1))


def newest_checkpoint(run: Path) -> int:
    """Return the step in the name of the newest checkpoint folder; -1 without one.

    The next attempt finds out whether it verifies.
    """
    return max(checkpoint_folders(run / "checkpoints"), default=-1)


def frames_of(error: BaseException) -> list[str]:
    """Return the frames of an exception that are Headway's or the user's, innermost last."""
    summary = traceback.extract_tb(error.__traceback__)
    return [_frame(f.filename, f.lineno or 0, f.name) for f in summary if _is_own(f.filename)]


def frames_of_dump(text: str) -> tuple[str, ...]:
    """Return such frames from the newest dump of `faulthandler`.

    They are those of the thread that has most, which is the working one.
    """
    newest = re.split(r"(?m)^(?:Fatal Python error|Stack \(most recent|=== )", text)[-1]
    threads: list[list[str]] = []
    for line in newest.splitlines():
        match = _DUMP_FRAME.match(line)
        if match is None:
            threads.append([])
        elif threads and _is_own(match[1]):
            threads[-1].append(_frame(match[1], int(match[2]), match[3]))
    return tuple(reversed(max(threads, key=len, default=[])))


def _frame(file: str, line: int, name: str) -> str:
    return f"{file}:{line} {name}"


def _is_own(file: str) -> bool:
    """Return whether a frame is Headway's or the user's. Modules that start workers are not, since they vary."""
    if file.startswith("<"):
        return False
    path = Path(file)
    if path.is_relative_to(_HEADWAY):
        return not any(path.is_relative_to(_HEADWAY / part) for part in _STARTING)
    return not any(path.is_relative_to(folder) for folder in _LIBRARIES)


_HEADWAY = Path(__file__).resolve().parents[2]
_STARTING = ("__main__.py", "cli", "api", *(f"run/supervisor/{name}.py" for name in _STARTERS))
_LIBRARIES: Sequence[str] = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
