"""A comparison for people: sentences and tables, on a page with the curves first, in Markdown, or on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headway.core.files.atomic import write_text
from headway.core.format import UNKNOWN
from headway.lab.compare.evidence import DIFFERENCES, Difference, Evidence, ItemDifference, Margin
from headway.telemetry import html
from headway.telemetry.curves import half_window, smooth
from headway.telemetry.markdown import in_markdown, markdown_table
from headway.telemetry.overlay import overlay_chart
from headway.telemetry.runs import difference_rows, result_rows

if TYPE_CHECKING:
    from headway.lab.compare.compare import Compared

#: Changed config keys that a comment on a pull request lists.
_MOST_KEYS = 20
#: Points of a curve in a comment.
_CURVE_POINTS = 30


def verdicts(compared: Compared) -> list[str]:
    """Return one sentence on each model, or why there is none."""
    evidence = compared.evidence
    if evidence is None:
        return [] if compared.why_not is None else [f"No evidence: {compared.why_not.what}."]
    baseline = compared.groups[0].name
    return [_verdict(one, baseline, evidence, compared.wanted.margin) for one in evidence.overall]


def _verdict(one: Difference, baseline: str, evidence: Evidence, margin: Margin | None) -> str:
    estimate = one.absolute
    unit = evidence.unit.name
    interval = f"95 % interval {estimate.low:+.4f} to {estimate.high:+.4f}"
    size = f"{abs(estimate.effect):.4f} {unit} ({_percent(abs(one.relative.effect))})"
    if estimate.effect == 0 == estimate.standard_error:
        text = f"{one.model} and {baseline} have the same loss on every document."
    elif one.is_shown:
        direction = "lower" if estimate.effect < 0 else "higher"
        text = f"{one.model} has a {direction} loss than {baseline}, by {size}, {interval}."
    else:
        share = estimate.detectable / one.baseline_loss
        text = (
            f"No difference between {one.model} and {baseline} is shown: {estimate.effect:+.4f} {unit}, {interval}."
            f" These {evidence.documents:,} documents would show one of {_percent(share)} in 80 % of all cases."
        )
    if margin is None:
        return text
    if one.is_non_inferior(margin):
        return f"{text} It is non-inferior within {margin.text}."
    low = one.relative.low if margin.is_relative else one.absolute.low
    if low > margin.amount:
        return f"{text} It is worse by more than {margin.text}."
    return f"{text} It is not shown to be non-inferior within {margin.text}: more documents may tell."


LOSS_HEADERS = ("Model", "Documents", "Loss", "Difference", "95 % interval", "Relative", "p (Holm)")


def loss_rows(differences: Sequence[Difference]) -> list[list[str]]:
    """Return a row of figures for each difference in loss."""
    return [
        [
            one.model if one.source is None else f"{one.model}, {one.source}",
            f"{one.absolute.documents:,}",
            f"{one.loss:.4f}",
            f"{one.absolute.effect:+.4f}",
            f"{one.absolute.low:+.4f} to {one.absolute.high:+.4f}",
            _percent(one.relative.effect, "+"),
            _p_text(one.corrected_p_value),
        ]
        for one in differences
    ]


ITEM_HEADERS = ("Model", "Benchmark", "Items", "Baseline", "Value", "Difference", "95 % interval", "p (Holm)")


def item_rows(items: Sequence[ItemDifference]) -> list[list[str]]:
    """Return a row of figures for each benchmark."""
    return [
        [
            one.model,
            f"{one.task} {one.metric}" + ("" if one.higher_is_better else " (lower is better)"),
            f"{one.estimate.documents:,}",
            f"{one.baseline:.4f}",
            f"{one.value:.4f}",
            f"{one.estimate.effect:+.4f}",
            f"{one.estimate.low:+.4f} to {one.estimate.high:+.4f}",
            _p_text(one.corrected_p_value),
        ]
        for one in items
    ]


def _percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.2f} %"


def _p_text(p_value: float) -> str:
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def _power_rows(evidence: Evidence) -> list[list[str]]:
    rows = []
    for one in evidence.overall:
        if not one.over_seeds and one.relative.standard_error:
            needed = [f"{one.relative.documents_for(difference):,}" for difference in DIFFERENCES]
            rows.append([one.model, _percent(one.absolute.detectable / one.baseline_loss), *needed])
    return rows


def _how(evidence: Evidence, baseline: str) -> list[str]:
    """Say how the figures were made."""
    overall = evidence.overall[0]
    what = f"{evidence.corpus}: {evidence.documents:,} documents, {evidence.tokens:,} tokens."
    methods = dict.fromkeys(one.absolute.method for one in (*evidence.overall, *evidence.by_source))
    return [
        f"Losses are in {evidence.unit.name}; lower is better. {baseline} has {overall.baseline_loss:.4f}.",
        f"Documents: {what} All models were evaluated on the same ones, and each document counts as a whole, since its"
        " tokens depend on each other.",
        *(f"- {method}" for method in methods),
        *(f"- {note}" for note in evidence.notes),
        "p-values are corrected for the number of comparisons in their table (Holm 1979).",
    ]


def write_page(compared: Compared, output: Path) -> Path:
    """Write the comparison as one page: curves, evidence, results, and what differs in the configs."""
    names = compared.runs.names
    curves = compared.curves
    tokens = {name: runs for name, runs in curves.items() if all(run.is_language_model for run in runs)}
    charts = [overlay_chart(curves, "step"), overlay_chart(tokens, "tokens"), overlay_chart(curves, "time")]
    drawn = "".join(f'<div class="charts">{html.figure(chart)}</div>' for chart in charts if chart)
    numeric = range(1, len(names) + 1)
    changed = html.table(["Key", *names], difference_rows(compared.runs))
    text = html.page(
        "Comparison · Headway",
        [
            html.heading("Comparison", None, ", ".join(group.name for group in compared.groups)),
            html.paragraphs(verdicts(compared)),
            drawn or '<p class="muted">None of these has recorded a step.</p>',
            *_evidence_sections(compared),
            html.section("Results", html.table(["", *names], result_rows(compared.runs.summaries), numeric))
            if names
            else "",
            html.section(
                "What differs in their configs",
                changed or '<p class="muted">Nothing: the configs are equal.</p>' if len(names) > 1 else "",
            ),
        ],
    )
    write_text(output, text)
    return output


def _evidence_sections(compared: Compared) -> Iterator[str]:
    evidence = compared.evidence
    baseline = compared.groups[0].name
    if evidence is None:
        if compared.why_not is not None:
            yield html.section("Evidence", html.preformatted(compared.why_not.render()))
        return
    numbers = range(1, len(LOSS_HEADERS))
    table = html.table(LOSS_HEADERS, loss_rows(evidence.overall), numbers)
    yield html.section(
        f"Loss on held-out documents, against {baseline}", table, html.paragraphs(_how(evidence, baseline))
    )
    yield html.section("By source", html.table(LOSS_HEADERS, loss_rows(evidence.by_source), numbers))
    items = html.table(ITEM_HEADERS, item_rows(evidence.items), range(2, len(ITEM_HEADERS)))
    yield html.section(f"Benchmarks, item by item, against {baseline}", items)
    headers = ["Model", "Shown by these", *(_percent(difference) for difference in DIFFERENCES)]
    rows = _power_rows(evidence)
    power = html.table(headers, rows, range(1, len(headers)))
    words = (
        "Documents like these that show a difference of so much of the loss, in 80 % of all cases, at the 5 % level."
    )
    yield html.section("How many documents", html.paragraphs([words]) if rows else "", power)


def markdown(compared: Compared) -> str:
    """Return the comparison for a comment on a pull request."""
    lines = [f"### Comparison with {in_markdown(compared.groups[0].name)}", ""]
    lines += [f"**{in_markdown(sentence)}**" for sentence in verdicts(compared)]
    evidence = compared.evidence
    if evidence is not None:
        headers = [name.replace("Loss", f"Loss ({evidence.unit.name})") for name in LOSS_HEADERS]
        lines += ["", *markdown_table(headers, loss_rows([*evidence.overall, *evidence.by_source]))]
        if evidence.items:
            lines += ["", *markdown_table(ITEM_HEADERS, item_rows(evidence.items))]
        notes = _how(evidence, compared.groups[0].name)
        lines += [
            "",
            "<details><summary>How this was measured</summary>",
            "",
            *map(in_markdown, notes),
            "",
            "</details>",
        ]
    names = compared.runs.names
    if len(names) > 1:
        results = result_rows(compared.runs.summaries)
        speeds = [one.tokens_per_second or one.samples_per_second for one in compared.runs.summaries]
        if first := speeds[0]:
            ratios = (UNKNOWN if speed is None else f"{speed / first:.2f}" for speed in speeds)
            results = [*results, ["speed, to the first", *ratios]]
        lines += ["", *markdown_table(["Result", *names], results)]
        lines += _curves(compared)
    rows = difference_rows(compared.runs)
    if rows and len(names) > 1:
        more = [] if len(rows) <= _MOST_KEYS else [["…", *[f"{len(rows) - _MOST_KEYS} more"] * len(names)]]
        lines += ["", *markdown_table(["Config key", *names], [*rows[:_MOST_KEYS], *more])]
    return "\n".join(lines)


def _curves(compared: Compared) -> Iterator[str]:
    """Yield the training losses of runs over their common steps, as a chart that GitHub draws (Mermaid)."""
    drawn = []
    for name, run in zip(compared.runs.names, compared.runs.runs, strict=True):
        steps, losses = run.metrics.finite("train/loss")
        if len(steps) > 1:
            drawn.append((name, steps, smooth(losses, half_window(len(losses)))))
    first = max((int(steps[0]) for _, steps, _ in drawn), default=0)
    last = min((int(steps[-1]) for _, steps, _ in drawn), default=0)
    if len(drawn) < 2 or last <= first:
        return
    grid = np.linspace(first, last, _CURVE_POINTS)
    names = ", ".join(re.sub(r"[^\w ./:@+-]", " ", name) for name, _, _ in drawn)
    yield from ("", "```mermaid", "xychart-beta", f'    title "training loss: {names}"')
    yield from (f'    x-axis "step" {first} --> {last}', '    y-axis "loss"')
    for _, steps, losses in drawn:
        yield f"    line [{', '.join(f'{loss:.4g}' for loss in np.interp(grid, steps, losses))}]"
    yield "```"
