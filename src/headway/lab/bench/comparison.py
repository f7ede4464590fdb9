"""Comparison of two sets of results, cell by cell: what has changed, and what else differs between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headway.core.format import counted, format_bytes, format_count
from headway.lab.bench.analysis import MEMORY, SPEED, compare, mean
from headway.lab.bench.results import CellResult
from headway.lab.bench.wording import (
    ONCE,
    is_known,
    listed,
    memory_in_words,
    one_line,
    speed_in_words,
    status_in_words,
)

#: A sentence with more names than this is hard to read.
_NAMES = 4
HEADERS = ["Cell", "Tokens/s before", "Tokens/s now", "Memory before", "Memory now", "What the repeats can tell"]


def changes(before: Sequence[CellResult], after: Sequence[CellResult]) -> list[list[str]]:
    """Return a line per cell: name, speed before and after, memory before and after, verdict."""
    return [[name, *_shown(a, b), _verdict(a, b)] for name, a, b in pairs(before, after)]


def _verdict(a: CellResult | None, b: CellResult | None) -> str:
    if a is None or b is None:
        return "only before" if b is None else "only now"
    if a.status != "ok" or b.status != "ok":
        was = status_in_words(a.status)
        now = status_in_words(b.status)
        return "as before" if a.status == b.status else f"{was} before, {now} now"
    if (doubt := b.doubt or a.doubt) is not None:
        return f"not compared: {doubt}{'' if b.doubt else ' before'}"
    if not is_known(b, a):
        return ONCE
    told = [speed_in_words(b, a), memory_in_words(b, a)]
    return ", ".join(f"{words} before" for words in told if words) or "no difference that the repeats can tell"


def summary(before: Sequence[CellResult], after: Sequence[CellResult]) -> str:
    """Describe what has become worse and better, in one sentence."""
    both = [(name, a, b) for name, a, b in pairs(before, after) if a is not None and b is not None]
    parts = []
    for words, holds in _KINDS:
        if names := [name for name, a, b in both if holds(a, b)]:
            more = [*names[:_NAMES], counted(len(names) - _NAMES, "other")] if len(names) > _NAMES + 1 else names
            parts.append(f"{len(names)} {words[len(names) > 1]} ({listed(more)})")
    of = f"Of {counted(len(both), 'cell')} that both have"
    return f"{of}, {'; '.join(parts)}." if parts else f"{of}, none differs in a way that the repeats can tell."


def _comparable(a: CellResult, b: CellResult) -> bool:
    return a.status == b.status == "ok" and a.doubt is None and b.doubt is None


def _differs(
    words: Callable[[CellResult, CellResult], str | None], more: bool
) -> Callable[[CellResult, CellResult], bool]:
    metric = SPEED if words is speed_in_words else MEMORY

    def holds(a: CellResult, b: CellResult) -> bool:
        found = compare(b, a, metric)
        return _comparable(a, b) and words(b, a) is not None and found is not None and (found.ratio > 1) == more

    return holds


#: Worse results come first; the words for one cell, and for several.
_KINDS: tuple[tuple[tuple[str, str], Callable[[CellResult, CellResult], bool]], ...] = (
    (("no longer succeeds", "no longer succeed"), lambda a, b: a.status == "ok" != b.status),
    (("is slower", "are slower"), _differs(speed_in_words, False)),
    (("needs more memory", "need more memory"), _differs(memory_in_words, True)),
    (("succeeds now", "succeed now"), lambda a, b: a.status != "ok" == b.status),
    (("is faster", "are faster"), _differs(speed_in_words, True)),
    (("needs less memory", "need less memory"), _differs(memory_in_words, False)),
    (
        ("cannot be compared, measured once", "cannot be compared, measured once"),
        lambda a, b: _comparable(a, b) and not is_known(b, a),
    ),
)


def other_conditions(before: Sequence[CellResult], after: Sequence[CellResult]) -> str | None:
    """Describe what else has changed between the compared cells of two sets; None if nothing has."""
    found = dict[str, list[str]]()
    for _, a, b in pairs(before, after):
        if a is None or b is None or a.conditions == b.conditions:
            continue
        old = a.known_conditions
        new = b.known_conditions
        for key in dict.fromkeys([*old, *new]):
            if (was := _plain(old.get(key))) != (now := _plain(new.get(key))):
                found.setdefault(key, []).append(f"{key}: {was} before, {now} now")
    if not found:
        return None
    said = [texts[0] for key, texts in found.items() if key != "source"]
    code = ["Headway's own code"] if "source" in found else []
    return f"Not only time has passed between the two; they differ in {'; '.join([*said, *code])}."


def _plain(value: object) -> str:
    return "none" if value in (None, "", [], {}) else one_line(str(value))


def pairs(
    before: Sequence[CellResult], after: Sequence[CellResult]
) -> Iterator[tuple[str, CellResult | None, CellResult | None]]:
    """Pair results of two sets, with a name: equal cells under equal conditions, or the only one that is left on each
    side."""
    by_name: dict[str, tuple[dict[str, CellResult], dict[str, CellResult]]] = {}
    for side, results in ((1, after), (0, before)):
        for r in results:
            by_name.setdefault(r.cell.name, ({}, {}))[side][r.conditions] = r
    for name, (old, new) in by_name.items():
        together: list[tuple[CellResult | None, CellResult | None]] = [(old[c], r) for c, r in new.items() if c in old]
        lone_old, lone_new = (
            [r for c, r in mine.items() if c not in other] for mine, other in ((old, new), (new, old))
        )
        if len(lone_old) == len(lone_new) == 1:
            together.append((lone_old[0], lone_new[0]))
        else:
            together += [(None, r) for r in lone_new] + [(r, None) for r in lone_old]
        for a, b in together:
            known = b or a
            assert known is not None
            yield (name if len(together) == 1 else f"{name} [{known.conditions}]"), a, b


def _shown(a: CellResult | None, b: CellResult | None) -> list[str]:
    figures = ((SPEED, format_count), (MEMORY, format_bytes))
    found = [(form, None if side is None else mean(side, metric)) for metric, form in figures for side in (a, b)]
    return [form(None if known is None else known.value) for form, known in found]
