"""Carrying out a campaign: runs started as a user starts them, in separate processes, killed as planned."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.checkpoint.compare import compare
from headway.checkpoint.save.writer_locks import wait_for_writers
from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.checkpoint.transfer import remote_manifests
from headway.checkpoint.verify_remote import remote_checkpoints, verify_remote
from headway.core.coordination.train_command import failed, place, running, train_command
from headway.core.errors import ConfigError, HeadwayError, Preempted
from headway.core.files.atomic import append_json_line
from headway.core.files.foreign import read_json_lines
from headway.core.format import counted, format_seconds
from headway.core.process.faults import FAULTS_LOG_VARIABLE, FAULTS_VARIABLE
from headway.lab.chaos.campaign import Leg, Stage, Trial
from headway.lab.chaos.controls import CURSOR, forge
from headway.run.directory.ledger_proof import prove
from headway.telemetry.metrics import FILE_NAME, read_metrics
from headway.telemetry.record import open_run

#: The control that changes the seed, like a bug in resuming random numbers.
SEED = "seed"
#: Entry in the fault log for the kill of a supervisor.
SUPERVISOR = "kill@supervisor"
#: Fault that makes workers wait for the kill. Otherwise they could finish first while this process is delayed.
_WAIT = "hang@data"
_LOOK_SECONDS = 0.05
#: A leg that takes longer is stuck, which is a problem.
LEG_SECONDS = 1800.0
#: Time for a writer process that outlives its run to end.
_WRITER_SECONDS = 60.0
#: How often a run is stopped to upload its state: an upload gets a few seconds each time.
_STOPS = 5


@dataclass(frozen=True)
class End:
    """The end of one command."""

    code: int
    """Exit code, negative for a signal."""
    killed: bool = False
    """Whether it was killed as planned, at its step."""
    stood_still: bool = False

    @property
    def problem(self) -> str | None:
        """The problem; None for a command that ran all steps or was killed as planned."""
        if self.stood_still:
            return f"was stuck: no end after {format_seconds(LEG_SECONDS)}"
        return f"ended with exit code {self.code}" if self.code and not self.killed else None


@dataclass
class TrialResult:
    """The result of one run."""

    number: int
    workers: tuple[int, ...]
    kills: Counter[str] = field(default_factory=Counter)
    """Kills that happened, by kind."""
    problems: list[str] = field(default_factory=list)
    state_sha256: str | None = None
    recovery_seconds: list[float] = field(default_factory=list)
    """Seconds from a kill that ended an attempt to the next finished step."""
    recoveries_by_kind: dict[str, list[float]] = field(default_factory=dict)
    """Recovery seconds by kind of fault; only campaigns with several machines have them."""
    own_seconds: list[float] = field(default_factory=list)
    """Seconds of each recovery before the next attempt began, and for finding and loading a checkpoint."""
    disks_lost: int = 0
    """How often it had to resume from the remote tier."""
    rows_differ: bool = False
    """Whether the ledger shows that a row was lost or repeated."""
    seconds: float = 0.0


class Runs:
    """Runs of one config in a scratch folder.

    Args:
        config: The config file.
        overrides: `key=value` for all runs.
        folder: Folder for runs and logs.
        stages: Stages of every run.
        remote: URL for the checkpoints of killed runs; used by this campaign only.
    """

    def __init__(
        self, config: Path, overrides: Sequence[str], folder: Path, stages: Sequence[Stage], remote: str | None = None
    ) -> None:
        self._config = config
        self._overrides = overrides
        self._folder = folder
        self._stages = stages
        self._steps = stages[-1].last
        self._remote = remote

    def reference(self, workers: int) -> str:
        """Train without kills and return the state hash of the last step.

        Raises:
            HeadwayError: the run fails, so there is nothing to compare with.
        """
        for stage in range(len(self._stages)):
            end = self._command("reference", Leg(workers, (), None, stage=stage))
            if end.problem:
                break
        found = self._last("reference")
        if end.problem or found is None:
            raise self._useless("reference", end)
        for problem in self._other_workers(self._folder / "reference", [(len(self._stages), workers)]):
            raise HeadwayError(f"the run without kills shows nothing: {problem}")
        return found.state_sha256

    def _useless(self, name: str, end: End) -> HeadwayError:
        which = "the run without kills" if name == "reference" else "a run"
        what = end.problem or f"ended with exit code {end.code}"
        return failed(f"{which} {what}", end.code, self._folder / f"{name}.log")

    def carry_out(self, trial: Trial, expected: str) -> TrialResult:
        """Run, kill, and compare the result with the undisturbed run.

        Raises:
            HeadwayError: the run does not start.
        """
        name = f"trial-{trial.number:03d}"
        start = time.monotonic()
        run = self._folder / name
        result = TrialResult(trial.number, tuple(leg.workers for leg in trial.legs))
        tiers = [f"checkpoint.remote.url={self._remote}"] if self._remote else []
        if trial.memory_every is not None:
            tiers.append(f"checkpoint.memory_every={trial.memory_every} steps")
        wanted: list[tuple[int, int]] = []
        before = trial.legs[0]
        for number, leg in enumerate(trial.legs, 1):
            if leg.disk_lost:
                if problem := self._upload(name, before, *tiers):
                    result.problems.append(f"before command {number}, {problem}")
                wanted.append((_last_attempt(run), before.workers))
                result.disks_lost += self._lose_disk(run)
            before = leg
            end = self._command(name, leg, *tiers)
            if not run.exists():
                raise self._useless(name, end)
            # Report the problem of every command, even if the next command recovers: a user has no next command.
            if end.problem:
                result.problems.append(f"command {number}, on {counted(leg.workers, 'worker')}, {end.problem}")
            wanted.append((_last_attempt(run), leg.workers))
        self._count_kills(run, result)
        result.problems += self._other_workers(run, wanted)
        self._judge(run, result, expected)
        result.seconds = time.monotonic() - start
        return result

    def _judge(self, run: Path, result: TrialResult, expected: str) -> None:
        """Compare the last state with that of the undisturbed run, and check the ledger and all checkpoints."""
        last = self._last(run.name)
        result.state_sha256 = last.state_sha256 if last else None
        if result.state_sha256 != expected:
            result.problems.append(f"the last state is {result.state_sha256}, not {expected}")
        result.problems += self._damage(run)
        found = self._ledger_problems(run, result.disks_lost)
        result.rows_differ = bool(found)
        result.problems += found

    def control(self, control: str, workers: int) -> str | None:
        """Run a control; return None if it is detected, else the problem.

        A control loses something half-way (`controls`) or changes the seed. Weights and moments must reveal it: a
        different cursor alone is not enough. If rows were used twice, the ledger must report it too.
        """
        name = f"control-{control.replace(' ', '-')}"
        run = self._folder / name
        end = self._kill(name, workers, self._steps // 2)
        if control == CURSOR and not end.stood_still and (newest := CheckpointStore(run / "checkpoints").list()):
            # Once more, in its first step: then the ledger surely contains the checkpoint to be forged.
            end = self._kill(name, workers, newest[-1].step)
        if end.stood_still:
            return f"the control '{control}' {end.problem}"
        if control == SEED:
            end = self._command(name, Leg(workers, (), None), "seed=987654321", "--accept-changes")
        else:
            forge(run, control)
            end = self._command(name, Leg(workers, (), None))
        found = self._last(name)
        undisturbed = self._last("reference")
        if end.problem or found is None or undisturbed is None:
            return f"the control '{control}' {end.problem or 'did not reach its last step'}, so it shows nothing"
        if not compare(undisturbed.path, found.path).differences:
            return f"the control '{control}' ended with the weights and moments of a run without losses"
        if control == CURSOR and not self._ledger_problems(run):
            return f"the control '{control}' used rows twice, and the ledger does not show it"
        return None

    def _kill(self, name: str, workers: int, step: int) -> End:
        """Train until a worker is killed in the step after `step`, without a restart."""
        return self._command(name, Leg(workers, (f"kill@update={step}",), None), "supervise.max_failures=0")

    def _command(self, name: str, leg: Leg, *more: str) -> End:
        """Run one leg."""
        changed = self._stages[leg.stage].overrides
        command = train_command(
            self._config,
            *(*self._overrides, *place(name, self._folder), f"parallel.workers={leg.workers}", *more, *changed),
            *(["--accept-changes"] if leg.stage else []),
        )
        run = self._folder / name
        log_of_faults = faults_log(run)
        deadline = time.monotonic() + LEG_SECONDS
        last = leg.supervisor_at
        orders = leg.orders if last is None else (*leg.orders, f"{_WAIT}={self._stages[leg.stage].last - 1}#*")
        variables = {FAULTS_VARIABLE: ",".join(orders), FAULTS_LOG_VARIABLE: str(log_of_faults)}
        waited = _waits(log_of_faults)
        reached: float | None = None
        with running(command, self._folder / f"{name}.log", variables) as process:
            while (runs := process.poll() is None) and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                if last is None:
                    continue
                # A waiting worker may not have recorded its last steps.
                if read_metrics(run, newest=True).last_step >= last or _waits(log_of_faults) > waited:
                    reached = time.time()
                    break
        # It may have ended by itself since the last poll, in which case it was not killed.
        code = int(process.returncode)
        ended_here = runs and code == -signal.SIGKILL
        killed = ended_here and reached is not None
        if killed:
            append_json_line(log_of_faults, {"time": reached, "order": SUPERVISOR})
        return End(code, killed, stood_still=ended_here and not killed)

    def _count_kills(self, run: Path, result: TrialResult) -> None:
        """Count the kills and measure the recoveries."""
        # The metrics of a killed run have a record of every step of every attempt.
        steps = recorded_steps(run)
        starts = [attempt.started or 0.0 for attempt in open_run(run).attempts]
        for record in read_json_lines(faults_log(run)):
            order = str(record["order"])
            moment = float(record["time"])
            if not order.startswith("kill"):  # a wait for the supervisor's kill, or a stop
                continue
            result.kills[order.split("=")[0].split(":")[0]] += 1
            before = max((step["attempt"] for step in steps if step["time"] <= moment), default=0)
            after = next((step for step in steps if step["time"] > moment and step["attempt"] > before), None)
            # A writer process died alone, or with its worker, after which the supervisor restarts as usual.
            if after is None or order.startswith("kill@checkpoint."):
                continue
            began = min((start for start in starts if moment < start < after["time"]), default=None)
            if began is None:  # an attempt that had just begun survived the kill
                continue
            result.recovery_seconds.append(after["time"] - moment)
            if order != SUPERVISOR:
                result.own_seconds.append(began - moment + after.get("checkpoint/load_seconds", 0.0))

    def _upload(self, name: str, leg: Leg, *tiers: str) -> str | None:
        """Upload a checkpoint of a run whose disk is about to be lost; return the problem if that fails.

        The progress of an upload when a supervisor is killed depends on timing, and before the first checkpoint there
        is none. A command that is asked to stop in its first step, as schedulers do, saves and uploads its state.

        Args:
            name: Name of the run.
            leg: The previous leg.
            tiers: Overrides for the checkpoint tiers.
        """
        run = self._folder / name
        for _ in range(_STOPS):
            if self._is_remote(run):
                return None
            wait_for_writers(run, _WRITER_SECONDS)  # an upload may be in progress
            if self._is_remote(run):
                return None
            newest = max((info.step for info in CheckpointStore(run / "checkpoints").list()), default=0)
            end = self._command(name, Leg(leg.workers, (f"stop@update={newest}",), None, stage=leg.stage), *tiers)
            if end.code != Preempted.exit_code:
                return f"a command that was asked to stop {end.problem or 'ran to the end'}"
        return None if self._is_remote(run) else "nothing reached the remote tier"

    def _is_remote(self, run: Path) -> bool:
        return bool(remote_manifests(f"{self._remote}/{run.name}"))

    def _lose_disk(self, run: Path) -> bool:
        """Remove the local checkpoints if the run can resume from a remote one; return whether it did."""
        here = run / "checkpoints"
        if not here.is_dir() or not self._is_remote(run):
            return False
        # Move it away at once: a writer process may still be writing there.
        self._remove(here)
        # Files written since then were on the lost disk too; otherwise there would be nothing to download.
        wait_for_writers(run, _WRITER_SECONDS)
        if here.is_dir():
            self._remove(here)
        return True

    def _remove(self, folder: Path) -> None:
        lost = tempfile.mkdtemp(dir=self._folder, prefix=f"{folder.parent.name}-lost-")
        folder.rename(lost)
        shutil.rmtree(lost, ignore_errors=True)

    def _last(self, name: str) -> CheckpointInfo | None:
        """Return the checkpoint of a run's last step."""
        return checkpoint_of(self._folder / name, self._steps)

    def _ledger_problems(self, run: Path, disks_lost: int = 0) -> list[str]:
        """List lost or repeated rows according to the ledger.

        The steps in the ledger are in a checkpoint. They may be rolled back only if the checkpoint is lost, or if their
        rows are skipped.
        """
        proof = prove(run)
        rolled_back = [] if disks_lost or proof.skipped_ranges else proof.rollbacks
        return [
            *(f"ledger: {problem}" for problem in proof.problems),
            *(f"ledger: steps in a checkpoint were rolled back: {rollback.reason}" for rollback in rolled_back),
        ]

    def _other_workers(self, run: Path, wanted: Sequence[tuple[int, int]]) -> list[str]:
        """List checkpoints made by another number of workers than requested, which would not test that number.

        Args:
            wanted: The number of the last attempt and of workers, for every leg.
        """
        problems = []
        for info in CheckpointStore(run / "checkpoints").list():
            asked = next((workers for last, workers in wanted if info.context["attempt"] <= last), None)
            if info.context["world_size"] != asked:
                made = counted(info.context["world_size"], "worker")
                problems.append(f"{info.path.name} was made by {made}, not by {asked}")
        return problems

    def _damage(self, run: Path) -> list[str]:
        store = CheckpointStore(run / "checkpoints")
        results = [store.verify(folder) for folder in store.folders()]
        if self._remote:
            results += map(verify_remote, remote_checkpoints(f"{self._remote}/{run.name}"))
        return [f"{result.place}: {damage}" for result in results for damage in result.damage]


def recorded_steps(run: Path) -> list[dict[str, Any]]:
    """Return the records of all steps of all attempts of a run."""
    return [record for record in read_json_lines(run / FILE_NAME) if "train/loss" in record]


def checkpoint_of(run: Path, step: int) -> CheckpointInfo | None:
    """Return the checkpoint that a run has of a step."""
    return next((info for info in CheckpointStore(run / "checkpoints").list() if info.step == step), None)


def new_folder(folder: Path, config: str) -> Path:
    """Make a folder for runs of a config, write the config there, and return its file.

    Raises:
        ConfigError: the folder is not empty, so that other runs would be mistaken for these; or it cannot be used.
    """
    where = str(folder.absolute())
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError("the folder is not empty", where=where, fix="choose a new one: --output")
    file = folder / "config.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(config, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the folder cannot be used: {error.strerror or error}", where=where, fix="choose --output"
        ) from None
    return file


def faults_log(run: Path) -> Path:
    """Return the file beside a run directory that lists the faults of the run."""
    return run.with_name(f"{run.name}.faults.jsonl")


def _last_attempt(run: Path) -> int:
    return max((found.number for found in open_run(run).attempts), default=0)


def _waits(log_of_faults: Path) -> int:
    """Return how often workers have begun to wait for the kill of their supervisor."""
    return sum(str(record["order"]).startswith(_WAIT) for record in read_json_lines(log_of_faults))
