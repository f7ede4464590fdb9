"""What is refused before the first trial: what no trial could keep, and what the machine does not have."""

from __future__ import annotations

import subprocess

from headway.config import Config
from headway.core.errors import ConfigError, HeadwayError, error_with
from headway.core.machine.cores import usable_cores
from headway.core.process.command import module_command
from headway.lab.tune.settings import Objective, StudySettings
from headway.lab.tune.study import Study
from headway.lab.tune.trial_run import LOCAL
from headway.telemetry.catalogue import metric
from headway.telemetry.hardware import local_accelerators
from headway.training.own_task import build_task

_OF_EVALUATIONS = "evaluation/"


def check_study(study: Study) -> int:
    """Check a study against its config and this machine, and return the number of GPUs that its trials share.

    Raises:
        ConfigError: a trial could not run, or would not report what is searched for.
    """
    settings = study.settings
    config = study.base
    for objective in settings.objective:
        check_objective(objective, config)
    _check_stopping(settings, config)
    if settings.budget.usd is not None and config.cost.usd_per_hour is None and config.cost.offer is None:
        raise ConfigError(
            "the budget of a study needs the price of the machines",
            where="budget.usd",
            fix="cost.usd_per_hour=12.50 for the machines of one trial, or cost.offer=...",
        )
    return _check_workers(settings, config)


def check_objective(objective: Objective, config: Config) -> None:
    """Check that a run of the config reports an objective.

    Raises:
        ConfigError: it does not.
    """
    name = objective.metric
    if config.task is not None:
        _check_of_task(name, config)
        return
    if metric(name) is None:
        raise _unreported(name, "there is no metric of this name; headway runs metrics RUN lists those of a run")
    if name.startswith(_OF_EVALUATIONS) and not config.data.validation:
        raise _unreported(name, "data.validation is 0, so nothing is evaluated: data.validation='5 %'")


def _check_of_task(name: str, config: Config) -> None:
    task = build_task(config)
    names = ["train/loss"]
    if task.validation is not None:
        names += ["evaluation/loss", *(f"{_OF_EVALUATIONS}{one}" for one in task.metrics)]
    is_part = name.startswith(("train/losses/", *(["evaluation/losses/"] if task.validation is not None else [])))
    is_other = metric(name) is not None and not name.startswith(_OF_EVALUATIONS)
    if name not in names and not is_part and not is_other:
        raise _unreported(name, f"the task reports {', '.join(names)}")


def _unreported(name: str, fix: str) -> ConfigError:
    return ConfigError(f"no run of this config reports {name}", where="objective", fix=fix)


def _check_stopping(settings: StudySettings, config: Config) -> None:
    name = settings.stopping.name
    if name == "none":
        return
    if len(settings.objective) > 1:
        raise ConfigError(
            "trials are compared by one objective", where="stopping", fix="stopping: none, or one objective"
        )
    if settings.objective[0].metric.startswith(_OF_EVALUATIONS) and config.evaluation.every is None:
        raise ConfigError(
            "trials are compared by evaluations, and there are none before the end",
            where="stopping, evaluation.every",
            fix="evaluation.every='100 steps'",
        )


def _check_workers(settings: StudySettings, config: Config) -> int:
    if settings.launcher != LOCAL:
        return 0
    needed = settings.at_a_time * config.parallel.workers
    if needed == 1:
        return 0
    count = 0 if config.train.device == "cpu" else len(local_accelerators())
    there = count or usable_cores()
    if needed > there:
        what = "GPUs" if count else "processors"
        raise ConfigError(
            f"{settings.at_a_time} trials at a time with {config.parallel.workers} workers each need {needed} {what},"
            f" and there are {there}",
            where="--at-a-time, --workers-per-trial",
            fix=f"--at-a-time {max(1, there // config.parallel.workers)}, or fewer workers",
        )
    return count if settings.at_a_time > 1 else 0


def checked_by_command(study: Study, words: list[str], base: str) -> HeadwayError | None:
    """Return what `headway config check` says against the config of a trial; None if nothing."""
    command = module_command("headway", "config", "check", base, *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=study.started_in)
    if done.returncode == 0:
        return None
    text = done.stderr.strip().removeprefix("error: ")
    return (error_with(done.returncode) or HeadwayError)(text)
