"""The characters before which a pre-tokenizer certainly ends a word, so that a long text may be cut there.

A regular expression is parsed into a tree, whose possible matches are tracked over classes of characters: the kinds of
letters and digits, and each white space or mark before which a cut is wanted. A place between a letter or digit and
such a character is proved to be a border of words under two conditions. First, no match and no lookahead can have the
two next to each other. Second, a match finds the second character, or any letter or digit, wherever it occurs. Then the
two sides are split separately as they are together. A pattern that the parser does not support proves nothing.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from headway.data.tokenizing.patterns import ENDS, ODD_ENDS, PATTERNS, SPACES

_LETTERS = frozenset(("Lu", "Ll", "Lt", "Lm", "Lo"))
_WORD = _LETTERS | {"Nd", "Nl", "No"}
_ALL = _WORD | ENDS
_END = "end"  # the end of the text, which a lookahead may test
_CONTROLS = {"r": "\r", "n": "\n", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}


@dataclass(frozen=True)
class _Set:
    """A set of characters: all of the classes in `sure`, and some of the other classes in `may`."""

    may: frozenset[str]
    sure: frozenset[str] = frozenset()

    def inverted(self) -> _Set:
        return _Set(_ALL - self.sure, _ALL - self.may)


@dataclass(frozen=True)
class _Sequence:
    parts: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _Choice:
    branches: tuple[Any, ...]
    keeps: bool = False
    """It is possessive or atomic: it does not backtrack into its match."""


@dataclass(frozen=True)
class _Repeated:
    part: Any
    least: int
    most: float
    keeps: bool = False


@dataclass(frozen=True)
class _Look:
    """A lookahead; its part is None for the end of the text."""

    part: Any = None


class _UnsupportedError(Exception):
    pass


@dataclass
class _Facts:
    """The possible matches of a part of an expression."""

    empty: bool
    first: frozenset[str]
    last: frozenset[str]
    joined: set[str] = field(default_factory=set)
    """Those of `ENDS` that a match may have directly after a letter or digit."""


def word_ends(pre_tokenizer: dict[str, Any]) -> frozenset[str]:
    """Return those of `ENDS` before which a tokenizer.json's pre-tokenizer ends a word after any letter or digit."""
    open_ends = ENDS
    found = frozenset[str]()
    for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        neutral, borders = _step(step)
        open_ends &= neutral
        found |= open_ends & borders
        open_ends -= borders
    return found


def _step(step: dict[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Analyze one step of a pre-tokenizer.

    Returns:
        The ends at which the step splits the two sides separately as it does together; and those that it makes borders.
    """
    kind = step.get("type")
    pattern = step.get("pattern") or {}
    behavior = step.get("behavior")
    if kind == "ByteLevel" and not step.get("add_prefix_space", True):
        return _analyze(PATTERNS["gpt2"]) if step.get("use_regex", True) else (ENDS, frozenset())
    if kind == "Digits":
        return ENDS, frozenset()
    if kind == "Punctuation" and behavior in ("Isolated", "Contiguous"):
        return ENDS, frozenset(c for c in ENDS if unicodedata.category(c)[0] == "P")
    if kind == "Split" and behavior == "Isolated":
        return _analyze(pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"]))
    return frozenset(), frozenset()


@lru_cache(maxsize=64)
def _analyze(pattern: str) -> tuple[frozenset[str], frozenset[str]]:
    """Analyze a regular expression as `_step` does; its matches, and the texts between them, are words."""
    try:
        tree = _Parser(pattern).parse()
    except (_UnsupportedError, RecursionError, ValueError, OverflowError):
        return frozenset(), frozenset()
    facts = _facts(tree)
    if facts.empty:
        return frozenset(), frozenset()
    neutral = ENDS - facts.joined
    has_words = all(_finds(tree, kind) for kind in _WORD)
    return neutral, frozenset(end for end in neutral if has_words or _finds(tree, end))


def _facts(node: Any) -> _Facts:
    if isinstance(node, _Set):
        return _Facts(False, node.may, node.may)
    if isinstance(node, _Choice):
        parts = [_facts(branch) for branch in node.branches]
        first, last = (frozenset().union(*(getattr(part, name) for part in parts)) for name in ("first", "last"))
        return _Facts(any(part.empty for part in parts), first, last, set().union(*(part.joined for part in parts)))
    if isinstance(node, _Repeated):
        part = _facts(node.part)
        if node.most > 1:
            _join(part, part.last, part.first)
        return _Facts(part.empty or node.least == 0, part.first, part.last, part.joined)
    if isinstance(node, _Look):
        seen = _facts(node.part) if node.part is not None else _Facts(True, frozenset({_END}), frozenset())
        return _Facts(True, seen.first, frozenset(), seen.joined)
    whole = _Facts(True, frozenset(), frozenset())
    for part in map(_facts, node.parts):
        whole.joined |= part.joined
        _join(whole, whole.last, part.first)
        whole.first |= part.first if whole.empty else frozenset()
        whole.last = part.last | whole.last if part.empty else part.last
        whole.empty &= part.empty
    return whole


def _join(facts: _Facts, last: frozenset[str], first: frozenset[str]) -> None:
    if last & _WORD:
        facts.joined |= ENDS if _END in first else first & ENDS


def _finds(node: Any, kind: str) -> bool:
    """Return whether a node matches any character of a class wherever it occurs, alone or with the text after it."""
    if isinstance(node, _Set):
        return kind in node.sure
    if isinstance(node, _Choice):
        return any(_finds(branch, kind) for branch in node.branches)
    if isinstance(node, _Repeated):
        return node.least <= 1 and _finds(node.part, kind)
    if isinstance(node, _Sequence):
        for place, part in enumerate(node.parts):
            if _finds(part, kind) and all(map(_is_free, node.parts[place + 1 :])):
                return True
            if not _is_free(part) or (_keeps(part) and kind in _facts(part).first):
                return False
    return False


def _keeps(node: Any) -> bool:
    """Return whether some part of a node does not backtrack into its match."""
    inside = getattr(node, "branches", getattr(node, "parts", (node.part,) if isinstance(node, _Repeated) else ()))
    return getattr(node, "keeps", False) or any(map(_keeps, inside))


def _is_free(node: Any) -> bool:
    """Return whether a node can also match the empty string anywhere."""
    if isinstance(node, _Choice):
        return any(map(_is_free, node.branches))
    if isinstance(node, _Repeated):
        return node.least == 0 or _is_free(node.part)
    return isinstance(node, _Sequence) and all(map(_is_free, node.parts))


class _Parser:
    """Parses the subset of Oniguruma's syntax that patterns in use need."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def parse(self) -> Any:
        """Parse the pattern into a tree.

        Raises:
            _UnsupportedError: The pattern has other syntax.
        """
        tree = self._choice()
        if self._at < len(self._text):
            raise _UnsupportedError
        return tree

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise _UnsupportedError
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self, keeps: bool = False) -> Any:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return _Choice(tuple(branches), keeps)

    def _sequence(self) -> Any:
        parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._item()))
        return _Sequence(tuple(parts))

    def _repeated(self, part: Any) -> Any:
        while found := re.compile(r"[*+?]|\{(\d*),?(\d*)\}").match(self._text, self._at):
            if isinstance(part, _Look) or found[0] in ("{}", "{,}"):
                raise _UnsupportedError
            self._at = found.end()
            least, most = {"*": (0, float("inf")), "+": (1, float("inf")), "?": (0, 1)}.get(found[0]) or (
                int(found[1] or 0),
                int(found[2]) if found[2] else float("inf") if "," in found[0] else int(found[1]),
            )
            # After an interval, a plus is another repetition, not a possessive mark.
            keeps = found[0] in "*+?" and self._take("+")
            part = _Repeated(part, least, most, keeps)
            if not keeps:
                self._take("?")
        return part

    def _item(self) -> Any:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character == "\\":
            return _set_of(self._escape(in_class=False))
        if character == ".":
            return _Set(_ALL, _ALL - {"\n"})
        if character == "$":
            return _Look()
        if character in "^*+?{":
            raise _UnsupportedError
        return _literal(character)

    def _group(self) -> Any:
        is_look = self._take("?=") or self._take("?!")
        keeps = not is_look and self._take("?>")
        if not (is_look or keeps or self._take("?:") or self._take("?i:")) and self._text.startswith("?", self._at):
            raise _UnsupportedError
        inside = self._choice(keeps)
        if not self._take(")"):
            raise _UnsupportedError
        return _Look(inside) if is_look else inside

    def _class(self) -> _Set:
        is_inverted = self._take("^")
        items = list[_Set]()
        while not self._take("]"):
            start = self._at
            character = self._next()
            if character == "[" or self._text.startswith("&&", start):
                raise _UnsupportedError
            first = self._member(character)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                items.append(_range(first, self._member(self._next())))
            else:
                items.append(_set_of(first))
        if not items:
            raise _UnsupportedError
        together = _Set(frozenset().union(*(i.may for i in items)), frozenset().union(*(i.sure for i in items)))
        return together.inverted() if is_inverted else together

    def _member(self, character: str) -> Any:
        return self._escape(in_class=True) if character == "\\" else character

    def _escape(self, *, in_class: bool) -> Any:
        """Return the character that an escape stands for, or what else it means."""
        character = self._next()
        if character in "pP":
            return self._property(character == "P")
        if found := re.compile(r"x\{([0-9A-Fa-f]+)\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})").match(
            self._text, self._at - 1
        ):
            self._at = found.end()
            return chr(int(found[1] or found[2] or found[3], 16))
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character.lower() in _SHORT:
            found_set = _SHORT[character.lower()]
            return found_set if character.islower() else found_set.inverted()
        if character in "zZ" and not in_class:
            return _Look()
        if character.isalnum():
            raise _UnsupportedError
        return character

    def _property(self, is_inverted: bool) -> _Set:
        found = re.compile(r"\{(\^?)(\w+)\}|(\w)").match(self._text, self._at)
        if found is None:
            raise _UnsupportedError
        self._at = found.end()
        name = found[2] or found[3]
        if name[0] in "LMNPSZC" and len(name) <= 2:
            kinds = frozenset(kind for kind in _WORD if kind.startswith(name))
            ends = frozenset(end for end in ENDS if unicodedata.category(end).startswith(name))
            of_name = _Set(kinds | ends, kinds | ends)
        else:  # for example a script
            of_name = _Set(_ALL)
        return of_name.inverted() if is_inverted != bool(found[1]) else of_name


def _set_of(found: Any) -> Any:
    return _literal(found) if isinstance(found, str) else found


def _literal(character: str) -> _Set:
    if character in ENDS:
        return _Set(frozenset(character), frozenset(character))
    # Case may be ignored, so a letter may stand for other letters, too.
    return _Set(_LETTERS if character.isalpha() else _WORD if character.isalnum() else frozenset())


def _range(first: Any, last: Any) -> _Set:
    """Return the set of characters from one to another."""
    if not isinstance(first, str) or not isinstance(last, str):
        raise _UnsupportedError
    inside = frozenset(end for end in ENDS if first <= end <= last)
    is_plain = max(first, last) < "\x80" and not any(chr(n).isalnum() for n in range(ord(first), ord(last) + 1))
    return _Set(inside if is_plain else inside | _WORD, inside)


_SPACE_SET = frozenset(SPACES)
_SHORT = {
    "s": _Set(_SPACE_SET, _SPACE_SET - ODD_ENDS),
    "d": _Set(frozenset({"Nd", "Nl", "No"}), frozenset({"Nd"})),
    "w": _Set(_WORD, _LETTERS | {"Nd"}),
    "h": _Set(frozenset({"Lu", "Ll", "Nd"})),
}
