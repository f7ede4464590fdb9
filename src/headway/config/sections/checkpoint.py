"""The section `checkpoint`: when state is saved, where, and how much of it is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from headway.config.base import Section
from headway.config.sections.train import TrainConfig
from headway.config.units import Duration, Interval, StepInterval
from headway.core.errors import ConfigError

_URL = re.compile(r"^([a-z][a-z0-9+.-]*)://.", re.IGNORECASE)

#: Metrics that an evaluation records.
EVALUATED = ("evaluation/loss", "evaluation/perplexity")
#: Prefixes of metrics that are recorded after a checkpoint is made, or once in an attempt.
_NOT_AT_CHECKPOINTS = ("checkpoint/", "goodput/")


class RetentionConfig(Section):
    """Which checkpoints are kept in one place: all that any of the rules keeps."""

    keep: PositiveInt = 3
    """Number of newest checkpoints that are kept."""
    keep_every: Interval | None = None
    """Also keep, forever, the first checkpoint at or after each multiple of `10k steps`, `1B tokens` or `6 h`."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Also keep this many checkpoints with the best `keep_metric`."""
    keep_metric: str = "evaluation/loss"
    """Name of a metric that is recorded at the step of the checkpoint: `evaluation/loss`, `evaluation/perplexity`, a
    metric of a task of your own as `evaluation/accuracy`, or a metric of steps."""
    keep_mode: Literal["min", "max"] = "min"
    """Which `keep_metric` is best: the lowest (`min`) or the highest (`max`)."""
    keep_for: Duration | None = None
    """Also keep all checkpoints that are younger than this, for example `2 days`."""


class RemoteConfig(RetentionConfig):
    """Copies of checkpoints in object storage or on a shared file system, from which a run continues after its disk is
    lost ([checkpoint-tiers.md](checkpoint-tiers.md))."""

    url: str
    """`s3://bucket/folder`, `gs://...`, `az://...` or `file:///mnt/shared/runs`, which must exist; the run's name is
    appended."""
    every: Interval | None = None
    """How often a checkpoint is uploaded, by steps, tokens or time; every saved checkpoint when not given. The last one
    of a run is always uploaded."""
    encrypt: bool = False
    """Encrypt everything that is uploaded, manifests too (AES-256-GCM), with the key in HEADWAY_ENCRYPTION_KEY or in
    the file that HEADWAY_ENCRYPTION_KEY_FILE names."""
    options: dict[str, Any] = {}
    """Options of `fsspec` for the URL: `endpoint_url`, `profile`, ... Credentials come from the environment; in a
    value, `${NAME}` stands for the content of a variable."""

    @field_validator("url")
    @classmethod
    def _check_writable(cls, value: str) -> str:
        match = _URL.match(value)
        if match is None:
            raise ValueError(f"'{value}' is not a URL; write s3://bucket/folder, or file:///mnt/shared for a folder")
        if match[1].lower() in ("http", "https"):
            raise ValueError("a web address cannot be written to; use s3://, gs://, az:// or file://")
        scheme, _, path = value.partition("://")
        return f"{scheme}://{path.rstrip('/') or '/'}"


class CheckpointConfig(RetentionConfig):
    """When state is saved, and how much of it is kept."""

    every: Interval | Literal["auto"] = Interval(10 * 60, "seconds")
    """How often: `500 steps`, `1B tokens`, `10 min`; `auto` weighs the cost of a save against the rate of failures
    (Daly 2006). The last step is always saved."""
    memory_every: StepInterval | None = None
    """How often state is also copied to host memory, in steps or tokens. The copy outlives its worker: when the worker
    dies, the newest copy is written and the run continues from it. Takes three times the memory of a worker's part of
    the state."""
    failures_per_day: Annotated[float, Field(gt=0.0)] | None = None
    """For `every: auto`: expected failures per day; estimated from the run's own attempts when not given."""
    max_failed_saves: PositiveInt = 10
    """Saves in a row that may fail. The run then ends, since all further steps would be lost: with exit code 75 where
    another machine can continue it (`remote`, several machines, a scheduler), else with 4."""
    full_every: Interval | None = None
    """How often a checkpoint also holds config, provenance and the latest evaluation; every checkpoint when not
    given."""
    sign: bool = False
    """Sign manifests with the key in HEADWAY_SIGNING_KEY or in the file that HEADWAY_SIGNING_KEY_FILE names: an Ed25519
    key in PEM, or a secret for HMAC-SHA256. Where the variable is set, other checkpoints are refused."""
    encrypt: bool = False
    """Encrypt weights and moments in all places (AES-256-GCM), with the key in HEADWAY_ENCRYPTION_KEY or in the file
    that HEADWAY_ENCRYPTION_KEY_FILE names; manifests stay readable. It takes effect from the next save on."""
    remote: RemoteConfig | None = None
    """A second place for checkpoints; none when not given."""

    @field_validator("every", mode="before")
    @classmethod
    def _parse_auto_or_interval(cls, value: Any) -> Any:
        return value if value == "auto" else Interval.parse(value)


def checkpoint_problems(
    checkpoint: CheckpointConfig, evaluated: StepInterval | None, train: TrainConfig, *, own_figures: bool = False
) -> Iterator[ConfigError]:
    """Yield the problems of the section `checkpoint` beside other sections.

    Args:
        evaluated: `evaluation.every`.
        own_figures: Evaluations give figures of a task of the user's own.
    """
    if checkpoint.failures_per_day is not None and checkpoint.every != "auto":
        yield ConfigError(
            "checkpoint.failures_per_day works only with checkpoint.every=auto",
            where="checkpoint.failures_per_day, checkpoint.every",
            fix="checkpoint.every=auto, or leave it out",
        )
    for key, rules in (("checkpoint", checkpoint), ("checkpoint.remote", checkpoint.remote)):
        if rules is not None and rules.keep_best:
            yield from _best_without_values(rules, key, checkpoint.every, evaluated, train, own_figures=own_figures)
    if checkpoint.remote is not None:
        scheme, _, path = checkpoint.remote.url.partition("://")
        if scheme.lower() in ("file", "local") and path[0] not in "/~":
            yield ConfigError(
                f"'{checkpoint.remote.url}' is a relative path, so its folder depends on the working directory",
                where="checkpoint.remote.url",
                fix=f"{scheme}:///{path}, with three slashes, is an absolute path",
            )


def _best_without_values(
    rules: RetentionConfig,
    key: str,
    saved: Interval | Literal["auto"],
    evaluated: StepInterval | None,
    train: TrainConfig,
    *,
    own_figures: bool,
) -> Iterator[ConfigError]:
    """Check that the metric of `keep_best` is known at the steps of checkpoints."""
    if rules.keep_metric.startswith(_NOT_AT_CHECKPOINTS):
        yield ConfigError(
            f"{key}.keep_best uses {rules.keep_metric}, which is not known when the checkpoint of a step is made",
            where=f"{key}.keep_metric",
            fix=f"{key}.keep_metric={EVALUATED[0]}, or a metric of steps",
        )
    if not rules.keep_metric.startswith("evaluation/"):
        return  # steps have more metrics than are known here: those of the model and of callbacks
    if rules.keep_metric not in EVALUATED and not own_figures:
        near = get_close_matches(rules.keep_metric, EVALUATED, n=1) or EVALUATED
        yield ConfigError(
            f"{key}.keep_best uses {rules.keep_metric}, but an evaluation gives {' and '.join(EVALUATED)}",
            where=f"{key}.keep_metric",
            fix=f"{key}.keep_metric={near[0]}",
        )
        return
    if evaluated is None:
        yield ConfigError(
            f"{key}.keep_best needs {rules.keep_metric} at checkpoints, but only the last step is evaluated",
            where=f"{key}.keep_best",
            fix="evaluation.every=500 steps, for example, and checkpoint.every a multiple of it",
        )
        return
    if saved == "auto" or saved.unit == "seconds":
        yield ConfigError(
            f"{key}.keep_best needs {rules.keep_metric} at checkpoints, but those are made by the clock ({saved}), at"
            f" no certain step, and evaluations every {evaluated}",
            where=f"{key}.keep_best, checkpoint.every",
            fix=f"checkpoint.every={evaluated}",
        )
        return
    batches = train.batches
    steps = train.steps
    if train.tokens is not None:
        steps = batches.steps_for(train.tokens)
    if steps is None or any(next(batches.due_steps(every, steps), None) is None for every in (saved, evaluated)):
        return  # only the last step, which has both
    if batches.first_meeting(saved, evaluated, steps) is None:
        yield ConfigError(
            f"{key}.keep_best needs {rules.keep_metric} at checkpoints, but those are made every {saved}, evaluations"
            f" every {evaluated}, and no step before the last has both",
            where=f"{key}.keep_best, checkpoint.every",
            fix=f"checkpoint.every={evaluated}",
        )
        return
    sent = rules.every if isinstance(rules, RemoteConfig) else None
    if sent is None or sent.unit == "seconds":
        return  # every save is sent, or it is not known which
    if not any(batches.is_due(evaluated, step) for step in batches.thinned(batches.due_steps(saved, steps), sent)):
        yield ConfigError(
            f"{key}.keep_best needs {rules.keep_metric} at checkpoints, but those made every {saved} are uploaded every"
            f" {sent}, evaluations are made every {evaluated}, and no uploaded step before the last has one",
            where=f"{key}.keep_best, {key}.every",
            fix=f"{key}.every={evaluated}",
        )
