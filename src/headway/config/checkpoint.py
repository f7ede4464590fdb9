"""When state is saved, where it goes, and how much of it is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from headway.config.base import Section
from headway.config.units import Duration, Interval, StepInterval
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.schema import Config

_URL = re.compile(r"^([a-z][a-z0-9+.-]*)://.", re.IGNORECASE)

#: What an evaluation records.
EVALUATED = ("evaluation/loss", "evaluation/perplexity")
#: What is recorded when a checkpoint has been made, or once in an attempt.
_NOT_AT_CHECKPOINTS = ("checkpoint/", "goodput/")


class RetentionConfig(Section):
    """What is kept of all checkpoints in one place: whatever any of the rules keeps."""

    keep: PositiveInt = 3
    """Newest checkpoints that are kept."""
    keep_every: Interval | None = None
    """Kept for ever besides: the first checkpoint at or after each multiple of `10k steps`, `1B tokens`, `6 h`."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Kept besides: so many with the best `keep_metric`."""
    keep_metric: str = "evaluation/loss"
    """Name of a metric, recorded at the very step of a checkpoint: `evaluation/loss`, `evaluation/perplexity`, or one
    that steps have."""
    keep_mode: Literal["min", "max"] = "min"
    """Which `keep_metric` is best: the lowest (`min`), or the highest."""
    keep_for: Duration | None = None
    """Kept besides: all that are younger than this, for example `2 days`."""


class RemoteConfig(RetentionConfig):
    """Copies of checkpoints in object storage or on a shared file system, from which a run goes on when its disk is
    gone ([checkpoint-tiers.md](checkpoint-tiers.md))."""

    url: str
    """`s3://bucket/folder`, `gs://...`, `az://...` or `file:///mnt/shared/runs`, which has to be there; the run's
    name is added to it."""
    every: Interval | None = None
    """How often a checkpoint is sent, by steps, tokens or time; each one that is saved when not given. The last one of
    a run is always sent."""
    encrypt: bool = False
    """Encrypt all that is sent, manifests too (AES-256-GCM), with the key in HEADWAY_ENCRYPTION_KEY or in the file that
    HEADWAY_ENCRYPTION_KEY_FILE names."""
    options: dict[str, Any] = {}
    """What `fsspec` needs to reach it: `endpoint_url`, `profile`, ... Credentials come from the environment; in a value
    `${NAME}` stands for a variable's content."""

    @field_validator("url")
    @classmethod
    def _can_be_written(cls, value: str) -> str:
        match = _URL.match(value)
        if match is None:
            raise ValueError(f"'{value}' is no URL; write s3://bucket/folder, or file:///mnt/shared for a folder")
        if match[1].lower() in ("http", "https"):
            raise ValueError("nothing can be written to a web address; s3://, gs://, az:// and file:// can be")
        scheme, _, path = value.partition("://")
        return f"{scheme}://{path.rstrip('/') or '/'}"


class CheckpointConfig(RetentionConfig):
    """When state is saved, and how much of it is kept."""

    every: Interval | Literal["auto"] = Interval(10 * 60, "seconds")
    """How often: `500 steps`, `1B tokens`, `10 min`; `auto` weighs what a save costs against how often runs fail (Daly
    2006). The last step is always saved."""
    memory_every: StepInterval | None = None
    """How often state is copied into host memory besides, in steps or tokens, where it outlives the worker: when that
    dies, its newest copy is written and the run goes on from there. Takes three times the memory of a worker's part of
    the state."""
    failures_per_day: Annotated[float, Field(gt=0.0)] | None = None
    """For `every: auto`: unplanned ends to expect; estimated from the run's own attempts when not given."""
    full_every: Interval | None = None
    """How often a checkpoint also holds config, provenance and the latest evaluation; each one when not given."""
    sign: bool = False
    """Sign manifests with the key in HEADWAY_SIGNING_KEY or in the file that HEADWAY_SIGNING_KEY_FILE names: an Ed25519
    key in PEM, or a secret for HMAC-SHA256. Whoever has the variable set accepts no others."""
    encrypt: bool = False
    """Encrypt weights and moments, wherever they lie (AES-256-GCM), with the key in HEADWAY_ENCRYPTION_KEY or in the
    file that HEADWAY_ENCRYPTION_KEY_FILE names; manifests can be read. It holds from the next save on."""
    remote: RemoteConfig | None = None
    """A second place for checkpoints; none when not given."""

    @field_validator("every", mode="before")
    @classmethod
    def _auto_or_interval(cls, value: Any) -> Any:
        return value if value == "auto" else Interval.parse(value)


def checkpoint_problems(config: Config) -> Iterator[ConfigError]:
    """What cannot work of the section `checkpoint`, beside the others."""
    checkpoint = config.checkpoint
    if checkpoint.failures_per_day is not None and checkpoint.every != "auto":
        yield ConfigError(
            "checkpoint.failures_per_day is for checkpoint.every=auto only",
            where="checkpoint.failures_per_day, checkpoint.every",
            fix="checkpoint.every=auto, or leave it out",
        )
    yield from _best_without_values(config, checkpoint, "checkpoint")
    if checkpoint.remote is not None:
        yield from _best_without_values(config, checkpoint.remote, "checkpoint.remote")
        scheme, _, path = checkpoint.remote.url.partition("://")
        if scheme.lower() in ("file", "local") and path[0] not in "/~":
            yield ConfigError(
                f"'{checkpoint.remote.url}' is a relative path, another folder wherever the command is given",
                where="checkpoint.remote.url",
                fix=f"{scheme}:///{path}, with three slashes, begins at the root",
            )


def _best_without_values(config: Config, rules: RetentionConfig, key: str) -> Iterator[ConfigError]:
    """The best by an evaluation can only be told where checkpoints are made at steps that are evaluated."""
    if not rules.keep_best:
        return
    if rules.keep_metric.startswith(_NOT_AT_CHECKPOINTS):
        yield ConfigError(
            f"{key}.keep_best goes by {rules.keep_metric}, which is not known of a step when its checkpoint is made",
            where=f"{key}.keep_metric",
            fix=f"{key}.keep_metric={EVALUATED[0]}, or a metric that steps have",
        )
    if not rules.keep_metric.startswith("evaluation/"):
        return  # steps have others too: those of the model, and what callbacks add
    if rules.keep_metric not in EVALUATED:
        near = get_close_matches(rules.keep_metric, EVALUATED, n=1) or EVALUATED
        yield ConfigError(
            f"{key}.keep_best goes by {rules.keep_metric}, but an evaluation gives {' and '.join(EVALUATED)}",
            where=f"{key}.keep_metric",
            fix=f"{key}.keep_metric={near[0]}",
        )
        return
    evaluated, saved = config.evaluation.every, config.checkpoint.every
    if evaluated is None:
        yield ConfigError(
            f"{key}.keep_best needs {rules.keep_metric} at checkpoints, but only the last step is evaluated",
            where=f"{key}.keep_best",
            fix="evaluation.every=500 steps, for example, and checkpoint.every a multiple of it",
        )
        return
    if saved != "auto" and saved.unit == evaluated.unit:
        one, other = sorted((saved.amount, evaluated.amount))
        if other % one == 0:
            return
    yield ConfigError(
        f"{key}.keep_best needs {rules.keep_metric} at checkpoints, but those are made every {saved} and evaluations"
        f" every {evaluated}",
        where=f"{key}.keep_best, checkpoint.every",
        fix=f"checkpoint.every={evaluated}",
    )
