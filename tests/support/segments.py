"""Runs that are changed on the way, and the text of their rows, counted by content."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from hypothesis import strategies as st

from headway.config import Config, resolve
from headway.data.feeding.segmented import SegmentedPlan

UNIT = 4  # tokens of the shortest row


def config_of(**values: Any) -> Config:
    sources = values.pop("sources", {"a": {}})
    train = {"steps": 40, "sequence_length": 16, "global_batch": 4, **values.pop("train", {})}
    data = {"sources": [{"path": name, "name": name, **of} for name, of in sources.items()], **values.pop("data", {})}
    return resolve(Config.model_validate({"train": train, "data": data, "model": {"preset": "1m"}, **values}))


def rows_of(config: Config, tokens: dict[str, list[int]]) -> dict[str, dict[int, list[int]]]:
    """What `concat` makes of sources with so many tokens in each part."""
    lengths = {config.train.sequence_length, *(s.sequence_length or 0 for s in config.data.mixture.stages)} - {0}
    return {name: {n: [max(0, p - 1) // n for p in parts] for n in lengths} for name, parts in tokens.items()}


class Run:
    """A run that is changed, and the text that its steps have used, counted by content."""

    def __init__(self, config: Config, tokens: dict[str, list[int]]) -> None:
        self.tokens = {name: list(parts) for name, parts in tokens.items()}
        self.segments = [config.begin_segment(0, "data-0", rows_of(config, self.tokens))]
        self.history = [copy.deepcopy(self.tokens)]
        self.config = config

    def change(self, step: int, config: Config, grown: dict[str, int] | None = None, new_epoch: bool = False) -> None:
        if grown:
            parts = max(map(len, self.tokens.values()))
            for name in grown:
                self.tokens.setdefault(name, [0] * parts)
            for name, of in self.tokens.items():
                of.append(grown.get(name, 0))
        before = [segment for segment in self.segments if segment.first_step < step]
        self.history = [*self.history[: len(before)], copy.deepcopy(self.tokens)]
        data = f"data-{sum(map(len, self.tokens.values()))}"
        self.segments = [*before, config.begin_segment(step, data, rows_of(config, self.tokens), new_epoch=new_epoch)]
        self.config = config

    @property
    def plan(self) -> SegmentedPlan:
        config = self.config.with_segments(self.segments)
        return SegmentedPlan(config.segments, config.segment_sections)

    def uses(self, first: int, last: int) -> Counter[tuple[str, int, int]]:
        """How often each smallest piece of text was used: (source, part, piece)."""
        plan, found = self.plan, Counter[tuple[str, int, int]]()
        for step in range(first, last):
            length = plan.sequence_length(step)
            segment = plan.segments[plan.number_at(step)]
            picks = plan.picks(step, 0, plan.step_rows(step))
            for source, row in zip(picks.sources.tolist(), picks.rows.tolist(), strict=True):
                name = plan.sources[source]
                for part, count in enumerate(segment.rows[name][length]):  # noqa: B007
                    if row < count:
                        break
                    row -= count
                for piece in range(row * length // UNIT, (row + 1) * length // UNIT):
                    found[name, part, piece] += 1
        return found


def pieces(tokens: dict[str, list[int]], length: int) -> set[tuple[str, int, int]]:
    """All text that rows of a length hold."""
    return {
        (name, part, piece)
        for name, parts in tokens.items()
        for part, count in enumerate(parts)
        for piece in range(max(0, count - 1) // length * (length // UNIT))
    }


CHANGES = st.fixed_dictionaries(
    {
        "after": st.integers(1, 12),
        "batch": st.sampled_from([2, 4, 8]),
        "length": st.sampled_from([16, 8, 4]),
        "seed": st.integers(0, 2),
        "mixed": st.booleans(),
        "grown": st.dictionaries(st.sampled_from("abc"), st.integers(0, 400), max_size=2),
    }
)


def changed_run(tokens: dict[str, int], changes: list[dict[str, Any]]) -> tuple[Run, int] | None:
    """A run with some changes, and the step of the last; None when one cannot be made."""
    run = Run(config_of(sources={name: {} for name in tokens}), {name: [count] for name, count in tokens.items()})
    step, length = 0, 16
    for change in changes:
        step += change["after"]
        length = change["length"] if length % change["length"] == 0 else length
        names = dict.fromkeys([*run.tokens, *change["grown"]])
        weights = {name: {"weight": 1 + number} if change["mixed"] else {} for number, name in enumerate(names)}
        config = config_of(
            sources=weights,
            seed=change["seed"],
            train={"global_batch": change["batch"], "sequence_length": length, "steps": 500},
        )
        grown = change["grown"] or None
        try:
            run.change(step, config, grown)
            _ = run.plan
        except Exception as error:
            if "has the weight" in str(error):  # a source that is too small for a row
                return None
            raise
    return run, step
