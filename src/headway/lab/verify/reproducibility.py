"""Checks a config's determinism: trains its first steps several times and compares every bit of state.

Each training is a separate process, started with the command that a user types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.store import CheckpointStore
from headway.config import Config, dump_config, resolve_lanes
from headway.core.console import notice
from headway.core.coordination.train_command import check_not_a_worker, failed, place, running, stoppable, train_command
from headway.core.errors import ConfigError, HeadwayError
from headway.core.files.foreign import read_json_lines
from headway.core.files.scratch import scratch_folder
from headway.core.format import counted
from headway.core.process.faults import FAULTS_VARIABLE
from headway.run.session.precision import with_precision

#: step -> tensor name -> SHA-256, one entry per record: steps repeated after a kill appear twice.
Hashes = list[tuple[int, dict[str, str]]]


@dataclass(frozen=True)
class Difference:
    """The first point where two runs differ."""

    step: int
    tensor: str
    count: int
    """Number of tensors that differ at that step."""


@dataclass(frozen=True)
class Check:
    """One comparison with the reference run."""

    name: str
    difference: Difference | None

    @property
    def passed(self) -> bool:
        """Whether every state was identical, bit for bit."""
        return self.difference is None


@dataclass(frozen=True)
class Verdict:
    """The result of `headway verify`."""

    steps: int
    state_sha256: str
    checks: Sequence[Check]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)


def verify(config: Config, steps: int, other_workers: int | None = None) -> Verdict:
    """Train the first `steps` steps twice, again with a kill and a resume, and for `elastic` on other workers.

    Args:
        config: A resolved config; its run directory is not touched.
        steps: Steps of each training, at least 4.
        other_workers: Number of workers in the elastic check; by default half or twice the config's.

    Raises:
        ConfigError: the config promises nothing that can be checked, the requested check would show nothing, or a
            launcher has started this process as one of several workers.
        HeadwayError: a training did not run as the check needs: to its last step, on the requested workers, killed, or
            resumed from a checkpoint. The exit code is that of the training.
    """
    check_not_a_worker("verify")
    config = with_precision(config)
    if config.determinism == "off":
        raise ConfigError(
            "determinism 'off' promises nothing that could be verified",
            where="determinism",
            fix="determinism=run",
        )
    elastic = config.determinism == "elastic"
    workers = _other_workers(config, other_workers) if elastic else None
    if other_workers is not None and not elastic:
        raise ConfigError(
            "determinism 'run' promises nothing for other workers", where="--other-workers", fix="determinism=elastic"
        )
    steps = min(steps, config.train.resolved_steps)
    if steps < 4:
        raise ConfigError(f"{steps} steps are too few to kill a run in the middle", where="--steps", fix="--steps 10")
    with stoppable(), scratch_folder("headway-verify-") as folder:
        trainings = _Trainings(config, steps, folder)
        reference = trainings.run("reference")
        checks = [
            Check("repeated", first_difference(reference, trainings.run("again"))),
            Check(
                f"killed at step {steps // 2 + 1}, then resumed",
                first_difference(reference, trainings.run("killed", kill_at=steps // 2 + 1)),
            ),
        ]
        if workers is not None:
            checks.append(
                Check(
                    f"{workers} workers instead of {config.parallel.workers}",
                    first_difference(reference, trainings.run("workers", workers=workers)),
                )
            )
        state_sha256 = trainings.state_sha256("reference")
    return Verdict(steps, state_sha256, checks)


class _Trainings:
    """Runs of one config in a scratch folder."""

    def __init__(self, config: Config, steps: int, folder: Path) -> None:
        self._config = config
        self._steps = steps
        self._folder = folder
        self._file = folder / "config.yaml"
        self._file.write_text(dump_config(config), encoding="utf-8")

    def run(self, name: str, *, kill_at: int | None = None, workers: int | None = None) -> Hashes:
        """Train and return the state hashes of every step."""
        notice(f"training {self._steps} steps: {name}")
        workers = workers or self._config.parallel.workers
        if kill_at is not None:
            code = self._train(name, f"kill@step={kill_at}", workers)
            killed = [step for step, _ in self._hashes(name)]
            if killed != list(range(kill_at + 1)):
                raise self._failed(name, f"was to be killed at step {kill_at}, but recorded the steps {killed}", code)
        # The loop honours a stop request one step after it arrives.
        code = self._train(name, f"stop@step={self._steps - 1}", workers)
        hashes = [(step, tensors) for step, tensors in self._hashes(name) if step <= self._steps]
        if code not in (0, 75) or {step for step, _ in hashes} != set(range(self._steps + 1)):
            raise self._failed(name, f"ended with exit code {code} before it had recorded {self._steps} steps", code)
        trained = self._workers(name)
        if trained != workers:
            raise self._failed(name, f"was to have {counted(workers, 'worker')}, but had {trained}")
        if kill_at is not None and [step for step, _ in hashes].count(0) > 1:
            raise self._failed(name, "was not resumed from a checkpoint")
        return hashes

    def state_sha256(self, name: str) -> str:
        """Return the state hash of the last step, as `headway checkpoints list` shows it."""
        records = {r["step"]: r["state_sha256"] for r in self._records(name)}
        return str(records[self._steps])

    def _workers(self, name: str) -> int | None:
        """Return the number of workers that made the last checkpoint."""
        checkpoints = CheckpointStore(self._folder / name / "checkpoints").list()
        return checkpoints[-1].context.get("world_size") if checkpoints else None

    def _hashes(self, name: str) -> Hashes:
        return [(r["step"], r["tensors"]) for r in self._records(name)]

    def _records(self, name: str) -> list[dict[str, Any]]:
        return list(read_json_lines(self._folder / name / "hashes.jsonl"))

    def _failed(self, name: str, how: str, code: int = 1) -> HeadwayError:
        return failed(f"the training '{name}' {how}", code, self._folder / f"{name}.log")

    def _train(self, name: str, fault: str, workers: int) -> int:
        command = train_command(
            self._file,
            *place(name, self._folder),
            *(
                "telemetry.state_hash_every=1",
                "telemetry.report=false",
                "telemetry.alert=null",
                "evaluation.every=null",
            ),
            f"checkpoint.every={max(1, self._steps // 4)} steps",
            # Write nothing outside the folder, and drop settings that depend on the config's own intervals.
            *("checkpoint.remote=null", "checkpoint.keep_best=0", "checkpoint.failures_per_day=null"),
            *("supervise.enabled=true", "supervise.max_failures=0", "parallel.min_workers=null"),
            f"parallel.workers={workers}",
        )
        with running(command, self._folder / f"{name}.log", {FAULTS_VARIABLE: fault}) as process:
            return process.wait()


def first_difference(reference: Hashes, other: Hashes) -> Difference | None:
    """Return the first difference between two trainings; None if every state is equal."""
    expected = dict(reference)
    for step, tensors in sorted(other, key=lambda record: record[0]):
        names = sorted(tensors.keys() | expected[step].keys())
        different = [name for name in names if tensors.get(name) != expected[step].get(name)]
        if different:
            return Difference(step, different[0], len(different))
    return None


def _other_workers(config: Config, wanted: int | None) -> int:
    if wanted == config.parallel.workers:
        raise ConfigError(f"the config already has {wanted} workers", where="--other-workers", fix="another number")
    if wanted is not None:
        resolve_lanes(config, wanted)
        return wanted
    workers = config.parallel.workers
    lanes = resolve_lanes(config, config.parallel.workers).lanes
    if workers > 1:
        return workers // 2
    if lanes == 1:
        raise ConfigError("a single lane cannot be divided between workers", where="train.lanes", fix="train.lanes=4")
    return 2
