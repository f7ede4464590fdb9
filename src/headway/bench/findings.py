"""What the figures say, in words; of differences only those that the repeats can tell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from headway.bench.analysis import (
    COMMUNICATION,
    LOSS,
    MEMORY,
    SPEED,
    base_of,
    by_setting,
    compare,
    efficiency,
    good,
    ideal_efficiency,
    label,
    mean,
    setting_in_words,
)
from headway.bench.results import CellResult
from headway.bench.suite import flattened
from headway.config import DEEPSPEED
from headway.core.format import counted, format_bytes, format_count

#: Strategies that are another's under a second name.
ALIASES = {"fsdp": "zero3"}
#: How far losses of one setting may lie apart: strategies compute the same in another order.
_SAME_LOSS = {"fp32": 1e-3}
_SAME_LOSS_ELSE = 1e-2
#: Share of the processors in use from which on a machine counts as shared; speed-ups so far above the ideal cannot be.
_BUSY, _TOO_GOOD = 0.1, 1.1
#: A difference smaller than this share would be shown as 0.0 %.
_SHOWN = 0.0005


def findings(results: Sequence[CellResult]) -> list[str]:
    """One sentence each, the most important first."""
    return [
        *_failures(results),
        *_doubtful(results),
        *_once(results),
        *_busy(results),
        *_settings(results),
        *_deepspeed(results),
    ]


def _settings(results: Sequence[CellResult]) -> Iterator[str]:
    groups = by_setting(results)
    for setting, group in groups.items():
        which = f", {setting_in_words(setting, groups)}" if len(groups) > 1 else ""
        for workers in sorted({r.cell.workers for r in good(group)}, reverse=True):
            same = [r for r in good(group) if r.cell.workers == workers]
            yield from _strategies(same, _workers(workers) + which)
        yield from _scaling(group, which)
        yield from _communication(group, which)


def _once(results: Sequence[CellResult]) -> Iterator[str]:
    """Nothing is told of cells that were measured once; that they do not differ would be another thing to say."""
    found = good(results)
    if len(found) > 1 and all(len(r.measured) == 1 for r in found):
        yield (
            "Each cell was measured once, so nobody knows how much repeats differ: no differences are told"
            " (repeats=3 measures more)."
        )


def _busy(results: Sequence[CellResult]) -> Iterator[str]:
    """Others on the machine."""
    known = [repeat.busy_before for r in results for repeat in r.repeats if repeat.busy_before is not None]
    if known and statistics.median(known) > _BUSY:
        yield (
            f"Other programs used {percent(statistics.median(known))} of the processors before measurements (median):"
            " speeds are those of a shared machine."
        )


def _deepspeed(results: Sequence[CellResult]) -> Iterator[str]:
    """What would surprise whoever compares."""
    own = [dict(flattened(r.settings.get("config") or {})) for r in good(results) if r.cell.strategy in DEEPSPEED]
    if not all(config.get("parallel.deepspeed_config") for config in own):
        yield (
            "DeepSpeed allocates buckets of 500 million elements by default, however small the model"
            " (reduce_bucket_size; parallel.deepspeed_config says otherwise): that is part of its memory here."
        )


def _strategies(same: Sequence[CellResult], where: str) -> Iterator[str]:
    """Cells that differ by their strategy alone."""
    if len(same) < 2:
        return
    fastest, once = max(same, key=_speed), all(len(r.measured) == 1 for r in same)
    others = [] if once else [r for r in same if r is not fastest]
    near = [r.cell.strategy for r in others if not _speed_in_words(r, fastest, _doubt(same))]
    besides = f"; the repeats cannot tell {_listed(near)} from it" if near else ""
    yield f"Fastest on {where}: {fastest.cell.strategy} with {format_count(_speed(fastest))} tokens/s{besides}."
    if same[0].cell.workers > 1 and not once:
        base = next((r for r in same if r.cell.strategy == "ddp"), same[0])
        for result in same:
            if result is not base:
                yield f"{sentence(result, base, _doubt(same))} on {where}."
    yield from _aliases(same, where)
    yield from _losses(same, where)


def sentence(result: CellResult, base: CellResult, doubt: float = 0.0) -> str:
    """How a strategy's memory and speed compare with another's: "zero3 needs 43 % less memory than ddp and is 18 %
    slower here"; without the end of the sentence.

    Args:
        doubt: Differences in speed up to this are not told, as the logarithm of a ratio.
    """
    name, other = _label(result), _label(base)
    needs, runs = _memory_in_words(result, base), _speed_in_words(result, base, doubt)
    if needs and runs:
        return f"{name} needs {needs} {other} and is {runs.removesuffix(' than').removesuffix(' as')} here"
    if runs:
        return f"{name} is {runs} {other} here, with no difference in memory that the repeats can tell,"
    if needs:
        return f"{name} needs {needs} {other}, with no difference in speed that the repeats can tell,"
    return f"Between {name} and {other} there is no difference that the repeats can tell"


def _memory_in_words(result: CellResult, base: CellResult) -> str | None:
    """ "43 % less memory than"; None when there is no difference that can be told."""
    found = compare(result, base, MEMORY)
    if found is None or not found.is_told or abs(found.ratio - 1) < _SHOWN:
        return None
    if found.ratio >= 2:
        return f"{found.ratio:.1f} times as much memory as"
    return f"{percent(abs(found.ratio - 1))} {'less' if found.ratio < 1 else 'more'} memory than"


def _speed_in_words(result: CellResult, base: CellResult, doubt: float = 0.0) -> str | None:
    """ "18 % slower than"; None when there is no difference that can be told."""
    found = compare(result, base, SPEED)
    if found is None or not found.is_told or abs(math.log(found.ratio)) <= max(doubt, _SHOWN):
        return None
    if found.ratio >= 2:
        return f"{found.ratio:.1f} times as fast as"
    return f"{percent(abs(found.ratio - 1))} {'slower' if found.ratio < 1 else 'faster'} than"


def percent(share: float) -> str:
    """With as many digits as mean something."""
    return f"{share * 100:.0f} %" if share >= 0.095 else f"{share * 100:.1f} %"


def _speed(result: CellResult) -> float:
    found = mean(result, SPEED)
    assert found is not None, "it came out"
    return found.value


def _doubt(same: Sequence[CellResult]) -> float:
    """How far two names of one strategy are apart in speed, as the logarithm of a ratio; 0 without such a pair."""
    by_name = {r.cell.strategy: r for r in same}
    pairs = [(by_name[a], by_name[b]) for a, b in ALIASES.items() if a in by_name and b in by_name]
    found = [compare(first, second, SPEED) for first, second in pairs]
    return max((abs(math.log(d.ratio)) for d in found if d is not None), default=0.0)


def _aliases(same: Sequence[CellResult], where: str) -> Iterator[str]:
    """Two names of one thing show how far to trust the figures."""
    by_name = {r.cell.strategy: r for r in same}
    for alias, name in ALIASES.items():
        if alias in by_name and name in by_name and same[0].cell.workers > 1:
            found = compare(by_name[alias], by_name[name], SPEED)
            if found is not None:
                apart = max(found.ratio, 1 / found.ratio)
                yield (
                    f"{alias} and {name} are two names of one strategy; measured on {where} their speeds differ by a"
                    f" factor of {apart:.2f}: differences no larger than that are not told."
                )


def _losses(same: Sequence[CellResult], where: str) -> Iterator[str]:
    losses = {r.cell.strategy: found.value for r in same if (found := mean(r, LOSS)) is not None}
    if len(losses) < 2:
        return
    low, high = min(losses.values()), max(losses.values())
    limit = _SAME_LOSS.get(same[0].cell.precision, _SAME_LOSS_ELSE)
    if high - low > limit * abs(low):
        shown = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        yield f"Warning: on {where} strategies do not have the same loss, as they should: {shown}."


def _scaling(group: Sequence[CellResult], which: str) -> Iterator[str]:
    """Of each strategy, what the most workers bring."""
    most = max((r.cell.workers for r in good(group)), default=1)
    for result in good(group):
        share, base = efficiency(result, group), base_of(result, group)
        if result.cell.workers != most or share is None or base is None:
            continue
        told = compare(result, base, SPEED)
        if told is None or not told.is_told:
            continue
        ideal = ideal_efficiency(result, base)
        limit = "" if ideal == 1 else f"; the cores there are allow {percent(ideal)}"
        if share > _TOO_GOOD * ideal:
            limit += f", so {_workers(base.cell.workers)} had less of the machine when measured"
        yield (
            f"{result.cell.strategy} does {told.ratio:.2f} times the tokens/s of {_workers(base.cell.workers)} on"
            f" {_workers(most)}, {percent(share)} of what as many times the workers would ideally do{limit}"
            f" ({which.removeprefix(', ') or f'{result.cell.scaling} scaling'})."
        )


def _communication(group: Sequence[CellResult], which: str) -> Iterator[str]:
    most = max((r.cell.workers for r in good(group)), default=1)
    shares = {
        r.cell.strategy: found.value
        for r in good(group)
        if r.cell.workers == most and (found := mean(r, COMMUNICATION[1])) is not None
    }
    if shares:
        low, high = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
        other = f", {low} the least with {percent(shares[low])}" if low != high else ""
        where = f"{_workers(most)}{which}," if which else _workers(most)
        yield (
            f"On {where} communication that nothing hides takes {percent(shares[high])} of a step with {high},"
            f" waiting for others included{other}."
        )


def _failures(results: Sequence[CellResult]) -> Iterator[str]:
    failed = [r for r in results if r.status not in ("ok", "excluded")]
    if failed:
        yield f"{len(failed)} of {counted(len(results), 'cell')} did not come out:"
        yield from (f"- {label(r, results)}: {failure_in_words(r)}" for r in failed)
    partly = [r for r in results if r.status == "ok" and r.last_failure is not None]
    for result in partly:
        came_out = counted(len(result.measured), "repeat")
        yield f"Of {label(result, results)} only {came_out} came out: {failure_in_words(result)}."
    left_out = [r for r in results if r.status == "excluded"]
    if left_out:
        were = "was" if len(left_out) == 1 else "were"
        yield f"{counted(len(left_out), 'cell')} {were} left out by the suite:"
        yield from (f"- {label(r, results)}: {failure_in_words(r)}" for r in left_out)


def _doubtful(results: Sequence[CellResult]) -> Iterator[str]:
    for result in results:
        if result.doubt is not None:
            yield f"Warning: {label(result, results)} is compared with nothing: {result.doubt}."


def failure_in_words(result: CellResult, characters: int = 1000) -> str:
    """How and why the newest repeat that did not come out ended, in so many characters at most."""
    failure = result.last_failure
    if failure is None:
        return ""
    reason = (failure.reason or "").strip()
    short = reason if len(reason) <= characters else f"{reason[: characters - 1]}…"
    return f"{failure.status.replace('_', ' ')}: {short}"


def changes(before: Sequence[CellResult], after: Sequence[CellResult]) -> list[list[str]]:
    """Two sets of results, cell by cell: name, speed before and after, memory before and after, what can be told."""
    rows = []
    for name, a, b in pairs(before, after):
        if a is None or b is None:
            verdict = "only in the first" if b is None else "only in the second"
        elif a.status != "ok" or b.status != "ok":
            verdict = "as before" if a.status == b.status else f"{a.status} before, {b.status} now"
        elif (doubt := b.doubt or a.doubt) is not None:
            verdict = f"not compared: {doubt}{'' if b.doubt else ' before'}"
        else:
            told = [_speed_in_words(b, a), _memory_in_words(b, a)]
            verdict = (
                ", ".join(f"{words} before" for words in told if words) or "no difference that the repeats can tell"
            )
        rows.append([name, *_shown(a, b), verdict])
    return rows


def other_conditions(before: Sequence[CellResult], after: Sequence[CellResult]) -> str | None:
    """What else has changed between the cells of two sets that are compared; None when nothing has."""
    found = dict[str, list[str]]()
    for _, a, b in pairs(before, after):
        if a is None or b is None or a.conditions == b.conditions:
            continue
        old, new = a.known_conditions, b.known_conditions
        for key in dict.fromkeys([*old, *new]):
            if (was := _plain(old.get(key))) != (now := _plain(new.get(key))):
                found.setdefault(key, []).append(f"{key}: {was} before, {now} now")
    if not found:
        return None
    said = [texts[0] for key, texts in found.items() if key != "source"]
    code = ["Headway's own code"] if "source" in found else []
    return f"Not only time has passed between the two; they differ in {'; '.join([*said, *code])}."


def _plain(value: object) -> str:
    return "none" if value in (None, "", [], {}) else str(value)


def pairs(
    before: Sequence[CellResult], after: Sequence[CellResult]
) -> Iterator[tuple[str, CellResult | None, CellResult | None]]:
    """What goes together of two sets, with its name: the same cell under the same conditions, or else the only one of
    either side that is left of a cell."""
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
    def text(result: CellResult | None, memory: bool) -> str:
        found = mean(result, MEMORY if memory else SPEED) if result is not None else None
        return (format_bytes if memory else format_count)(None if found is None else found.value)

    return [text(a, False), text(b, False), text(a, True), text(b, True)]


def _label(result: CellResult) -> str:
    name = result.cell.strategy
    return f"{name} (another name of {ALIASES[name]})" if name in ALIASES else name


def _workers(count: int) -> str:
    return "one worker" if count == 1 else f"{count} workers"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
