"""Long texts are cut where a pre-tokenizer ends a word anyway, and nowhere else."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.tokenizing import spec as tokenizer_spec
from headway.data.tokenizing.patterns import (
    _OTHER_SPELLINGS,
    ENDS,
    MARKS,
    ODD_ENDS,
    PATTERNS,
    SPACES,
    STOPS,
    ends_usual_words,
)
from headway.data.tokenizing.patterns import pre_tokenizer as usual
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.data.tokenizing.word_ends import word_ends
from headway.text.tokenizing.train import train_on

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXTS = st.text(alphabet="ab .,'1\n \té中\x1c_\"(=|-A9\u3000", min_size=30, max_size=200)


def split(regex: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}


def sequence(*steps: dict[str, Any], use_regex: bool = False) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [*steps, {**LEVEL, "use_regex": use_regex}]}


SUPERWORDS = r"\p{L}+(?: \p{L}+){0,3}|\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
DEEPSEEK = [
    split(r"\p{N}{1,3}"),
    split("[一-龥぀-ゟ゠-ヿ]+"),
    split(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
]
#: Pre-tokenizers, and what long texts with them may be cut before.
CASES: dict[str, tuple[dict[str, Any], frozenset[str]]] = {
    **{name: (usual(name), ENDS) for name in PATTERNS},
    **{f"tiktoken's {name}": (sequence(split(regex)), ENDS) for regex, name in _OTHER_SPELLINGS.items()},
    "starcoder": (sequence({"type": "Digits", "individual_digits": True}, use_regex=True), ENDS),
    "deepseek": (sequence(*DEEPSEEK), ENDS - ODD_ENDS),
    "superwords": (sequence(split(SUPERWORDS)), ENDS - {" "}),
    "superwords, then words": (sequence(split(SUPERWORDS), use_regex=True), ENDS - {" "}),
    "lines": (sequence(split(r"[^\n]+|\n")), frozenset("\n")),
    "merged with previous": (sequence(split(PATTERNS["cl100k"], "MergedWithPrevious")), frozenset()),
    "merged with next": (sequence(split(r"[\p{L}\s]", "MergedWithNext")), frozenset()),
    "superbpe": (sequence(split(r"(?=(\d{3})+(?!\d))| ?[^\s\p{L}\p{N}]{2,}[\r\n/]*| +(?!\S)")), frozenset()),
    "what stands before": (sequence(split(r"(?<= )\p{L}+|\s|[^\s]")), frozenset()),
    "the border of a word": (sequence(split(r"\p{L}+\b|.|\n")), frozenset()),
    "what stands behind": (sequence(split(r"\p{L}+(?=\s)|.|\n")), frozenset(STOPS + MARKS)),
    "the end": (sequence(split(r"\p{L}+$|.|\n")), frozenset()),
    "gaps": (sequence(split(r"\p{L}")), frozenset()),
    "punctuation": (sequence({"type": "Punctuation", "behavior": "Isolated"}, split(r"\p{L}+\s*")), frozenset()),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_pre_tokenizer_ends_words_before(name: str) -> None:
    pre_tokenizer, expected = CASES[name]
    found = word_ends(pre_tokenizer)
    if name == "punctuation":
        assert found == {end for end in STOPS + MARKS if end not in "$+=^`~"}
    else:
        assert found - ODD_ENDS == expected - ODD_ENDS
    assert ends_usual_words(pre_tokenizer) == (name in PATTERNS)
    assert not ends_usual_words(pre_tokenizer) or found == ENDS


@pytest.fixture(scope="module", params=[name for name in CASES if name not in PATTERNS])
def vocabulary(request: pytest.FixtureRequest) -> Tokenizer:
    """With merges of whatever its pre-tokenizer keeps together."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, trainers

    draw = random.Random(1)
    spec = json.loads(train_on([], 257).content)
    spec["pre_tokenizer"] = CASES[request.param][0]
    library = Library.from_str(json.dumps(spec))
    library.model = models.BPE()
    alphabet = sorted(token for token in spec["model"]["vocab"] if len(token) == 1)
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(["".join(draw.choices("ab  ,.1\n'中A(", k=150)) for _ in range(50)], trainer)
    return Tokenizer(library.to_str().encode(), "here")


@given(TEXTS)
@settings(max_examples=40, deadline=None)
def test_cuts_change_no_id(vocabulary: Tokenizer, text: str) -> None:
    whole = vocabulary._backend.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_spec, "PART_CHARACTERS", 8)
        assert vocabulary.encode_batch([text]) == [whole]


def test_words_that_spaces_do_not_end_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_spec, "PART_CHARACTERS", 10)
    monkeypatch.setattr(tokenizer_spec, "WORD_CHARACTERS", 20)
    spec = json.loads(train_on(["some words"], 300).content)

    def parts_of(name: str, text: str) -> list[str]:
        tokenizer = Tokenizer(json.dumps({**spec, "pre_tokenizer": CASES[name][0]}).encode(), "here")
        assert tokenizer.was_cut_otherwise == (name in ("superwords", "merged with previous"))
        return list(tokenizer.parts(text))

    for name in ("superwords", "merged with previous"):
        assert parts_of(name, "some words " * 20) == ["some words " * 20]
    assert len(parts_of("gpt2", "some words " * 20)) > 10
    assert parts_of("superwords", "some words and more, " * 3)[0] == "some words and more"
    assert len(parts_of("deepseek", "word" * 100)) > 10  # a word without end


PIECES = [
    r"\p{L}",
    r"\p{N}",
    r"\s",
    r"\S",
    r"[^\s\p{L}\p{N}]",
    r"[^\r\n\p{L}]",
    " ",
    ",",
    "a",
    ".",
    r"\d",
    r"\w",
    r"[\r\n]",
]
PIECES += [
    r"[\p{Lu}\p{Lo}]",
    "[a-c,]",
    r"\p{P}",
    "[^,]",
    r"\n",
    r"\W",
    "[0-9]",
    "[+-/]",
    r"\x2c",
    "(?=,)",
    r"(?!\s)",
    "$",
]
REPEATS = ["", "", "", "+", "*", "?", "{1,3}", "{2}", "++", "?+", "*+", "+?", "{0,2}"]


def some_pattern(draw: random.Random, depth: int = 2) -> str:
    def item() -> str:
        if depth and draw.random() < 0.3:
            return f"({draw.choice(['?:', '?:', '?>'])}{some_pattern(draw, depth - 1)}){draw.choice(REPEATS)}"
        piece = draw.choice(PIECES)
        return piece if piece[:2] in ("(?", "$") else piece + draw.choice(REPEATS)

    return "|".join("".join(item() for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(1, 3)))


@pytest.mark.parametrize("count", [pytest.param(400), pytest.param(20_000, marks=pytest.mark.slow)])
def test_any_pattern_splits_both_sides_of_a_word_end_as_they_are_together(count: int) -> None:
    from tokenizers import Regex, pre_tokenizers

    draw, shown = random.Random(count), 0
    for _ in range(count):
        pattern = some_pattern(draw)
        try:
            library = pre_tokenizers.Split(Regex(pattern), "isolated")
        except Exception:  # the library raises bare Exception: it is none
            continue
        ends = word_ends(split(pattern))
        shown += bool(ends)
        for _ in range(20 if ends else 0):
            text = "".join(draw.choices("ab A1,2. \n\r\té中'+-_\u3000、\x1c\u0301", k=draw.randint(2, 14)))
            whole = library.pre_tokenize_str(text)
            for at in range(1, len(text)):
                if text[at - 1].isalnum() and text[at] in ends:
                    halves = [library.pre_tokenize_str(part) for part in (text[:at], text[at:])]
                    assert [word for word, _ in whole] == [word for part in halves for word, _ in part], (pattern, text)
    assert shown > count / 100


def test_the_characters_are_those_that_python_and_people_know() -> None:
    assert set(SPACES) == {chr(code) for code in range(0x110000) if chr(code).isspace()}
    assert "'" not in ENDS and "_" not in ENDS and "-" not in ENDS
