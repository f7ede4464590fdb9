"""The course of a profile: a temporary run directory, the workers, their records, the files."""

from __future__ import annotations

import re
import shutil
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

from headway.config import Config, Interval, dump_config
from headway.core.console import notice
from headway.core.coordination.train_command import check_not_a_worker
from headway.core.errors import ConfigError, HeadwayError
from headway.core.files.atomic import write_json, write_text
from headway.core.files.scratch import scratch_folder
from headway.core.version import __version__
from headway.lab.profiling.page import render_page
from headway.lab.profiling.plan import TRACED_STEPS, Plan
from headway.lab.profiling.record import Profile, WorkerRecord
from headway.lab.profiling.roofline import Analysis, analyse
from headway.parallel.world import pick_device
from headway.run.session.precision import with_precision
from headway.run.session.preflight import examine
from headway.run.supervisor.agent import load_training
from headway.run.supervisor.error_report import most_telling_report
from headway.run.supervisor.local_workers import WorkersFailed, WorkersStopped, start_workers
from headway.run.supervisor.watchdog import in_words

_NEVER = Interval(10**12, "steps")
_OF_A_WORKER = re.compile(r"trace-\d+\.json\.gz|memory-\d+\.pickle")
#: Minimum of `--steps`.
LEAST_TIMED_STEPS = 2


class ProfileFailed(HeadwayError):
    """A worker ended before it had a result."""


def check(config: Config, plan: Plan) -> Config:
    """Check that the config can be profiled here, and return it with its model complete.

    Raises:
        HeadwayError: training cannot start here, the run is too short, or a launcher has started this process.
    """
    steps = config.train.resolved_steps
    check_not_a_worker("profile")
    if plan.steps > steps:
        room = _most_timed(plan, steps)
        raise ConfigError(
            f"the profile takes {plan.steps} steps, and the run has {steps}",
            where="--steps, --warmup, train.steps",
            fix=f"train.steps={plan.steps}" if room is None else f"--steps {room}",
        )
    if plan.snapshot and pick_device(config.train.device).type != "cuda":
        raise ConfigError(
            "PyTorch records allocations of GPUs only", where="--memory-snapshot", fix="leave it out; profile.html"
            " shows memory over time on a CPU too",
        )  # fmt: skip
    return examine(with_precision(config)).config


def _most_timed(plan: Plan, steps: int) -> int | None:
    """Return the largest possible `--steps` in a run of this length; None if the run is too short."""
    sizes = range(min(plan.timed, steps), LEAST_TIMED_STEPS - 1, -1)
    shorter = (replace(plan, timed=size, traced=min(TRACED_STEPS, size)) for size in sizes)
    return next((one.timed for one in shorter if one.steps <= steps), None)


def run_profile(config: Config, plan: Plan, output: Path) -> Profile:
    """Train the config's first steps in a temporary run directory and analyse their time.

    Args:
        config: A resolved config; its run directory is not touched.
        plan: Numbers of steps.
        output: Folder for `profile.json`, `profile.html` and the traces, which replace existing ones.

    Raises:
        HeadwayError: as `check`, or the error that ended a worker.
    """
    config = check(config, plan)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder for the profile cannot be created: {error.strerror}", where=str(output), fix="choose --output"
        ) from None
    with scratch_folder(".scratch-", output) as folder:
        with (folder / "config.yaml").open("w", encoding="utf-8") as file:
            file.write(dump_config(_scratch(config, folder)))
        write_json(folder / "plan.json", asdict(plan))
        _work(config.parallel.workers, folder)
        found = [
            WorkerRecord.model_validate_json((folder / f"worker-{rank}.json").read_bytes())
            for rank in range(config.parallel.workers)
        ]
        for stale in _files_of_workers(output):
            stale.unlink()
        for file_ in _files_of_workers(folder):
            shutil.move(file_, output / file_.name)
    result = _profile_of(config, plan, analyse(config, found), found)
    write_text(output / "profile.json", result.model_dump_json(indent=2) + "\n")
    try:
        text = render_page(result)
    except ConfigError as error:  # no matplotlib
        notice(f"no profile.html: {error.what} ({error.fix})")
    else:
        write_text(output / "profile.html", text)
    return result


def _files_of_workers(folder: Path) -> list[Path]:
    """List the traces and memory records of earlier profiles; files with similar names are the user's own."""
    return [path for path in folder.iterdir() if _OF_A_WORKER.fullmatch(path.name) and path.is_file()]


def _scratch(config: Config, folder: Path) -> Config:
    """Return the config with its run directory in `folder`, and with saves on request only."""
    checkpoint = config.checkpoint.model_copy(
        update={"every": _NEVER, "memory_every": None, "remote": None, "keep_best": 0, "failures_per_day": None}
    )
    return config.model_copy(
        update={
            "runs": folder,
            "name": "run",
            "checkpoint": checkpoint,
            "evaluation": config.evaluation.model_copy(update={"every": None}),
            "telemetry": config.telemetry.model_copy(update={"report": False, "alert": None, "communication_every": 0}),
        }
    )


def _work(workers: int, folder: Path) -> None:
    try:
        start_workers(workers, folder, {}, "headway.lab.profiling.worker", str(folder), load=load_training)
    except WorkersFailed as error:
        rank = error.first.rank
        raise _recorded_error(folder) or ProfileFailed(
            f"worker {rank} died ({in_words(error.first.code)}) before it had a result",
            where=f"worker {rank}",
            fix="signal 9 usually means that the kernel ran out of memory: see dmesg, or use a smaller"
            " train.micro_batch",
        ) from None
    except WorkersStopped as error:
        if error.signal == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise ProfileFailed(str(error)) from None


def _recorded_error(folder: Path) -> HeadwayError | None:
    """Return the error that a worker recorded."""
    report = most_telling_report(folder)
    if report is None:
        return None
    error = ProfileFailed(report.what, where=report.where or f"worker {report.rank}", fix=report.fix)
    error.exit_code = report.exit_code
    return error


def _profile_of(config: Config, plan: Plan, analysis: Analysis, workers: list[WorkerRecord]) -> Profile:
    import torch

    slowest = analysis.slowest
    peak = slowest.ceilings.peak_flops_per_second
    traced = sum(step.seconds for step in slowest.traced_steps) / len(slowest.traced_steps)
    return Profile(
        name=config.name,
        headway=__version__,
        torch=torch.__version__,
        created=time.time(),
        precision=config.train.precision,
        compiled=slowest.compiled,
        warmup_steps=plan.warmup,
        workers=workers,
        slowest=slowest.rank,
        step_seconds=analysis.step_seconds,
        tokens_per_second=slowest.items_per_step / analysis.step_seconds,
        mfu=analysis.reached if peak is not None else None,
        reached=analysis.reached,
        profiler_cost=traced / slowest.step_seconds - 1,
        rows=analysis.rows,
        losses=analysis.losses,
        notes=list(_notes(config)),
    )


def _notes(config: Config) -> list[str]:
    notes = [
        "FLOPs are those of the model (PaLM, appendix B): recomputation does not count, and attention counts in full"
        " although half of it is masked",
        "a save counts with the time that training waits for it; writing overlaps the next steps",
    ]
    if config.train.batch_ramp:
        notes.append(f"these are the run's first steps, with {config.train.batches.sizes[0]} rows (train.batch_ramp)")
    if config.parallel.pipeline > 1:
        notes.append("a pipeline stage alternates between forward and backward, so these are one row")
    return notes
