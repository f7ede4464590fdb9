"""Texts and short cuts that the tests of cleaning share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headway.config.sections.data import DataConfig
from headway.text.clean import CleanCounts, Cleaner

#: English prose that every filter keeps: 12 different lines, each a paragraph.
PROSE = "\n\n".join(
    [
        "The harbour was quiet when the first boats came back with the tide, and nobody on the quay spoke.",
        "An old woman sat on a crate to mend her nets, while two boys counted the lamps along the pier.",
        "It is said that a storm in that part of the world will be over before you have found your coat.",
        "We had bread with cheese, some apples and a bottle of water, which was enough until evening.",
        "Further up the hill stands a mill whose wheel has not turned since the river was led elsewhere.",
        "Its owner keeps bees now, and sells the honey to travellers who would rather have bought flour.",
        "You could see the islands from there, five of them, like the backs of animals asleep in the sea.",
        "My brother drew each one in his book and wrote under it what the fishermen had told him.",
        "None of the names were on our map, so we began to doubt the map and not the fishermen.",
        "Towards night a bell was rung, once for every boat that had not yet been made fast.",
        "Only one stroke came; then another lamp moved on the water and people began to go home.",
        "Next morning I asked who had been late, but everyone had a different answer to that.",
    ]
)

Clean = Callable[..., tuple[str | None, CleanCounts]]


@pytest.fixture
def prose() -> str:
    return PROSE


@pytest.fixture
def cleaner() -> Callable[..., Cleaner]:
    """A cleaner of steps given by names or as sections."""

    def make(*steps: Any) -> Cleaner:
        return Cleaner(DataConfig.model_validate({"clean": list(steps)}).clean)

    return make


@pytest.fixture
def reason(cleaner: Callable[..., Cleaner]) -> Callable[..., str | None]:
    """Why a step drops a text; None when it keeps it as it is."""

    def ask(text: str, step: str, **settings: Any) -> str | None:
        one = cleaner({"step": step, **settings})
        result = one.clean(text)
        counts = one.take_counts().steps[0]
        assert counts.documents_in == 1 and counts.documents_out == (result is not None)
        if result is not None:
            assert result == text
            return None
        (example,) = counts.examples
        assert example.kind == "dropped"
        found = [name for name in counts.reasons if example.reason.startswith(name) or name.startswith("few")]
        return found[0] if found else next(iter(counts.reasons))

    return ask
