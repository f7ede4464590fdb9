"""The largest model that fits, by strategy and number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.lab.bench.analysis import Setting, differing_in_words
from headway.lab.bench.results import CellResult, model_place
from headway.lab.bench.wording import listed, status_in_words, workers_in_words

HEADERS = ["Strategy", "Workers", "Largest model that fits", "Smallest larger one that does not"]


@dataclass(frozen=True)
class Fit:
    """One strategy on one number of workers, with all else equal."""

    setting: Setting
    """The setting without its model."""
    strategy: str
    workers: int
    largest: str | None
    """None if no model fits."""
    failed: CellResult | None
    """The smallest larger model that does not fit; None if the largest model of the suite fits."""


def fits(results: Sequence[CellResult]) -> list[Fit]:
    """Return the fits of settings with several models of which at least one ran out of memory."""
    asked = [r for r in results if r.status != "excluded"]
    if all(r.status != "out_of_memory" for r in asked):
        return []
    groups: dict[tuple[Setting, int, str], list[CellResult]] = {}
    for r in asked:
        setting = Setting.of(r)._replace(model="")
        groups.setdefault((setting, r.cell.workers, r.cell.strategy), []).append(r)
    several = ((key, group) for key, group in groups.items() if len({r.cell.model for r in group}) > 1)
    return [_fit(*key, group) for key, group in several]


def _fit(setting: Setting, workers: int, strategy: str, group: Sequence[CellResult]) -> Fit:
    ordered = sorted(group, key=lambda r: model_place(r.cell.model))
    succeeded = [r for r in ordered if r.status == "ok"]
    largest = succeeded[-1].cell.model if succeeded else None
    larger = ordered[ordered.index(succeeded[-1]) + 1 :] if succeeded else ordered
    return Fit(setting, strategy, workers, largest, larger[0] if larger else None)


def largest_models(results: Sequence[CellResult]) -> Iterator[str]:
    """Return one sentence for each number of workers."""
    found = fits(results)
    settings = list(dict.fromkeys(fit.setting for fit in found))
    for setting in settings:
        which = f", {differing_in_words(setting, settings)}" if len(settings) > 1 else ""
        for workers in dict.fromkeys(fit.workers for fit in found if fit.setting == setting):
            same = [fit for fit in found if (fit.setting, fit.workers) == (setting, workers)]
            yield f"Largest model that fits on {workers_in_words(workers)}{which}: {_by_model(same)}."


def _by_model(same: Sequence[Fit]) -> str:
    """List strategies by model: "1b with ddp and zero1; 13b, the largest asked, with zero3"."""
    names: dict[tuple[str | None, bool], list[str]] = {}
    for fit in same:
        names.setdefault((fit.largest, fit.failed is None), []).append(fit.strategy)
    return "; ".join(
        f"{largest or 'none'}{', the largest asked,' if whole else ''} with {listed(strategies)}"
        for (largest, whole), strategies in names.items()
    )


def table(results: Sequence[CellResult]) -> list[list[str]]:
    """Return a line per strategy and number of workers."""
    found = fits(results)
    settings = list(dict.fromkeys(fit.setting for fit in found))
    rows = []
    for fit in found:
        which = differing_in_words(fit.setting, settings)
        name = f"{fit.strategy} ({which})" if which else fit.strategy
        failure = "none: it was the largest asked"
        if fit.failed is not None:
            failure = f"{fit.failed.cell.model}: {status_in_words(fit.failed.status)}"
        rows.append([name, str(fit.workers), fit.largest or "none", failure])
    return rows
