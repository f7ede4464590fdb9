"""The cleaner as a whole: what comes out is a function of the text, and the counts add up."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.config.sections.data import DataConfig
from headway.text.clean import CleanCounts, Cleaner
from headway.text.clean.counts import EXAMPLES

Make = Callable[..., Cleaner]

#: All steps that need no extra; limits are such that each drops some of what comes, and some goes through.
STEPS: list[Any] = [
    {"step": "unicode", "control_characters": "remove"},
    {"step": "length", "min_words": 2, "max_characters": 60_000},
    {"step": "c4", "min_words_per_line": 2, "min_sentences": 1, "terminal_punctuation": False},
    {"step": "pii", "private_ips": True},
    {"step": "gopher_repetition", "max_duplicate_lines": 0.5},
    {"step": "gopher_quality", "min_words": 3, "min_stop_words": 0, "min_alphabetic_words": 0.5},
    {"step": "fineweb", "min_punctuated_lines": 0.0},
    "length",
]
STEPS[-1] = {"step": "length", "min_characters": 12}


def make(steps: list[Any] = STEPS) -> Cleaner:
    return Cleaner(DataConfig.model_validate({"clean": steps}).clean)


PIECES = st.sampled_from(
    [
        "The mill stands on the hill.",
        "Write to jane@web.de, or call 212-736-5000.",
        "A line of no use",
        "Its wheel [1] has not turned since cafe\u0301.",
        "from 192.168.1.7 came nothing",
        "- a bullet",
        "We use cookies here.",
        "lorem ipsum",
        "{ braces }",
        "語 \0 \x07",
        "\n\n",
        "   ",
        "and so on...",
        "# # #",
        "same same same same",
    ]
)
TEXTS = st.lists(PIECES, min_size=1, max_size=8).map("\n".join) | st.text(min_size=1, max_size=80)


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS, max_size=12), st.data())
def test_counts_of_parts_add_up_to_those_of_the_whole(texts: list[str], data: st.DataObject) -> None:
    whole = make()
    results = [whole.clean(text) for text in texts]
    total = whole.take_counts()
    cut = data.draw(st.integers(0, len(texts)))
    parts = make()
    again = [parts.clean(text) for text in texts[:cut]]
    merged = parts.take_counts()
    other = make()
    again += [other.clean(text) for text in texts[cut:]]
    merged.add(other.take_counts())
    assert again == results
    assert merged == total and merged.to_json() == total.to_json()
    assert CleanCounts.from_json(json.loads(json.dumps(total.to_json()))) == total

    before = len(texts), sum(len(text.encode()) for text in texts)
    for step in total.steps:
        assert (step.documents_in, step.bytes_in) == before
        before = step.documents_out, step.bytes_out
        assert sum(example.kind == "dropped" for example in step.examples) == min(
            EXAMPLES, step.documents_in - step.documents_out
        )
        assert all(len(example.text) <= 200 for example in step.examples)
        assert all(count > 0 for count in step.reasons.values())
    kept = [text for text in results if text is not None]
    assert before == (len(kept), sum(len(text.encode()) for text in kept))


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_a_kept_document_is_changed_the_same_without_its_filters(text: str) -> None:
    one = make()
    result = one.clean(text)
    one.take_counts()
    if result is not None:
        assert one.clean_kept(text) == result
        assert one.clean_kept(text) == result
        assert make().clean_kept(text) == result
    else:
        one.clean_kept(text)
    # Nothing that is not asked is counted.
    assert one.take_counts() == make().take_counts()


def test_real_files_the_same_alone_and_in_any_order() -> None:
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text("utf-8") for path in sorted(library.glob("*.py"))[:60]]
    forwards, backwards = make(), make()
    results = [forwards.clean(text) for text in texts]
    assert [backwards.clean(text) for text in reversed(texts)] == results[::-1]
    assert [make().clean(text) for text in texts] == results
    for text, result in zip(texts, results, strict=True):
        assert result is None or forwards.clean_kept(text) == result
    assert 0 < sum(result is not None for result in results) < len(texts)


def test_drop_reasons_are_grouped_and_examples_are_exact(cleaner: Make) -> None:
    one = cleaner({"step": "length", "min_words": 3})
    for number in range(EXAMPLES + 3):
        one.clean(f"text{number}")
    one.clean("a b")
    step = one.take_counts().steps[0]
    assert step.reasons == {"few words": EXAMPLES + 4}
    assert [example.text for example in step.examples] == [f"text{number}" for number in range(EXAMPLES)]
    assert step.examples[0].reason == "1 words < 3"


def test_changes_are_counted_and_shown_beside_drops(cleaner: Make) -> None:
    one = cleaner({"step": "c4", "min_sentences": 2})
    for _ in range(EXAMPLES + 2):
        one.clean("This is one line.\nMenu\nIt has no end here.\nThis is a second line.\nThis is a third line.")
        one.clean("This is one single line.")
    step = one.take_counts().steps[0]
    assert step.changed == EXAMPLES + 2 == step.documents_out
    assert [example.kind for example in step.examples].count("changed") == EXAMPLES
    assert [example.kind for example in step.examples].count("dropped") == EXAMPLES


def test_the_example_of_a_change_shows_its_place(cleaner: Make) -> None:
    one = cleaner("unicode")
    one.clean("x" * 1000 + "cafe\u0301" + "y" * 1000)
    (example,) = one.take_counts().steps[0].examples
    assert example.kind == "changed" and "cafe\u0301" in example.text and len(example.text) == 200


def test_steps_of_the_same_name_are_told_apart(cleaner: Make) -> None:
    one = cleaner({"step": "length", "min_words": 1}, "pii", {"step": "length", "max_words": 9})
    assert [step.name for step in one.take_counts().steps] == ["length", "pii", "length-2"]


def test_counts_start_anew_when_taken(cleaner: Make) -> None:
    one = cleaner("pii")
    one.clean("jane@web.de")
    assert one.take_counts().steps[0].reasons == {"e-mail address": 1}
    one.clean("no data")
    assert one.take_counts().steps[0].reasons == {}


def test_no_steps(cleaner: Make) -> None:
    one = cleaner()
    assert one.clean("text") == "text" and one.clean_kept("text") == "text"
    assert one.take_counts().steps == []


def test_counts_of_other_steps_do_not_add_up(cleaner: Make) -> None:
    with pytest.raises(ValueError, match="other steps"):
        cleaner("pii").take_counts().add(cleaner("unicode").take_counts())


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=400))
def test_no_text_breaks_a_step(text: str) -> None:
    one = make()
    one.clean(text)
    one.clean_kept(text)
