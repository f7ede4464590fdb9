"""What a price policy holds: a command on this machine, or a job that `headway launch` has started on a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from headway.clouds.launchers.ending import stop_launched
from headway.clouds.launchers.job import Job
from headway.clouds.launchers.launcher import OVER, find_launcher
from headway.clouds.launchers.record import read_handle
from headway.clouds.spot.places import Place
from headway.config import Config
from headway.config.checks.contradictions import combined
from headway.core.console import notice, warning
from headway.core.coordination.preemption_board import Notice, post, posted
from headway.core.errors import ConfigError, HeadwayError, Preempted
from headway.core.files.foreign import read_json_object
from headway.core.format import format_seconds
from headway.core.process.command import module_command
from headway.cost.price_book import price_of_offer
from headway.run.directory.run_directory import newest_attempt

SPOT_SOURCE = "spot"
#: How often the command, the board and the policy are looked at.
LOOK_SECONDS = 0.2
#: After a stop that the engine refused, it is asked again so much later.
_AGAIN_SECONDS = 15.0


class HeldCommand:
    """A command on this machine, which the board of its run asks to stop.

    Args:
        run: Its run directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None

    def adopt(self) -> bool:
        """Return whether the run goes on already, and hold it then: never for a command, which ends with its holder."""
        return False

    def start(self, words: Sequence[str]) -> None:
        """Start the command.

        Raises:
            ConfigError: there is no such program.
        """
        try:
            self._process = subprocess.Popen(words, start_new_session=True)
        except OSError as error:
            raise ConfigError(
                f"the command cannot be started: {error.strerror or error}", where=words[0], fix="check its name"
            ) from None

    def poll(self) -> int | None:
        """Return the exit code once it has ended; None before."""
        return None if self._process is None else self._process.poll()

    def has_begun(self) -> bool:
        """Return whether it was started before, by whomever."""
        return newest_attempt(self._run) is not None

    def was_asked(self) -> bool:
        """Return whether it has ended because it was asked to."""
        attempt = newest_attempt(self._run)
        return attempt is not None and self._asked(attempt)

    def ask_to_stop(self, why: str) -> None:
        """Post "save and stop" on the board of the attempt that runs, once; one that has not begun is asked later."""
        attempt = newest_attempt(self._run)
        if attempt is None or self._has_ended(attempt) or self._asked(attempt):
            return
        try:
            post(attempt, Notice(SPOT_SOURCE, why, "stop"))
        except OSError as error:
            warning(f"the run cannot be asked to save and stop: {error.strerror or error}")
            return
        notice(f"{why}: {self._run} saves and stops")

    def stop(self, signals: Sequence[int]) -> int:
        """Pass signals on, also those that still come, wait for the save, and return the exit code."""
        assert self._process is not None, "it was started"
        began = time.monotonic()
        passed = 0
        while (code := self._process.poll()) is None:
            for number in signals[passed:]:
                with suppress(ProcessLookupError):
                    os.kill(self._process.pid, number)
            passed = len(signals)
            time.sleep(LOOK_SECONDS)
        name = signal.Signals(signals[0]).name
        notice(f"the command has ended {format_seconds(time.monotonic() - began)} after {name}")
        return code

    def _has_ended(self, attempt: Path) -> bool:
        try:
            return "outcome" in read_json_object(attempt / "attempt.json")
        except (OSError, ValueError):
            return True

    def _asked(self, attempt: Path) -> bool:
        return any(found["source"] == SPOT_SOURCE for found in posted(attempt))


class HeldLaunch(HeldCommand):
    """A job on a cluster, for whose end a `headway launch --wait` waits here.

    A pause has the run save and removes the job. It is over only when the engine says that no machine has it, so the
    next launch finds no other owner of the run.
    """

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        self._launched_after = 0.0
        self._stopped_with: int | None = None
        self._not_before = 0.0

    def adopt(self) -> bool:
        """Return whether the run has a job already, as after a holder that was killed, and hold it then.

        Raises:
            ConfigError: its engine does not answer.
        """
        handle = read_handle(self._run)
        if handle is None or find_launcher(handle.target).status(handle).state in OVER:
            return False
        super().start(module_command("headway", "launch", "wait", str(self._run)))
        return True

    def start(self, words: Sequence[str]) -> None:
        """Launch the job.

        Raises:
            ConfigError: there is no such program.
        """
        self._launched_after = time.time()
        self._stopped_with = None
        super().start(words)

    def poll(self) -> int | None:
        """Return the exit code once the job is over: 75 after a stop that was asked for."""
        return super().poll() if self._stopped_with is None else self._stopped_with

    def has_begun(self) -> bool:
        """Return whether the run was launched before."""
        return read_handle(self._run) is not None

    def was_asked(self) -> bool:
        """Return whether it has ended because it was asked to."""
        return self._stopped_with == Preempted.exit_code

    def ask_to_stop(self, why: str) -> None:
        """Have the run save, and remove the job; one that is being submitted is asked later, as is an engine that
        refuses."""
        if time.monotonic() < self._not_before or not self._is_submitted():
            return
        try:
            self._stop(why)
        except HeadwayError as error:
            self._not_before = time.monotonic() + _AGAIN_SECONDS
            warning(f"the job cannot be stopped: {error.what}; trying again in {_AGAIN_SECONDS:g} s")

    def stop(self, signals: Sequence[int]) -> int:
        """Have the run save, remove the job, and return the exit code; a second signal does not wait for a launch that
        is not submitted.

        Raises:
            HeadwayError: the engine refuses it, and the job goes on.
        """
        while self.poll() is None and not self._is_submitted() and len(signals) < 2:
            time.sleep(LOOK_SECONDS)
        code = self.poll()
        if code is None and self._is_submitted():
            code = self._stop(f"headway spot was stopped by {signal.Signals(signals[0]).name}")
        self._end_waiting()
        return Preempted.exit_code if code is None else code

    def _is_submitted(self) -> bool:
        handle = read_handle(self._run)
        return handle is not None and handle.launched >= self._launched_after

    def _stop(self, why: str) -> int:
        notice(f"{why}: {self._run} saves, and its job is removed")
        state = stop_launched(self._run, f"{SPOT_SOURCE}: {why}")
        self._end_waiting()
        self._stopped_with = 0 if state.state == "finished" else Preempted.exit_code
        return self._stopped_with

    def _end_waiting(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


@dataclass(frozen=True)
class LaunchCommand:
    """A `headway launch` that is held, and how it reads in each place and with each size."""

    command: Sequence[str]
    """The words that a person would type."""
    target: str
    """Name of its launcher."""
    parse: Callable[[Sequence[str]], Job]
    """Returns the job of such words."""
    places: tuple[Place, ...] = ()
    workers: tuple[int, int] | None = None
    """Usual and most workers of each machine; None if they stay."""
    machines: tuple[int, int] | None = None
    """Usual and most machines; None if they stay."""

    def words(self, place: Place | None = None, grown: bool = False) -> list[str]:
        """Return the command in a place, which is None where there is no choice, and with a size."""
        words = [*self.command, "--wait", "--yes"]
        words += [] if self.machines is None else ["--machines", str(self.machines[grown])]
        words += [] if self.workers is None else [f"parallel.workers={self.workers[grown]}"]
        return words if place is None else [*words, *_overrides_of(place, self.target)]

    def priced_words(self, place: Place | None, grown: bool, machine_usd: float) -> list[str]:
        """Return the command with the price that starts it, at which the attempt is billed.

        Args:
            place: Where the job is to be, by whose offer it is billed.
            grown: With the most workers or machines.
            machine_usd: Price of a machine without a place, which counts unless the config gives one.
        """
        job = self.job(place, grown)
        usd = machine_usd * job.machines
        if place is not None:
            _, usd = price_of_offer(place.offer, job.config.parallel.workers * job.machines)
        return [*self.words(place, grown), *_price_words(job.config, usd, place)]

    def job(self, place: Place | None = None, grown: bool = False) -> Job:
        """Return the job in a place.

        Raises:
            ConfigError: its config is wrong.
        """
        return replace(self.parse(self.words(place, grown)), held=True)

    def check(self, run: Path) -> None:
        """Check that the job can be held, in every place and with each size.

        Args:
            run: The run directory that was named.

        Raises:
            ConfigError: it cannot; nothing was started.
        """
        sizes = (False,) if self.workers is None and self.machines is None else (False, True)
        choices = [(place, grown) for place in self.places or (None,) for grown in sizes]
        jobs = [self.job(place, grown) for place, grown in choices]
        problems = {error.what: error for job in jobs for error in self._problems(job, run)}
        if len(self.places) > 1 and len({job.config.model_dump_json() for job in jobs}) < len(jobs):
            what = "the launch is the same in two places, so a move would lead nowhere"
            fix = "--place 'OFFER traffic=0.02 launch.kubernetes.context=west' says how it gets there"
            problems[what] = ConfigError(what, where="--place", fix=fix)
        if problems:
            raise combined(list(problems.values()))

    def _problems(self, job: Job, run: Path) -> Iterator[ConfigError]:
        yield from find_launcher(self.target).problems(job)
        if job.directory.absolute() != run.absolute():
            yield ConfigError(
                f"the launch keeps its handle in {job.directory}", where="RUN", fix=f"headway spot {job.directory} ..."
            )
        if (self.workers or self.machines) and job.config.determinism != "elastic":
            yield ConfigError(
                "a run with another number of workers gives the same bits only with determinism=elastic",
                where="--workers, --machines",
                fix="... -- headway launch my.yaml --on slurm determinism=elastic",
            )
        silent = [place.offer for place in self.places if place.traffic_usd_per_gib is None]
        if len(self.places) > 1 and silent:
            yield ConfigError(
                f"the price of traffic between {silent[0]} and the remote tier is not given",
                where="--place",
                fix=f"--place '{silent[0]} traffic=0.02', or 0 in the region of the tier",
            )
        if len(self.places) > 1 and not job.has_object_tier:
            yield ConfigError(
                "a run moves to another place only by a remote tier in object storage",
                where="checkpoint.remote",
                fix="checkpoint.remote.url=s3://bucket/runs, or one --place",
            )


def _overrides_of(place: Place, target: str) -> list[str]:
    """Return what leads to a place; SkyPilot takes the names of an offer as they are."""
    if place.overrides or target != "sky":
        return list(place.overrides)
    cloud, region, instance, term = place.offer.split("/")
    spot = "true" if term == "spot" else "false"
    return [f"launch.sky.infra={cloud}/{region}", f"launch.sky.instance_type={instance}", f"launch.sky.spot={spot}"]


def _price_words(config: Config, usd_per_hour: float, place: Place | None) -> list[str]:
    """Return overrides by which the attempt is billed at the price that has started it, unless the config has one of
    its own and no place was chosen by its offer."""
    own = {
        "cost.offer": config.cost.offer,
        "cost.usd_per_hour": config.cost.usd_per_hour,
        "telemetry.usd_per_hour": config.telemetry.usd_per_hour,
    }
    given = [key for key, value in own.items() if value is not None]
    if given and place is None:
        return []
    return [*(f"{key}=null" for key in given), f"cost.usd_per_hour={round(usd_per_hour, 6)}"]
