"""The charts of a data report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from headway.telemetry.charts import Chart, Entry, Line, plot_of

#: Width of the picture of shares, of its names, and of what follows a bar; height of a source.
_WIDTH = 920
_NAMES = 220
_AFTER = 60
_ROW = 34
#: Characters of a name.
_NAME_CHARACTERS = 30


def length_chart(source: str, histogram: Sequence[Sequence[int]]) -> Chart:
    """Return documents by length in tokens, on a logarithmic axis.

    Args:
        source: Name of the source.
        histogram: Rows of lower end, upper end (exclusive) and documents.
    """
    starts = np.array([max(row[0], 0.7) for row in histogram] + [row[1] for row in histogram[-1:]])
    counts = np.array([float(row[2]) for row in [*histogram, *histogram[-1:]]])
    line = Line(starts, counts, 0, "bars", "documents")
    return Chart(source, plot=plot_of([line], x="tokens per document", y="documents", log_x=True, from_zero=True))


def share_chart(names: Sequence[str], have: Sequence[float], asked: Sequence[float | None]) -> Chart:
    """Draw each source's share of the train split's tokens, next to the share of training rows that the config
    wants."""
    compare = any(share is not None for share in asked)
    thickness = 12 if compare else 22
    parts = []
    for number, name in enumerate(names):
        top = number * _ROW + 4
        shown = name if len(name) <= _NAME_CHARACTERS else f"{name[: _NAME_CHARACTERS - 1]}…"
        parts.append(f'<text x="{_NAMES - 10}" y="{top + 17}" text-anchor="end">{escape(shown)}</text>')
        for series, share in enumerate((have[number], asked[number]) if compare else (have[number],)):
            width = (share or 0.0) * (_WIDTH - _NAMES - _AFTER)
            y = top + series * (thickness + 1)
            size = f'width="{width:.1f}" height="{thickness}"'
            parts.append(
                f'<rect x="{_NAMES}" y="{y}" {size} style="fill: var(--series-{series})"/>'
                f'<text x="{_NAMES + width + 6:.1f}" y="{y + thickness - 2}">{100 * (share or 0.0):.1f} %</text>'
            )
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_ROW * len(names)}" role="img" aria-label="Share of each source" font-size="12"'
        f' style="fill: var(--muted)">{"".join(parts)}</svg>'
    )
    legend = [Entry("share of the train split's tokens", 0)]
    if compare:
        legend.append(Entry("share of training rows that the config asks for", 1))
    return Chart("Sources", svg, tuple(legend), wide=True)
