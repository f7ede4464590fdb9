"""A training command that is paused while its machines are dear, and resumed or grown when they are cheap.

The policy runs outside of the run. To pause, it posts "save and stop" on the board of the running attempt. To resume,
it starts the command again: the run continues from what it has saved, bit for bit. Workers are changed in the same way,
which takes `determinism: elastic`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from headway.clouds.spot.policy import SpotDecider, SpotPolicy, State
from headway.clouds.spot.traces import is_old, read_trace
from headway.core.console import notice, warning
from headway.core.coordination.preemption_board import Notice, post, posted
from headway.core.errors import ConfigError, HeadwayError, Preempted
from headway.core.files.foreign import read_json_object
from headway.core.format import format_seconds
from headway.core.process.signals import STOP_SIGNALS, handled
from headway.cost.offers import BadOffer, check_price

SPOT_SOURCE = "spot"
#: How often the command and the board are looked at.
_LOOK_SECONDS = 0.2
#: A price command may take so long.
_COMMAND_SECONDS = 60.0

Feed = Callable[[], float]


def file_feed(path: Path, zone: str | None = None) -> Feed:
    """Return a feed that gives the newest price in a file, which others append to."""

    told = False

    def price() -> float:
        nonlocal told
        trace = read_trace(path, zone)
        if not told and is_old(trace.times[-1], time.time()):
            told = True
            day = datetime.fromtimestamp(trace.times[-1], UTC).date()
            warning(f"the newest price in {path} is of {day}: it counts until a newer one is added")
        return trace.prices[-1]

    return price


def command_feed(words: str) -> Feed:
    """Return a feed that gives the number which a shell command prints."""

    def price() -> float:
        try:
            done = subprocess.run(
                words, shell=True, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True
            )
            return check_price(float(done.stdout.strip()))
        except (OSError, subprocess.SubprocessError, ValueError, BadOffer) as error:
            raise ConfigError(
                f"the price command gives no price: {error}", where=words, fix="it should print one number, $/hour"
            ) from None

    return price


@dataclass(frozen=True)
class SpotJob:
    """What is started, and what the policy may do with it."""

    run: Path
    command: Sequence[str]
    policy: SpotPolicy
    workers: tuple[int, int] | None = None
    """Usual and most workers; None if they stay."""
    every_seconds: float = 60.0
    """Time between prices."""

    def check(self) -> None:
        """Check that the policy can be carried out.

        Raises:
            ConfigError: it cannot.
        """
        self.policy.check()
        if not self.command:
            raise ConfigError(
                "a paused run cannot be resumed without the command that trains",
                where="COMMAND",
                fix=f"headway spot {self.run} ... -- headway train my.yaml",
            )
        if (self.policy.grow_below is None) != (self.workers is None):
            raise ConfigError(
                "growing takes a price and two numbers of workers",
                where="--grow-below, --workers",
                fix="--grow-below 1.20 --workers 1:8",
            )
        if self.workers is not None and not 1 <= self.workers[0] < self.workers[1]:
            raise ConfigError("the second number of workers should be larger", where="--workers", fix="--workers 1:8")
        if self.workers is not None and "determinism=elastic" not in self.command:
            raise ConfigError(
                "a run with another number of workers gives the same bits only with determinism=elastic",
                where="--workers",
                fix="... -- headway train my.yaml determinism=elastic",
            )

    def words(self, state: State) -> list[str]:
        """Return the command for a state."""
        if self.workers is None:
            return list(self.command)
        return [*self.command, "--workers", str(self.workers[state == "grown"])]


def hold_by_price(job: SpotJob, feed: Feed, clock: Callable[[], float] = time.monotonic) -> int:
    """Keep the command running while the price allows; return its exit code once it ends by itself.

    Raises:
        ConfigError: the policy cannot be carried out, or there is no price to begin with.
        Preempted: this process was asked to stop; the run is saved.
    """
    job.check()
    return _Holder(job, feed, clock).run()


class _Holder:
    def __init__(self, job: SpotJob, feed: Feed, clock: Callable[[], float]) -> None:
        self._job, self._feed, self._clock = job, feed, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []
        self._price = feed()
        self._asked_at = clock()
        self._decider = SpotDecider.begin(job.policy, self._price, clock())
        self._running: State = "paused"
        self._said_waiting = False
        self._trouble = False

    def run(self) -> int:
        with handled(STOP_SIGNALS, lambda number, frame: self._signals.append(number)):
            while True:
                wanted = self._decider.decide(self._new_price(), self._clock())
                if self._signals:
                    return self._stop()
                if self._process is None and wanted == "paused":
                    self._say_waiting()
                elif self._process is None:
                    self._start(wanted)
                elif self._process is not None and wanted != self._running:
                    self._ask_to_stop(wanted)
                if self._process is not None and (code := self._process.poll()) is not None:
                    self._process = None
                    if code != Preempted.exit_code or not self._was_asked:
                        return code
                    self._running = "paused"
                time.sleep(_LOOK_SECONDS)

    def _new_price(self) -> float:
        if self._clock() - self._asked_at >= self._job.every_seconds:
            self._asked_at = self._clock()
            try:
                self._price, self._trouble = self._feed(), False
            except HeadwayError as error:
                if not self._trouble:
                    warning(f"no new price: {error.what}; the last one of ${self._price:,.2f} counts")
                self._trouble = True
        return self._price

    def _say_waiting(self) -> None:
        """Say once in a pause what is waited for; otherwise a command that is silent for hours seems to hang."""
        if self._said_waiting:
            return
        self._said_waiting = True
        policy, every = self._job.policy, format_seconds(self._job.every_seconds)
        begins = "resumes" if self._attempt() else "begins"
        notice(
            f"${self._price:,.2f} an hour: {self._job.run} {begins} when the price is below"
            f" ${policy.resume_below:,.2f}; waiting, with a look at it every {every}"
        )

    def _start(self, state: State) -> None:
        self._said_waiting = False
        words = self._job.words(state)
        notice(f"${self._price:,.2f} an hour: {'resuming' if self._attempt() else 'starting'} {' '.join(words)}")
        try:
            self._process = subprocess.Popen(words, start_new_session=True)
        except OSError as error:
            raise ConfigError(
                f"the command cannot be started: {error.strerror or error}", where=words[0], fix="check its name"
            ) from None
        self._running = state

    def _attempt(self) -> Path | None:
        """Return the folder of the run's newest attempt."""
        folders = [path for path in (self._job.run / "attempts").glob("*") if path.name.isdecimal()]
        return max(folders, key=lambda path: int(path.name), default=None)

    def _ask_to_stop(self, wanted: State) -> None:
        """Post "save and stop" on the board of the attempt that runs, once; one that has not begun is asked later."""
        attempt = self._attempt()
        if attempt is None or self._has_ended(attempt) or self._asked(attempt):
            return
        why = {"paused": "pausing", "grown": "going on with all workers", "running": "going on with fewer workers"}
        what = f"${self._price:,.2f} an hour, {why[wanted]}"
        try:
            post(attempt, Notice(SPOT_SOURCE, what, "stop"))
        except OSError as error:
            warning(f"the run cannot be asked to save and stop: {error.strerror or error}")
            return
        notice(f"{what}: {self._job.run} saves and stops")

    def _has_ended(self, attempt: Path) -> bool:
        try:
            return "outcome" in read_json_object(attempt / "attempt.json")
        except (OSError, ValueError):
            return True

    def _asked(self, attempt: Path) -> bool:
        return any(found["source"] == SPOT_SOURCE for found in posted(attempt))

    @property
    def _was_asked(self) -> bool:
        """Whether the command ended because this policy has asked for it."""
        attempt = self._attempt()
        return attempt is not None and self._asked(attempt)

    def _stop(self) -> int:
        """Pass a signal on, wait for the save, and end as the command does."""
        if self._process is None:
            raise Preempted("stopped while the run is paused", fix="run the same command again")
        began = time.monotonic()
        passed = 0
        while (code := self._process.poll()) is None:
            for number in self._signals[passed:]:
                with suppress(ProcessLookupError):
                    os.kill(self._process.pid, number)
            passed = len(self._signals)
            time.sleep(_LOOK_SECONDS)
        name = signal.Signals(self._signals[0]).name
        notice(f"the command has ended {format_seconds(time.monotonic() - began)} after {name}")
        return code
