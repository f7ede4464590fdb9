"""A campaign and its result, as text and as a record."""

from __future__ import annotations

import secrets
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.checkpoint.remote.open import open_place
from headway.checkpoint.transfer import remote_manifests
from headway.config import Config, dump_config, override
from headway.core.console import notice, progress
from headway.core.coordination.train_command import check_not_a_worker, stoppable
from headway.core.errors import ConfigError
from headway.core.format import counted, format_seconds, plural
from headway.lab.chaos.campaign import FEWEST_STEPS, Shape, Stage, plan_campaign
from headway.lab.chaos.changes import changing_stages, one_stage
from headway.lab.chaos.controls import CONTROLS
from headway.lab.chaos.machine_plan import plan_machine_campaign
from headway.lab.chaos.machine_trial import MachineRuns
from headway.lab.chaos.machines import can_make_namespaces, standing_machines
from headway.lab.chaos.trial import SEED, Runs, TrialResult, new_folder
from headway.run.session.precision import with_precision

#: Descriptions of the measurements.
_RECOVERY = "from a kill to the next new step"
_NAMESPACES = "network namespaces"
_LOOPBACK = "processes on loopback, which are not cut off: network namespaces need root and `ip`"
_OVERHEAD = "until new workers are started, and to find and load a checkpoint"


@dataclass
class CampaignResult:
    """The result of all trials."""

    seed: int
    expected: str
    """State hash of the undisturbed run's last step."""
    trials: list[TrialResult] = field(default_factory=list)
    controls: dict[str, str | None] = field(default_factory=dict)
    """Name of each control -> None if it was detected, else the problem."""
    seconds: float = 0.0
    stopped: bool = False
    """Whether Ctrl-C or SIGTERM stopped the campaign; finished trials are included."""
    max_recovery_seconds: float | None = None
    """Upper limit of `recoveries`; None to only report them."""
    max_overhead_seconds: float | None = None
    """Upper limit of `own`."""
    machines: str | None = None
    """Number of machines, and how this one simulates them; None for a campaign on a single machine."""

    @property
    def failed(self) -> bool:
        """Whether a run ended in another state, a recovery took too long, or a control was not detected."""
        return any(trial.problems for trial in self.trials) or any(self.controls.values()) or bool(self.too_slow)

    @property
    def passed(self) -> bool:
        """Whether the campaign completed without a problem."""
        return not (self.stopped or self.failed)

    @property
    def kills(self) -> Counter[str]:
        """All kills that happened, by kind."""
        return sum((trial.kills for trial in self.trials), Counter[str]())

    @property
    def mismatches(self) -> int:
        """Runs whose last state differs from that of the undisturbed run."""
        return sum(trial.state_sha256 != self.expected for trial in self.trials)

    @property
    def rows_differ(self) -> int:
        """Runs that lost or repeated rows according to their ledgers."""
        return sum(trial.rows_differ for trial in self.trials)

    @property
    def recoveries(self) -> list[float]:
        """Seconds from every kill that ended an attempt to the next finished step."""
        return sorted(seconds for trial in self.trials for seconds in trial.recovery_seconds)

    @property
    def own(self) -> list[float]:
        """Seconds of each supervised recovery spent on restarting and on finding and loading a checkpoint."""
        return sorted(seconds for trial in self.trials for seconds in trial.own_seconds)

    @property
    def too_slow(self) -> list[str]:
        """Violations of the limits, one line each; a limit without measurements is a violation too."""
        recovery = [(seconds, trial.number) for trial in self.trials for seconds in trial.recovery_seconds]
        overhead = [(seconds, trial.number) for trial in self.trials for seconds in trial.own_seconds]
        found = (
            _beyond(self.max_recovery_seconds, recovery, _RECOVERY, self.stopped),
            _beyond(self.max_overhead_seconds, overhead, _OVERHEAD, self.stopped),
        )
        return [problem for problem in found if problem is not None]

    @property
    def disks_lost(self) -> int:
        """How often runs resumed from the remote tier alone."""
        return sum(trial.disks_lost for trial in self.trials)

    def record(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "passed": self.passed,
            "kills": sum(self.kills.values()),
            "mismatches": self.mismatches,
            "kills_by_kind": dict(self.kills),
            "too_slow": self.too_slow,
            **vars(self),
            "trials": [{**vars(trial), "kills": dict(trial.kills)} for trial in self.trials],
        }


def run_campaign(
    config: Config,
    folder: Path,
    *,
    kills: int,
    seed: int,
    worker_counts: Sequence[int],
    controls: bool = True,
    remote: str | None = None,
    changes: bool = False,
    machines: int = 1,
) -> CampaignResult:
    """Train without kills, then with kills, and compare.

    Args:
        config: A resolved config; its own run directory is not touched. Needs `determinism: elastic` if the number of
            workers changes.
        folder: Folder for runs and logs; not removed.
        kills: Minimum number of kills.
        seed: Seed of the plan.
        worker_counts: Numbers of workers to alternate between.
        controls: Also check that losses are detected.
        remote: URL below which the campaign creates a folder for remote checkpoints. Uploads are then killed too, and
            local checkpoints are lost. The config's own remote tier is not used.
        changes: Every run, including the undisturbed one, changes to other batches, more data and shorter rows on the
            way (`headway.lab.chaos.changes`). Controls apply to runs without changes and are skipped.
        machines: Number of machines, each with the only number of `worker_counts` as its workers. With more than one,
            whole machines are killed, frozen, cut off and stopped, and workers are left alone.

    Raises:
        ConfigError: the config does not promise what is tested, the folder is not empty or cannot be created, or a
            launcher has started this process as one of several workers.
        HeadwayError: the run without kills fails; the exit code is that of the run.
    """
    check_not_a_worker("chaos")
    if machines > 1 and (remote or changes or len(worker_counts) > 1):
        raise ConfigError(
            "a campaign with several machines has one number of workers, and neither a remote tier nor changes",
            where="--machines",
            fix="leave out --remote and --changes, and give one number in --workers: that of each machine",
        )
    config = with_precision(override(config, ["checkpoint.remote=null", "telemetry.alert=null"]))
    steps = config.train.resolved_steps
    if config.determinism == "off" or (len(set(worker_counts)) > 1 and config.determinism != "elastic"):
        raise ConfigError(
            f"determinism '{config.determinism}' does not promise what a campaign on {_listed(worker_counts)}"
            f" {plural(max(worker_counts), 'worker')} would test",
            where="determinism",
            fix="determinism=elastic" if len(set(worker_counts)) > 1 else "determinism=run",
        )
    if steps < FEWEST_STEPS:
        raise ConfigError(
            f"{steps} steps are too few to be killed in every phase",
            where="train.steps",
            fix=f"train.steps={FEWEST_STEPS} at least; 40 is a good number",
        )
    file = new_folder(folder, dump_config(config))
    stages = changing_stages(config, folder, worker_counts) if changes else one_stage(config, worker_counts)
    shape = shape_of(config, stages, worker_counts, remote=bool(remote))
    every = shape.save_every
    overrides = [
        *(f"checkpoint.every={every} steps", f"evaluation.every={every + 1} steps", "telemetry.report=false"),
        "checkpoint.keep_best=0",  # these saves and evaluations do not meet
        # Without the config's minimum, so that fewer workers are allowed too.
        *("supervise.max_failures=1000000", "supervise.max_delay_seconds=0.1", "parallel.min_workers=null"),
    ]
    if machines > 1:
        # A machine that has missed the end of the run gives up soon, and is started again.
        overrides.append(f"supervise.rejoin_seconds={max(60.0, 4 * config.supervise.lost_seconds)}")
    place = _place_in(config, remote) if remote else None
    start = time.monotonic()
    with ExitStack() as stack:
        if machines == 1:
            workers = worker_counts[0]
            result = CampaignResult(seed, "")
            runs = Runs(file, overrides, folder, stages, place)
            trials = (runs.carry_out(trial, result.expected) for trial in plan_campaign(shape, seed))
        else:
            each = worker_counts[0]
            namespaces = can_make_namespaces()
            workers = machines * each if config.determinism == "run" else each
            stand_as = _NAMESPACES if namespaces else _LOOPBACK
            result = CampaignResult(seed, "", machines=f"{machines} machines ({stand_as})")
            standing = stack.enter_context(standing_machines(machines, namespaces))
            runs = several = MachineRuns(file, overrides, folder, stages, machines=standing, workers=each)
            lost_seconds = config.supervise.lost_seconds
            plan = plan_machine_campaign(machines, steps, lost_seconds, can_cut=namespaces, seed=seed)
            trials = (several.carry_out_on_machines(trial, result.expected) for trial in plan)
        notice(f"training {steps} steps without kills")
        result.expected = runs.reference(workers)
        try:
            with stoppable():
                _disturb(result, trials, kills)
                for control in (*CONTROLS, SEED) if controls and not changes else ():
                    notice(f"control run, which loses: {control}")
                    result.controls[control] = runs.control(control, workers)
        except KeyboardInterrupt:
            result.stopped = True
    result.seconds = time.monotonic() - start
    return result


def _disturb(result: CampaignResult, trials: Iterator[TrialResult], kills: int) -> None:
    """Carry out trials until enough kills have happened."""
    with progress("kills", kills) as bar:
        # Not every planned kill happens: a run may be past its step when the workers start again.
        while (done := sum(result.kills.values())) < kills:
            trial = next(trials)
            result.trials.append(trial)
            came = sum(trial.kills.values())
            if not came:
                trial.problems.append("no kill happened, so it tested nothing")
            for problem in trial.problems:
                notice(f"run {trial.number}: {problem}")
            bar.advance(min(kills - done, came))
            if not came:
                break


def _place_in(config: Config, remote: str) -> str:
    """Create a new folder below the remote URL, and check that it can be reached.

    Raises:
        ConfigError: the URL is not writable or access is denied.
        CheckpointError: the place cannot be reached.
    """
    try:
        tier = override(config, [f"checkpoint.remote.url={remote}"]).checkpoint.remote
    except ConfigError as error:
        raise ConfigError(error.what, where="--remote", fix="--remote s3://bucket/folder") from None
    assert tier is not None, "it was just given"
    place = f"{tier.url}/chaos-{secrets.token_hex(4)}"
    remote_manifests(place)
    open_place(place).make_folder()
    notice(f"remote checkpoints go to {place}")
    return place


def shape_of(config: Config, stages: Sequence[Stage], worker_counts: Sequence[int], *, remote: bool) -> Shape:
    """Return the properties of a run from which, with the seed, the plan of a campaign follows."""
    every = max(2, config.train.resolved_steps // 8)
    return Shape(stages, every, every + 1, worker_counts, remote)


def render(result: CampaignResult) -> str:
    """Format the result as text."""
    return "\n".join(_lines(result))


def _lines(result: CampaignResult) -> Iterator[str]:
    kills = sum(result.kills.values())
    runs = len(result.trials)
    workers = sorted({count for trial in result.trials for count in trial.workers})
    word = "fault" if result.machines else "kill"
    came = f"{counted(kills, word)} in {counted(runs, 'run')}"
    if result.machines:
        came += f" on {result.machines}"
    elif workers:
        came += f" on {_listed(workers)} {plural(workers[-1], 'worker')}"
    differ = "state differs" if result.mismatches == 1 else "states differ"
    found = f"{result.mismatches} {differ} from the undisturbed run's" if runs else "nothing was compared"
    yield f"{came} (seed {result.seed}, {format_seconds(result.seconds)}): {found}"
    for kind, count in sorted(result.kills.items()):
        seconds = sorted(s for trial in result.trials for s in trial.recoveries_by_kind.get(kind, ()))
        took = f"   next step after {statistics.median(seconds):.1f} s, {seconds[-1]:.1f} s at most" if seconds else ""
        yield f"  {kind:28}{count:5}{took}"
    if result.machines:
        yield f"  {'runs with rows lost or repeated':28}{result.rows_differ:2}"
    if result.disks_lost:
        yield f"local checkpoints were lost {counted(result.disks_lost, 'time')}: resumed from the remote tier"
    if result.recoveries:
        seconds = result.recoveries
        recovery = _RECOVERY.replace("kill", word)
        yield (
            f"{recovery}: median {statistics.median(seconds):.1f} s,"
            f" longest {seconds[-1]:.1f} s ({counted(len(seconds), word)})"
        )
    if result.own:
        yield (f"of that {_OVERHEAD}: median {statistics.median(result.own):.2f} s, longest {result.own[-1]:.2f} s")
    for trial in result.trials:
        yield from (f"FAIL  run {trial.number}: {problem}" for problem in trial.problems)
    yield from (f"FAIL  {problem}" for problem in result.too_slow)
    for control, problem in result.controls.items():
        yield f"FAIL  {problem}" if problem else f"ok    the loss of {control} was detected"
    yield "FAILED" if result.failed else "stopped before its end" if result.stopped else "passed"


def _beyond(limit: float | None, took: Sequence[tuple[float, int]], what: str, stopped: bool) -> str | None:
    """Return the violation of a limit, if any.

    Args:
        limit: Limit in seconds; None for no limit.
        took: Seconds and number of the run, for each measurement.
        what: Description of the measurement.
        stopped: Whether the campaign was stopped and may lack measurements.
    """
    if limit is None or (stopped and not took):
        return None
    if not took:
        return f"{what}: nothing was measured, so the limit of {format_seconds(limit)} was not tested"
    longest, number = max(took)
    over = sum(seconds > limit for seconds, _ in took)
    if not over:
        return None
    slow = f"{over} of {len(took)} took longer than {format_seconds(limit)}"
    return f"{what}: {slow}, the longest {longest:.2f} s in run {number}"


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(set(counts))))
