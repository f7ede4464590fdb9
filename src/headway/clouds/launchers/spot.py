"""A training that is paused while its machines are dear, and resumed, grown or moved when they are cheap.

The policy runs outside of the run. To pause, it has the run save and stop. To resume, it starts the command again: the
run continues from what it has saved, bit for bit. Workers are changed in the same way, which takes `determinism:
elastic`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.clouds.launchers.ending import only_one
from headway.clouds.launchers.held import LOOK_SECONDS, SPOT_SOURCE, HeldCommand, HeldLaunch, LaunchCommand
from headway.clouds.launchers.price_feeds import Feed, PlaceFeed
from headway.clouds.launchers.record import audited
from headway.clouds.spot.places import Place
from headway.clouds.spot.policy import SpotDecider, SpotPolicy, State
from headway.core.console import notice, warning
from headway.core.errors import ConfigError, HeadwayError, Preempted
from headway.core.format import format_seconds
from headway.core.process.signals import STOP_SIGNALS, handled
from headway.run.directory.audit import record


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
    launch: LaunchCommand | None = None
    """The command as a launch on a cluster; None if it trains here."""

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
        machines = None if self.launch is None else self.launch.machines
        sizes = self.workers or machines
        option = "--machines" if machines is not None else "--workers"
        if (self.policy.grow_below is None) != (sizes is None) or (self.workers and machines):
            raise ConfigError(
                "growing takes a price and two numbers of workers, or of machines of a launch",
                where="--grow-below, --workers",
                fix="--grow-below 1.20 --workers 1:8",
            )
        if sizes is not None and not 1 <= sizes[0] < sizes[1]:
            what = f"the second number of {option.lstrip('-')} should be larger"
            raise ConfigError(what, where=option, fix=f"{option} 1:8")
        if self.launch is not None:
            self.launch.check(self.run)
        elif self.workers is not None and "determinism=elastic" not in self.command:
            raise ConfigError(
                "a run with another number of workers gives the same bits only with determinism=elastic",
                where="--workers",
                fix="... -- headway train my.yaml determinism=elastic",
            )

    def words(self, state: State, place: Place | None, price: float) -> list[str]:
        """Return the command for a state, in a place, at a price."""
        if self.launch is not None:
            return self.launch.priced_words(place, state == "grown", price)
        if self.workers is None:
            return list(self.command)
        return [*self.command, "--workers", str(self.workers[state == "grown"])]


def hold_by_price(job: SpotJob, feed: Feed, clock: Callable[[], float] = time.monotonic) -> int:
    """Keep the command running while the price allows; return its exit code once it ends by itself.

    Raises:
        ConfigError: the policy cannot be carried out, there is no price to begin with, or another one holds the run.
        Preempted: this process was asked to stop; the run is saved.
    """
    job.check()
    with only_one(job.run, "spot"):
        return _Holder(job, feed, clock).run()


class _Prices:
    """The price that the policy sees: that of the feed, asked anew after a time; the last one while it gives none."""

    def __init__(self, feed: Feed, every_seconds: float, clock: Callable[[], float]) -> None:
        self._feed = feed
        self._every_seconds = every_seconds
        self._clock = clock
        self._asked_at = -math.inf
        self._is_silent = False
        self.places = feed if isinstance(feed, PlaceFeed) else None
        self.usd = 0.0
        """The newest price of an hour."""

    def begin(self) -> float:
        """Return the first price.

        Raises:
            HeadwayError: the feed gives none.
        """
        self.usd = self._feed()
        self._asked_at = self._clock()
        return self.usd

    @property
    def is_due(self) -> bool:
        """Whether it is time to ask again."""
        return self._clock() - self._asked_at >= self._every_seconds

    def ask(self) -> None:
        """Ask for the price; a feed that gives none is reported once."""
        self._asked_at = self._clock()
        try:
            self.usd = self._feed()
            self._is_silent = False
        except HeadwayError as error:
            if not self._is_silent:
                warning(f"no new price: {error.what}; the last one of ${self.usd:,.2f} counts")
            self._is_silent = True


class _Holder:
    def __init__(self, job: SpotJob, feed: Feed, clock: Callable[[], float]) -> None:
        self._job = job
        self._clock = clock
        self._held = HeldCommand(job.run) if job.launch is None else HeldLaunch(job.run)
        self._prices = _Prices(feed, job.every_seconds, clock)
        self._signals: list[int] = []
        self._said_waiting = False
        self._started_at = -float("inf")
        self._place: Place | None = None
        self._running: State = "paused"
        before = self._last_line()
        if self._prices.places is not None:
            self._place = next(
                (place for place in self._prices.places.places if place.offer == before.get("place")), None
            )
            self._prices.places.here = self._place
        if self._held.adopt():
            notice(f"{job.run} has a job already, which is held from now on")
            self._enter("grown" if before.get("state") == "grown" else "running")
        self._decider = SpotDecider.begin(job.policy, self._prices.begin(), clock())

    def run(self) -> int:
        with handled(STOP_SIGNALS, lambda number, frame: self._signals.append(number)):
            while True:
                wanted = self._decider.decide(self._new_price(), self._clock())
                if self._signals:
                    return self._stop()
                if self._running == "paused" and wanted == "paused":
                    self._say_waiting()
                elif self._running == "paused":
                    self._start(wanted)
                elif wanted != self._running:
                    self._ask_to_stop(wanted)
                elif self._should_move():
                    self._ask_to_stop("moving")
                if self._running != "paused" and (code := self._held.poll()) is not None:
                    if code != Preempted.exit_code or not self._held.was_asked():
                        return code
                    self._enter("paused")
                time.sleep(LOOK_SECONDS)

    def _new_price(self) -> float:
        if self._prices.is_due:
            if self._prices.places is not None:
                self._prices.places.running = self._running != "paused"
            self._prices.ask()
        return self._prices.usd

    def _said_price(self) -> str:
        where = "" if self._prices.places is None else f" for {self._prices.places.wanted.offer}"
        return f"${self._prices.usd:,.2f} an hour{where}"

    def _say_waiting(self) -> None:
        """Say once in a pause what is waited for; otherwise a command that is silent for hours seems to hang."""
        if (
            self._said_waiting or self._prices.usd < self._job.policy.resume_below
        ):  # the minimum time of a pause is left
            return
        self._said_waiting = True
        policy = self._job.policy
        every = format_seconds(self._job.every_seconds)
        begins = "resumes" if self._held.has_begun() else "begins"
        notice(
            f"{self._said_price()}: {self._job.run} {begins} when the price is below"
            f" ${policy.resume_below:,.2f}; waiting, with a look at it every {every}"
        )

    def _start(self, state: State) -> None:
        if self._prices.places is not None:
            self._place = self._prices.places.wanted
            self._prices.places.here = self._place
        words = self._job.words(state, self._place, self._prices.usd)
        verb = "resuming" if self._held.has_begun() else "starting"
        notice(f"{self._said_price()}: {verb} {' '.join(words)}")
        self._held.start(words)
        self._started_at = self._clock()
        self._enter(state)
        place: dict[str, Any] = {} if self._place is None else {"place": self._place.offer}
        record(self._job.run, SPOT_SOURCE, state=state, usd_per_hour=self._prices.usd, **place)

    def _enter(self, state: State) -> None:
        self._running = state
        self._said_waiting = False

    def _should_move(self) -> bool:
        """Whether the run is better off in another place, and has been in this one for the minimum time."""
        if self._prices.places is None or self._prices.places.wanted == self._place:
            return False
        return self._clock() - self._started_at >= self._job.policy.min_run_seconds

    def _ask_to_stop(self, wanted: str) -> None:
        why = {
            "paused": "pausing",
            "grown": "going on with all workers",
            "running": "going on with fewer workers",
            "moving": "moving there",
        }
        self._held.ask_to_stop(f"{self._said_price()}, {why[wanted]}")

    def _last_line(self) -> Mapping[str, Any]:
        """Return what an earlier holder of the run has noted last."""
        lines = audited(self._job.run)
        return next((line for line in reversed(lines) if line.get("action") == SPOT_SOURCE), {})

    def _stop(self) -> int:
        """Have the run save and stop, and end as it does."""
        if self._running == "paused":
            raise Preempted("stopped while the run is paused", fix="run the same command again")
        return self._held.stop(self._signals)
