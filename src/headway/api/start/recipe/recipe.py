"""The config of a run on a folder, from one dial: minutes, size or depth."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.api.start.recipe.corpus import Corpus, look
from headway.api.start.recipe.rehearsal import Rehearsal, Sample, load, prepare_sample, rehearse
from headway.api.start.recipe.shapes import (
    TOKENS_PER_PARAMETER,
    Choice,
    choice_for,
    continued,
    depth_for,
    depth_for_size,
    vocabulary_for,
)
from headway.config import Config
from headway.config.loading.load import given_values
from headway.config.optimizers import DEFAULT_OPTIMIZER
from headway.core.console import notice
from headway.core.errors import ConfigError
from headway.core.files.scratch import scratch_folder
from headway.core.format import counted, format_count, format_seconds
from headway.models.facts import count_parameters

#: Minutes where no dial is given.
MINUTES = 10.0
#: Bytes of text that a run may always read.
_LEAST_BYTES = 20_000_000
#: Share of the minutes that a rehearsal takes, and its least and most seconds.
_REHEARSAL_SHARE = 0.04
_REHEARSAL_SECONDS = (6.0, 15.0)
#: Rehearsals of other shapes, at most.
_REHEARSALS = 3
#: Share of the minutes that preparation may take; of a larger folder a part is read.
_PREPARING_SHARE = 0.15
#: Evaluations of a run, their rows, and their share of its time at most.
_EVALUATIONS = 4
_EVALUATED_ROWS = 128
_EVALUATING_SHARE = 0.03
#: Times of the start of a run that checks before it, and evaluation, samples and export after it take together.
_AROUND = 2.5
#: Bytes of text that the first rehearsal assumes a run to see in a minute; a faster machine gets a larger vocabulary.
_BYTES_PER_MINUTE = 4e6
#: Depth of the first rehearsal.
_FIRST_DEPTH = 2


@dataclass(frozen=True)
class Dial:
    """How much is wanted: minutes of all, a number of parameters, or a depth; exactly one of them."""

    minutes: float | None = None
    parameters: int | None = None
    depth: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.minutes, self.parameters, self.depth) if value is not None]
        if len(given) != 1:
            where = "--minutes, --size, --depth"
            raise ConfigError("minutes, size and depth are one dial", where=where, fix="keep one of them")


@dataclass(frozen=True)
class Recipe:
    """A config, and in words why it is so."""

    values: dict[str, Any]
    """As in a file, with the user's overrides."""
    config: Config
    lines: tuple[str, ...]
    """The plan in six lines."""


def plan_run(path: str, dial: Dial, overrides: Sequence[str] = ()) -> Recipe:
    """Look at a folder, rehearse on a sample of it, and return the config that makes most of it.

    Args:
        path: Folder of text, or one file of it.
        dial: How much is wanted.
        overrides: `key.path=value` of the user, which win.

    Raises:
        HeadwayError: there is no text, or an override is wrong.
        SystemExit: the rehearsal failed, which has said why.
    """
    began = time.monotonic()
    corpus = look(path)
    notice(f"{path}: {corpus.describe()}")
    if corpus.is_one_piece:
        notice(
            "each text file is one document, and these are too few to hold some out for a validation loss: split them"
        )
    with scratch_folder("headway-recipe-") as folder:
        return _Planner(corpus, dial, list(overrides), began, folder).plan()


@dataclass
class _Planner:
    corpus: Corpus
    dial: Dial
    overrides: list[str]
    began: float
    """When the command began, by `time.monotonic`."""
    folder: Path
    vocabulary: int = field(init=False)
    source: dict[str, Any] = field(init=False)
    """The entry of `data.sources`."""
    read: int = field(init=False)
    """Bytes of the text that are read."""
    is_gpu: bool = False
    """Whether a rehearsal has run on one."""
    sample: Sample = field(init=False)
    text_tokens: float = field(init=False)
    """Tokens of the text that is read, about."""

    def plan(self) -> Recipe:
        """Rehearse until the shape stays, and put the config together."""
        seen_bytes = self.corpus.bytes
        if self.dial.minutes is not None:
            seen_bytes = min(seen_bytes, int(self.dial.minutes * _BYTES_PER_MINUTE))
        self.vocabulary = vocabulary_for(seen_bytes)
        self.source = self.corpus.source(None)
        depth = self.dial.depth or _FIRST_DEPTH
        if self.dial.parameters is not None:
            depth = depth_for_size(self.dial.parameters, self.vocabulary)
        choice = choice_for(depth, self.vocabulary, tokens=1e6)
        given = load(self._values(choice, 1), self.overrides, self.folder)
        if given.model.from_pretrained is not None:
            choice = continued(given.model.adapter is not None)
        has_shape = choice.depth is None or any(
            getattr(given.model, key) != choice.model.get(key) for key in ("dim", "layers")
        )
        notice("rehearsing the first steps on a sample of it")
        self._prepare_sample(choice)
        choice, seen = self._rehearse(choice)
        for _ in range(_REHEARSALS - 1):
            better = choice if has_shape or self.dial.minutes is None else self._better(choice, seen)
            if better.depth == choice.depth and seen.is_gpu == self.is_gpu:
                break
            self.is_gpu = seen.is_gpu  # what GPUs get is rehearsed too
            choice, seen = self._rehearse(better)
        return self._recipe(choice, seen)

    def _better(self, choice: Choice, seen: Rehearsal) -> Choice:
        """Return the choice for the compute that a rehearsal has shown, perhaps with a larger vocabulary."""
        tokens = seen.tokens_per_second * self._training_seconds(seen)
        larger = vocabulary_for(min(self.read, tokens * self.sample.bytes_per_token))
        if larger > self.vocabulary:
            self.vocabulary = larger
            self._prepare_sample(choice)
        depth = depth_for(tokens * choice.flops_per_token, self.text_tokens, self.vocabulary)
        return choice_for(depth, self.vocabulary, tokens)

    def _prepare_sample(self, choice: Choice) -> None:
        self.source = self.corpus.sample(self.folder / f"sample-{self.vocabulary}")
        self.sample = prepare_sample(self._values(choice, 1), self.overrides, self.folder)
        self.read = self.corpus.readable(self._limit())
        self.source = self.corpus.source(self.read)
        self.text_tokens = self.read / self.sample.bytes_per_token

    def _rehearse(self, choice: Choice) -> tuple[Choice, Rehearsal]:
        least, most = _REHEARSAL_SECONDS
        seconds = min(max((self.dial.minutes or MINUTES) * 60 * _REHEARSAL_SHARE, least), most)
        seen = rehearse(self._values(choice, 10**6), self.overrides, self.sample, seconds=seconds)
        if seen.precision == "fp32" and choice.optimizer != DEFAULT_OPTIMIZER:  # Muon, slow in it
            return self._rehearse(replace(choice, optimizer=DEFAULT_OPTIMIZER))
        return choice, seen

    def _training_seconds(self, seen: Rehearsal) -> float:
        """Return the seconds that are left for steps."""
        total = (self.dial.minutes or math.inf) * 60
        around = self.sample.seconds_for(self.read) + _AROUND * seen.start_seconds
        left = total - (time.monotonic() - self.began) - around
        return max(left, 0.1 * total) * (1 - _EVALUATING_SHARE)

    def _limit(self) -> int:
        """Return the bytes of text that are read at most."""
        if self.dial.minutes is None:
            return self.corpus.bytes
        return max(_LEAST_BYTES, int(self.sample.bytes_in(self.dial.minutes * 60 * _PREPARING_SHARE)))

    def _recipe(self, choice: Choice, seen: Rehearsal) -> Recipe:
        most = choice.most_epochs * self.text_tokens
        tokens = seen.tokens_per_second * self._training_seconds(seen)
        if self.dial.minutes is None:
            tokens = TOKENS_PER_PARAMETER * choice.parameters if choice.parameters else most
        is_cut = tokens > most
        tokens = min(tokens, most)
        draft = load(self._values(choice, 1), self.overrides, self.folder)
        per_step = draft.train.tokens_per_step
        steps = max(10, round(tokens / per_step))
        values = self._values(choice, steps)
        config = load(values, self.overrides, self.folder)
        values = given_values(self.folder / "config.yaml", self.overrides)
        return Recipe(values, config, self._lines(choice, config, seen, is_cut))

    def _lines(self, choice: Choice, config: Config, seen: Rehearsal, is_cut: bool) -> tuple[str, ...]:
        """Return the plan in six lines."""
        train = config.train
        assert train.steps is not None, "it is resolved"
        tokens = train.batches.tokens_before(train.steps)
        part = "" if self.read == self.corpus.bytes else f", of which the first {self.read / 1e6:,.0f} MB are read"
        passes = tokens / self.text_tokens
        why = f"; more than {choice.most_epochs} passes teach little, so it ends early" if is_cut else ""
        model = f"{config.model.from_pretrained} continued"
        if config.model.from_pretrained is None:
            parameters = count_parameters(config.model, config.model.vocab_size or self.vocabulary).total
            model = f"{format_count(parameters)} parameters: {counted(config.model.layers or 0, 'layer')} of width"
            model += f" {config.model.dim}, a vocabulary of {self.vocabulary:,}"
        seconds = tokens / seen.tokens_per_second / (1 - _EVALUATING_SHARE)
        around = self.sample.seconds_for(self.read) + _AROUND * seen.start_seconds
        spent = time.monotonic() - self.began
        rows = f"{train.global_batch_rows} rows of {train.sequence_length}"
        return (
            f"text      {self.corpus.bytes / 1e6:,.1f} MB{part}: about {format_count(self.text_tokens)} tokens",
            f"machine   {seen.hardware}, {seen.precision}: {format_count(seen.tokens_per_second)} tokens a second",
            f"model     {model}",
            f"training  {train.steps:,} steps of {rows}: {format_count(tokens)} tokens, {passes:.1f} passes{why}",
            f"update    {config.optimizer.name}, peak rate {config.optimizer.learning_rate:g}, {config.schedule.name}",
            f"time      {format_seconds(spent + around + seconds)}: {format_seconds(seconds)} of steps,"
            f" {format_seconds(around)} around them, {format_seconds(spent)} so far",
        )

    def _values(self, choice: Choice, steps: int) -> dict[str, Any]:
        """Return the config of a choice, as in a file."""
        data: dict[str, Any] = {"sources": [self.source], "bad_documents": "skip"}
        if choice.depth is not None:
            data["tokenizer"] = {"vocab_size": self.vocabulary}
        values: dict[str, Any] = {
            "name": self.corpus.name,
            "data": data,
            "model": choice.model,
            "train": {
                "steps": steps,
                "sequence_length": choice.length,
                "global_batch": choice.batch // choice.length,
                "precision": "auto",
            },
            "optimizer": {"name": choice.optimizer, "learning_rate": choice.rate},
            "schedule": {"name": "cosine", "warmup": "4%", "min_ratio": 0.02},
            "checkpoint": {"every": "5 min"},
            "evaluation": {"every": f"{max(1, steps // _EVALUATIONS)} steps", "rows": self._rows(choice, steps)},
        }
        if self.is_gpu:
            values["train"] |= {"compile": "auto", "micro_batch": "auto"}
        return {key: value for key, value in values.items() if value}

    def _rows(self, choice: Choice, steps: int) -> int:
        """Return the rows of an evaluation: a row costs about a third of one in training."""
        affordable = 3 * _EVALUATING_SHARE * steps * choice.batch / choice.length / _EVALUATIONS
        return int(min(_EVALUATED_ROWS, max(8, affordable)))
