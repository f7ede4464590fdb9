"""A short measurement of a task of the user's own: what no arithmetic knows of a module, a few steps show."""

from __future__ import annotations

import os
import time

from headway.config import Config, Interval, resolve_grid
from headway.core.errors import ConfigError, HeadwayError
from headway.core.files.atomic import write_json
from headway.core.files.scratch import scratch_folder
from headway.lab.bench.blocks import find_blocks
from headway.lab.bench.environment import describe_environment, environment_id
from headway.lab.bench.launchers import LOCAL, launch_command, run_command
from headway.lab.bench.results import CellResult, Measurement, Repeat
from headway.lab.bench.spec import Spec
from headway.lab.bench.suite import OWN, Cell

_WARMUP = 2
_STEPS = 5
_TIMEOUT_SECONDS = 600.0
_LOG_LINES = 5


def measure_task(config: Config) -> Measurement:
    """Train some steps of a config on this machine, as its workers would, and return speed and memory.

    Args:
        config: Resolved, with a task of its own; its run directory is not touched.

    Raises:
        ConfigError: it cannot be trained here.
        HeadwayError: the workers have failed in another way.
    """
    environment = describe_environment(LOCAL)
    grid = resolve_grid(config, config.parallel.workers)
    cell = Cell(
        strategy=config.parallel.strategy,
        workers=config.parallel.workers,
        model=OWN,
        precision=config.train.precision,
        micro_batch=grid.micro_batch,
        sequence_length=1,
    )
    begun = Repeat(number=1, status="failed", started=round(time.time(), 3))
    identity = {"key": OWN, "environment_id": environment_id(environment), "environment": environment}
    result = CellResult(suite="plan", cell=cell, settings={}, repeats=[begun], **identity)
    steps = _WARMUP + _STEPS + 1  # the last one is the step whose memory is measured
    train = config.train.model_copy(update={"steps": max(steps, config.train.steps or 0)})
    never = config.checkpoint.model_copy(update={"every": Interval(10**12, "steps"), "memory_every": None})
    evaluation = config.evaluation.model_copy(update={"every": None})
    run = config.model_copy(update={"train": train, "checkpoint": never, "evaluation": evaluation})
    with scratch_folder("headway-plan-") as folder:
        spec = folder / "spec.json"
        log = folder / "log.txt"
        write_json(spec, Spec(result, run, OWN, 1, _WARMUP, _STEPS, 0).dump())
        with log.open("wb") as file:
            command = launch_command(LOCAL, spec, config.parallel.workers)
            run_command(command, {**os.environ, "PYTHONUNBUFFERED": "1"}, file, _TIMEOUT_SECONDS)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [CellResult.model_validate(value).repeats[0] for value in find_blocks(lines).values]
    found = next((repeat.measured for repeat in told if repeat.measured is not None), None)
    if found is not None:
        return found
    failed = next((repeat for repeat in told if repeat.status in ("refused", "out_of_memory")), None)
    if failed is not None:
        raise ConfigError(
            f"the trial steps cannot run here: {failed.reason}", where="task", fix="headway train --dry-run checks more"
        )
    reason = next((repeat.reason for repeat in told), None) or " | ".join(lines[-_LOG_LINES:])
    raise HeadwayError(f"the trial steps have failed: {reason}", fix="headway train shows where")
