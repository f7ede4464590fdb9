"""Findings of a benchmark in words; differences only where the repeats are significant."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from headway.config.strategies import DEEPSPEED, FOR_COPIES
from headway.core.format import counted, format_count
from headway.lab.bench.analysis import (
    COMMUNICATION,
    LOSS,
    SPEED,
    base_of,
    by_setting,
    common_parts,
    compare,
    differing_in_words,
    efficiency,
    good,
    ideal_efficiency,
    label,
    mean,
)
from headway.lab.bench.fitting import largest_models
from headway.lab.bench.results import CellResult
from headway.lab.bench.suite import flattened
from headway.lab.bench.wording import (
    ALIASES,
    failure_in_words,
    is_hidden,
    is_known,
    listed,
    one_line,
    percent,
    sentence,
    size_in_words,
    speed_in_words,
)

#: Largest relative difference of losses within one setting: strategies sum in different orders.
_SAME_LOSS = {"fp32": 1e-3}
_SAME_LOSS_ELSE = 1e-2
#: Share of processors in use by others above which a machine counts as shared; larger speed-ups than ideal are
#: impossible.
_BUSY = 0.1
_TOO_GOOD = 1.1


def findings(results: Sequence[CellResult]) -> list[str]:
    """Return sentences, the most important first; those that begin with a dash belong to the one before."""
    return [
        *_failures(results),
        *(f"Warning: {label(r, results)} was {one_line('; '.join(r.odd_endings))}." for r in results if r.odd_endings),
        *(f"Warning: {label(r, results)} is compared with nothing: {r.doubt}." for r in results if r.doubt is not None),
        *_once(results),
        *_busy(results),
        *largest_models(results),
        *_settings(results),
        *_deepspeed(results),
    ]


def _settings(results: Sequence[CellResult]) -> Iterator[str]:
    """Give each setting a line of its own, with its findings below, if there are several."""
    groups = by_setting(results)
    if len(groups) == 1:
        yield from _of_setting(next(iter(groups.values())))
        return
    said = {setting: list(_of_setting(group)) for setting, group in groups.items()}
    told = {setting: texts for setting, texts in said.items() if texts}
    if told and (common := common_parts(groups)):
        yield f"What follows is of {', '.join(common)}."
    for setting, texts in told.items():
        words = differing_in_words(setting, groups)
        yield f"{words[:1].upper()}{words[1:]}:"
        yield from (f"- {text}" for text in texts)


def _of_setting(group: Sequence[CellResult]) -> Iterator[str]:
    shown = good(group)
    for workers in sorted({r.cell.workers for r in shown}, reverse=True):
        same = [r for r in shown if r.cell.workers == workers]
        yield from _strategies(same, size_in_words(same[0]))
    yield from _scaling(group)
    yield from _communication(group)


def _once(results: Sequence[CellResult]) -> Iterator[str]:
    """Note that cells were measured once, so that no differences are reported. That does not mean that there are
    none."""
    found = good(results)
    if len(found) > 1 and all(len(r.measured) == 1 for r in found):
        yield (
            "Each cell was measured once, so the spread of repeats is unknown: no differences are reported"
            " (repeats=3 measures more)."
        )


def _busy(results: Sequence[CellResult]) -> Iterator[str]:
    """Note that other programs used the machine."""
    known = [repeat.busy_before for r in results for repeat in r.repeats if repeat.busy_before is not None]
    if known and statistics.median(known) > _BUSY:
        yield (
            f"Other programs used {percent(statistics.median(known))} of the processors before measurements (median):"
            " speeds are those of a shared machine."
        )


def _deepspeed(results: Sequence[CellResult]) -> Iterator[str]:
    """Note peculiarities of DeepSpeed that affect comparisons."""
    own = [dict(flattened(r.settings.get("config") or {})) for r in good(results) if r.cell.strategy in DEEPSPEED]
    if not all(config.get("parallel.deepspeed_config") for config in own):
        yield (
            "DeepSpeed allocates buckets of 500 million elements by default, however small the model"
            " (reduce_bucket_size; parallel.deepspeed_config says otherwise): that is part of its memory here."
        )


def _strategies(same: Sequence[CellResult], where: str) -> Iterator[str]:
    """Compare cells that differ by their strategy alone."""
    if len(same) < 2:
        return
    fastest = max(same, key=_speed)
    once = all(len(r.measured) == 1 for r in same)
    yield (
        f"Fastest on {where}{' in one measurement' if once else ''}: {fastest.cell.strategy} with"
        f" {format_count(_speed(fastest))} tokens/s{_near(fastest, same)}."
    )
    base = next((r for r in same if r.cell.strategy == FOR_COPIES), same[0])
    if same[0].cell.workers > 1 and not once:
        for result in same:
            if result is not base and is_known(result, base):
                yield f"{sentence(result, base, _doubt(same))} on {where}."
    for alias, ratio in _aliases(same):
        yield (
            f"{alias} and {ALIASES[alias]} are two names of one strategy; measured on {where} their speeds differ by a"
            f" factor of {max(ratio, 1 / ratio):.2f}: differences no larger than that are not told."
        )
    yield from _losses(same, where)


def _near(fastest: CellResult, same: Sequence[CellResult]) -> str:
    """Name strategies that may be as fast, and those with too few repeats to tell."""
    others = [r for r in same if r is not fastest]
    doubt = _doubt(same)
    known = [r for r in others if is_known(r, fastest)]
    hidden = [r.cell.strategy for r in known if is_hidden(r, fastest, doubt)]
    alike = [r.cell.strategy for r in known if speed_in_words(r, fastest) is None]
    # If the whole report has single repeats, it says so once.
    once = [r.cell.strategy for r in others if r not in known] if any(len(r.measured) > 1 for r in same) else []
    told = [
        f"; the repeats cannot tell {listed(alike)} from it" if alike else "",
        f"; {listed(hidden)} is slower by less than two names of one strategy differ" if len(hidden) == 1 else "",
        f"; {listed(hidden)} are slower by less than two names of one strategy differ" if len(hidden) > 1 else "",
        f"; no comparison is possible with {listed(once)}: it or {fastest.cell.strategy} was measured once"
        if once
        else "",
    ]
    return "".join(told)


def _speed(result: CellResult) -> float:
    found = mean(result, SPEED)
    assert found is not None, "it succeeded"
    return found.value


def _doubt(same: Sequence[CellResult]) -> float:
    """Return the difference in speed of two names of one strategy, as the logarithm of a ratio; 0 without such a
    pair."""
    return max((abs(math.log(ratio)) for _, ratio in _aliases(same)), default=0.0)


def _aliases(same: Sequence[CellResult]) -> Iterator[tuple[str, float]]:
    """Yield second names of strategies with the ratio of speeds to the first name's: how far to trust the figures."""
    by_name = {r.cell.strategy: r for r in same}
    for alias, name in ALIASES.items():
        if alias in by_name and name in by_name:
            found = compare(by_name[alias], by_name[name], SPEED)
            if found is not None:
                yield alias, found.ratio


def _losses(same: Sequence[CellResult], where: str) -> Iterator[str]:
    losses = {r.cell.strategy: found.value for r in same if (found := mean(r, LOSS)) is not None}
    if len(losses) < 2:
        return
    low = min(losses.values())
    high = max(losses.values())
    limit = _SAME_LOSS.get(same[0].cell.precision, _SAME_LOSS_ELSE)
    if high - low > limit * abs(low):
        shown = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        yield f"Warning: on {where} strategies do not have the same loss, as they should: {shown}."


def _scaling(group: Sequence[CellResult]) -> Iterator[str]:
    """Report for each strategy the gain of the largest successful number of workers."""
    most = dict[str, CellResult]()
    for result in sorted(good(group), key=lambda r: r.cell.workers):
        most[result.cell.strategy] = result
    for strategy, result in most.items():
        share = efficiency(result, group)
        base = base_of(result, group)
        if share is not None and base is not None and is_known(result, base):
            yield f"{strategy} {_speed_up(result, base, share)} ({result.cell.scaling} scaling)."


def _speed_up(result: CellResult, base: CellResult, share: float) -> str:
    told = compare(result, base, SPEED)
    assert told is not None, "efficiency has compared them"
    many = size_in_words(result)
    few = size_in_words(base)
    ideal = ideal_efficiency(result, base)
    units = "workers" if result.workers_per_machine is None else "machines"
    limit = "" if ideal == 1 else f"; the cores there are allow {percent(ideal)}"
    of_ideal = f"{percent(share)} of what as many times the {units} would ideally do"
    if not told.is_significant:
        return f"is no faster on {many} than on {few} that the repeats can tell, {of_ideal}{limit}"
    if share > _TOO_GOOD * ideal:
        limit += f", so {few} had less of the machine when measured"
    return f"does {told.ratio:.2f} times the tokens/s of {few} on {many}, {of_ideal}{limit}"


def _communication(group: Sequence[CellResult]) -> Iterator[str]:
    most = max((r.cell.workers for r in good(group)), default=1)
    known = [r for r in good(group) if r.cell.workers == most and mean(r, COMMUNICATION[1]) is not None]
    if not known:
        return
    low = min(known, key=_exposed)
    high = max(known, key=_exposed)
    yield (
        f"On {size_in_words(high)} communication that nothing hides takes {percent(_exposed(high))} of the"
        f" profiled steps with {high.cell.strategy}, waiting for others included{_against(high, low)}."
    )


def _against(high: CellResult, low: CellResult) -> str:
    """Name the other end of the range, if the repeats show a significant difference."""
    found = compare(low, high, COMMUNICATION[1])
    if found is None or low is high:
        return ""
    name = low.cell.strategy
    share = percent(_exposed(low))
    if not found.is_known:
        return f"; {name} has {share}, but at least one of the two was measured only once"
    return f", {name} the least with {share}" if found.is_significant else "; the repeats tell no strategy from another"


def _exposed(result: CellResult) -> float:
    found = mean(result, COMMUNICATION[1])
    return 0.0 if found is None else found.value


def _failures(results: Sequence[CellResult]) -> Iterator[str]:
    failed = [r for r in results if r.status not in ("ok", "excluded")]
    if failed:
        yield f"{len(failed)} of {counted(len(results), 'cell')} did not succeed:"
        yield from (f"- {label(r, results)}: {failure_in_words(r)}" for r in failed)
    partly = [r for r in results if r.status == "ok" and r.last_failure is not None]
    for result in partly:
        succeeded = counted(len(result.measured), "repeat")
        yield f"Of {label(result, results)} only {succeeded} succeeded: {failure_in_words(result)}."
    left_out = [r for r in results if r.status == "excluded"]
    if left_out:
        were = "was" if len(left_out) == 1 else "were"
        yield f"{counted(len(left_out), 'cell')} {were} left out by the suite:"
        yield from (f"- {label(r, results)}: {failure_in_words(r)}" for r in left_out)
