"""C4's and FineWeb's rules: each drops or cuts, and leaves what is just inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import DataError
from headway.text.clean import Cleaner

Ask = Callable[..., str | None]
Make = Callable[..., Cleaner]

LINES = [
    "One day the ferry did not come.",
    'The boy asked: "Where has it gone?"',
    "Nobody on the quay could tell!",
    "So they waited until the evening.",
]


def through(cleaner: Cleaner, text: str) -> tuple[str | None, dict[str, int]]:
    result = cleaner.clean(text)
    return result, dict(cleaner.take_counts().steps[0].reasons)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("A menu entry without any end", "lines without terminal punctuation"),
        ("This sentence was cut off somewhere...", "lines without terminal punctuation"),
        ("Read more about it.", "lines of few words"),
        ("Please enable JavaScript to see this page.", "lines with Javascript"),
        ("We have a new Privacy Policy for you.", "lines on policies"),
        ("This site uses cookies to know you.", "lines on policies"),
        ("See the log of this run: " + "x" * 1001 + ".", "lines with a long word"),
    ],
)
def test_c4_lines(line: str, reason: str, cleaner: Make) -> None:
    kept = "\n".join(LINES)
    assert through(cleaner("c4"), kept) == (kept, {})
    assert through(cleaner("c4"), f"{LINES[0]}\n{line}\n" + "\n".join(LINES[1:])) == (kept, {reason: 1})


def test_c4_lines_just_inside(cleaner: Make) -> None:
    text = "\n".join(
        [*LINES, "It has these five words.", "A Java script is no harm.", "A word of " + "x" * 990 + " it is."]
    )
    assert through(cleaner("c4"), text) == (text, {})


def test_c4_removes_citations_and_blank_lines(cleaner: Make) -> None:
    last = "But [this] and [12a] stay as they are."
    text = f"\n  {LINES[0]} [12]\n\n{LINES[1]}[citation needed]\n{LINES[2]} [edit]\n{last}\n"
    expected = "\n".join([*LINES[:3], last])
    assert through(cleaner("c4"), text) == (expected, {"citation markers removed": 3})
    result, _ = through(cleaner({"step": "c4", "citations": False, "terminal_punctuation": False}), text)
    assert result is not None and "[12]" in result


def test_c4_asks_what_is_left_without_citations(cleaner: Make) -> None:
    lines = ["The first line is a plain one.", "Our privacy[2] policy is in this line.", "So is the java[1]script one."]
    step = cleaner({"step": "c4", "min_sentences": 0})
    text = "\n".join(lines)
    assert step.clean(text) == step.clean_kept(text) == lines[0]


def test_c4_pages(cleaner: Make) -> None:
    page = "\n".join(LINES)
    assert through(cleaner("c4"), "\n".join(LINES[:2]))[1] == {"few sentences": 1}
    assert through(cleaner("c4"), "\n".join(LINES[:3]))[0] is not None
    # Three sentences in two lines.
    assert through(cleaner("c4"), "It rained. Then it did not.\n" + LINES[0])[0] is not None
    # The rule looks at the page, also at lines that go.
    assert through(cleaner("c4"), f"{page}\nfunction f() {{")[1] == {"curly bracket": 1}
    assert through(cleaner("c4"), f"{page}\nLorem Ipsum dolor")[1] == {"lorem ipsum": 1}
    assert through(cleaner("c4"), f"{page}\nLorem and ipsum")[0] == page
    off = {"step": "c4", "curly_brackets": False, "lorem_ipsum": False, "min_sentences": 0}
    assert through(cleaner(off), f"{LINES[0]}\n{{ lorem ipsum")[0] == LINES[0]


def test_c4_blocked_words(tmp_path: Path, cleaner: Make) -> None:
    words = tmp_path / "words.txt"
    words.write_text("Gnarl\ntwo  Words\n\nc++\n", "utf-8")
    step = {"step": "c4", "blocked_words": words}
    page = "\n".join(LINES)
    for text in ("A GNARL was seen there.", "We saw two words here.", "In C++ it is so."):
        assert through(cleaner(step), f"{page}\n{text}") == (None, {"blocked word": 1})
    for text in ("A gnarled tree was seen there.", "We saw two other words.", "In C it is also so."):
        assert through(cleaner(step), f"{page}\n{text}")[0] == f"{page}\n{text}"
    words.write_text("gnarl\n", "utf-8-sig")
    assert through(cleaner(step), f"{page}\nA gnarl was seen there.") == (None, {"blocked word": 1})
    words.write_text("\n", "utf-8")
    with pytest.raises(DataError, match="is empty"):
        cleaner(step)
    with pytest.raises(DataError, match="cannot be read"):
        cleaner({"step": "c4", "blocked_words": tmp_path / "absent"})


def test_c4_counts_a_page_without_lines_as_dropped(cleaner: Make) -> None:
    result, reasons = through(cleaner({"step": "c4", "min_sentences": 0}), "no line is left")
    assert result is None and reasons == {"lines without terminal punctuation": 1, "nothing left": 1}


def rows(count: int, end: str, length: int = 40) -> list[str]:
    return [f"{i:03d} ".ljust(length - len(end), "x") + end for i in range(count)]


def test_fineweb_prose(prose: str, reason: Ask) -> None:
    assert reason(prose, "fineweb") is None


@pytest.mark.parametrize("end", [".", "!", "?", "。", "؟"])
def test_fineweb_punctuation(end: str, reason: Ask) -> None:
    assert reason("\n".join(rows(13, end) + rows(100, "")[13:]), "fineweb") is None
    assert reason("\n".join(rows(12, end) + rows(100, "")[12:]), "fineweb") == "lines with terminal punctuation"


def test_fineweb_duplicates(reason: Ask) -> None:
    different = rows(91, ".")
    assert reason("\n".join(different + different[:9]), "fineweb") is None
    assert reason("\n\n".join(different[:90] + different[:10]), "fineweb") == "duplicate line characters"


def test_fineweb_short_lines(reason: Ask) -> None:
    assert reason("\n".join(rows(66, ".", 29) + rows(100, ".", 30)[66:]), "fineweb") is None
    assert reason("\n".join(rows(67, ".", 29) + rows(100, ".", 30)[67:]), "fineweb") == "short lines"
    limits: dict[str, Any] = {"short_line": 20, "max_short_lines": 0.5}
    assert reason("\n".join(rows(67, ".", 29) + rows(100, ".", 30)[67:]), "fineweb", **limits) is None


def test_fineweb_without_lines(reason: Ask) -> None:
    assert reason(" \n\t\n", "fineweb") == "no lines"


@pytest.mark.parametrize("step", ["c4", "fineweb", "gopher_quality", "gopher_repetition"])
@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_lines_end_in_carriage_returns_too(cleaner: Make, prose: str, step: str, end: str) -> None:
    """Rules about lines find the same in a text whatever ends its lines."""
    menu = "\n".join(["Home", "- About us...", "Read more", "Home", "Home", *LINES])
    settings = {"min_words": 1} if step == "gopher_quality" else {}
    for text in (
        prose,
        f"- A list of one.\n{prose}",
        menu,
        "\n".join(LINES * 4),
        "\n\n".join([*LINES, *LINES, "Something else is here."]),
    ):
        expected, found = (
            through(cleaner({"step": step, **settings}), form) for form in (text, text.replace("\n", end))
        )
        kept = expected[0] is not None
        assert (found[0] is not None, found[1]) == (kept, expected[1])
        assert step != "c4" or found[0] == expected[0]
