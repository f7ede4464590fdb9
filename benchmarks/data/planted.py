"""Real documents with near-duplicates planted among them, and the truth about which are similar.

The truth is worked out from sets of word n-grams in plain Python, without anything that Headway deduplicates with.
"""

from __future__ import annotations

import ast
import random
import re
import sys
import sysconfig
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

NGRAM = 5
_PROSE = (".md", ".rst", ".txt", "METADATA", "LICENSE", "COPYING", "NOTICE")
_HEADERS = [
    "Copyright the authors. All rights reserved. Redistribution and use in source and binary forms are permitted.",
    "Home | About | News | Archive | Contact | Sign in to comment on this article or share it with your friends",
    "This page was last changed on Tuesday and is available under the terms of the licence given below.",
]


@dataclass(frozen=True)
class Planted:
    """Texts, and of each planted copy: the numbers of original and copy, what was done, their similarity."""

    texts: list[str]
    pairs: list[tuple[int, int, str, float]]


def plant(count: int, seed: int = 0) -> Planted:
    """So many real documents; about a third of them copies of others, edited in ways that happen."""
    draw = random.Random(seed)
    originals = pieces(count - count // 3, draw)
    copies = []
    for number in draw.sample(range(len(originals)), min(count // 3, len(originals))):
        name = draw.choice(list(EDITS))
        copies.append((number, name, EDITS[name](originals[number], draw)))
    texts = originals + [text for _, _, text in copies]
    order = list(range(len(texts)))
    draw.shuffle(order)
    place = {old: new for new, old in enumerate(order)}
    pairs = [
        (place[number], place[len(originals) + copy], name, jaccard(shingles(originals[number]), shingles(text)))
        for copy, (number, name, text) in enumerate(copies)
    ]
    return Planted([texts[old] for old in order], pairs)


def pieces(count: int, draw: random.Random) -> list[str]:
    """Documents of 30 to 2,000 words: readme files, licences and documentation of the installed packages; docstrings of
    Python modules; and library sources."""
    texts: dict[str, None] = {}
    for text in _interleave([_prose(draw), _docstrings(draw), _sources(draw)]):
        words = re.split("(?<=\\s)(?=\\S)", text)
        start = 0
        while start < len(words) and len(texts) < count:
            length = int(30 * (2000 / 30) ** draw.random())
            piece = "".join(words[start : start + length])
            start += length
            if len(piece.split()) >= 30:
                texts[piece] = None
        if len(texts) >= count:
            break
    if len(texts) < count:
        sys.exit(f"only {len(texts)} documents are to be had here; ask for fewer")
    found = list(texts)
    draw.shuffle(found)
    return found


def _interleave(streams: Sequence[Iterator[str]]) -> Iterator[str]:
    streams = list(streams)
    while streams:
        for stream in list(streams):
            text = next(stream, None)
            if text is None:
                streams.remove(stream)
            else:
                yield text


def _read(paths: set[Path], draw: random.Random) -> Iterator[str]:
    for path in draw.sample(sorted(paths), len(paths)):
        try:
            yield path.read_text("utf-8")[:100_000]
        except (OSError, UnicodeDecodeError):
            continue


def _prose(draw: random.Random) -> Iterator[str]:
    files = [(each, file) for each in distributions() for file in each.files or [] if str(file).endswith(_PROSE)]
    return _read({Path(str(each.locate_file(file))) for each, file in files}, draw)


def _python_files() -> set[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    return {path for path in library.rglob("*.py") if "site-packages" not in path.parts}


def _sources(draw: random.Random) -> Iterator[str]:
    return _read(_python_files(), draw)


def _docstrings(draw: random.Random) -> Iterator[str]:
    packages = {path for path in Path(sysconfig.get_paths()["purelib"]).rglob("*.py") if "tests" not in path.parts}
    for source in _read(packages, draw):
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError, RecursionError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        yield "\n\n".join(filter(None, (ast.get_docstring(node) for node in nodes if isinstance(node, kinds))))


def _share(draw: random.Random) -> float:
    """Share of words touched: 0.1 % to 10 %, small ones as often as large ones."""
    return float(0.001 * 100 ** draw.random())


def _edit_words(text: str, draw: random.Random) -> str:
    """Words replaced or left out here and there."""
    words, share = text.split(" "), _share(draw)
    for place, word in enumerate(words):
        if draw.random() < share:
            words[place] = draw.choice([word + "s", "the", "some", draw.choice(words), ""])
    return " ".join(words)


def _insert(text: str, draw: random.Random) -> str:
    """With a passage of the same words, in another order, somewhere."""
    words = text.split(" ")
    length = max(1, round(len(words) * _share(draw) * 3))
    start, place = draw.randrange(len(words)), draw.randrange(len(words))
    return " ".join(words[:place] + words[start : start + length][::-1] + words[place:])


def _delete(text: str, draw: random.Random) -> str:
    """Without a passage."""
    words = text.split(" ")
    length = max(1, round(len(words) * _share(draw) * 3))
    place = draw.randrange(len(words))
    return " ".join(words[:place] + words[place + length :])


def _header(text: str, draw: random.Random) -> str:
    """With a site's header and footer around it."""
    return f"{draw.choice(_HEADERS)}\n\n{text}\n\n{draw.choice(_HEADERS)}"


def _layout(text: str, draw: random.Random) -> str:
    """The same words in another layout."""
    text = " ".join(text.split()).replace(",", " ,")
    return text.upper() if draw.random() < 0.3 else text


def _several(text: str, draw: random.Random) -> str:
    """Several of these at once."""
    for edit in draw.sample([_edit_words, _insert, _delete, _layout], 3):
        text = edit(text, draw)
    return text


EDITS: dict[str, Callable[[str, random.Random], str]] = {
    "words": _edit_words,
    "insertion": _insert,
    "deletion": _delete,
    "header and footer": _header,
    "layout": _layout,
    "several": _several,
}


def shingles(text: str) -> frozenset[int]:
    """The set of a text's n-grams of words in lower case, as Python's hashes (which agree within a process)."""
    text = unicodedata.normalize("NFC", text)
    words = "".join(c if unicodedata.category(c)[0] in "LNM" else " " for c in text).lower().split()
    return frozenset(hash(tuple(words[i : i + NGRAM])) for i in range(max(1, len(words) - NGRAM + 1)))


def jaccard(left: frozenset[int], right: frozenset[int]) -> float:
    """Shared part of two sets."""
    return len(left & right) / max(1, len(left | right))


def similar_pairs(texts: Sequence[str], threshold: float) -> dict[tuple[int, int], float]:
    """All pairs of texts that are at least so similar, by exact sets.

    Sets that are similar share one of their rarest elements (prefix filter: Chaudhuri, Ganti & Kaushik 2006), so only
    those few are looked up.
    """
    sets = [shingles(text) for text in texts]
    frequency = Counter(element for each in sets for element in each)
    index: dict[int, list[int]] = {}
    pairs = {}
    for number in sorted(range(len(sets)), key=lambda number: len(sets[number])):
        this = sets[number]
        ranked = sorted(this, key=lambda element: (frequency[element], element))
        prefix = ranked[: len(this) - int(-(-threshold * len(this) // 1)) + 1]
        candidates = {other for element in prefix for other in index.get(element, ())}
        for other in candidates:
            if len(sets[other]) >= threshold * len(this) and (value := jaccard(this, sets[other])) >= threshold:
                pairs[min(number, other), max(number, other)] = value
        for element in prefix:
            index.setdefault(element, []).append(number)
    return pairs
