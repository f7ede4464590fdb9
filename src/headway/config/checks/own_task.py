"""Keys that mean nothing for a task of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.schema import Config

#: Keys of `data` that mean something for a task; the store's default names the run.
_OF_TASKS = {"processes", "store"}
_NONE: set[str] = set()


def task_problems(config: Config) -> Iterator[ConfigError]:
    """Yield the keys that mean nothing for a task of the user's own, and would be ignored."""
    if config.task is None:
        stopping = config.train.early_stopping
        if stopping is not None and stopping.metric != "evaluation/loss":
            yield ConfigError(
                f"an evaluation of a language model does not give {stopping.metric}",
                where="train.early_stopping.metric",
                fix="train.early_stopping.metric=evaluation/loss",
            )
        return
    for name, section, kept in (("data", config.data, _OF_TASKS), ("model", config.model, _NONE)):
        default = type(config).model_fields[name].default
        values, defaults = (one.model_dump(mode="json", exclude=kept) for one in (section, default))
        for key in (key for key, value in values.items() if value != defaults[key]):
            yield _meaningless(f"{name}.{key}", "leave it out; the function of the task makes model and dataset")
    if config.loss is not None:
        yield _meaningless("loss", "leave it out; the task brings its loss (headway.Task)")
    if config.distill is not None:
        yield _meaningless("distill", "leave it out; compute the teacher's part in the loss of the task")
    if config.evaluation.benchmarks is not None:
        yield _meaningless("evaluation.benchmarks", "leave it out; measure in a metric of the task (headway.Task)")
    if config.train.tokens is not None:
        yield _meaningless("train.tokens", "train.steps says how long to train; its samples have no tokens")
    if config.train.epochs is not None:
        yield _meaningless("train.epochs", "train.steps says how long to train; epochs are of prepared text")


def check_is_language_model(config: Config, verb: str) -> None:
    """Check that a config is of a language model, for a verb that means nothing for other tasks.

    Raises:
        ConfigError: it has a task of its own.
    """
    if config.task is not None:
        raise ConfigError(
            f"`headway {verb}` is for language models, and this config has a task of its own",
            where="task",
            fix="the function of the task reads its data; headway train --dry-run checks it",
        )


def _meaningless(key: str, fix: str) -> ConfigError:
    return ConfigError(f"{key} is for language models, and this run has a task of its own", where=key, fix=fix)
