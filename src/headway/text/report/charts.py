"""The charts of a data report."""

from __future__ import annotations

from collections.abc import Sequence

from headway.telemetry.charts import SERIES, Chart, Entry, as_svg, drawing, log_ticks, number_ticks


def length_chart(source: str, histogram: Sequence[Sequence[int]]) -> Chart:
    """Draw documents by length in tokens, on a logarithmic axis.

    Args:
        source: Name of the source.
        histogram: Rows of lower end, upper end (exclusive) and documents.
    """
    with drawing(440, 260) as (figure, axes):
        starts = [max(row[0], 0.7) for row in histogram]
        axes.bar(
            starts,
            [row[2] for row in histogram],
            width=[row[1] - start for start, row in zip(starts, histogram, strict=True)],
            align="edge",
            color=SERIES[0],
            alpha=0.85,
        )
        axes.set_xscale("log")
        axes.set_xlabel("tokens per document")
        axes.set_ylabel("documents")
        log_ticks(axes.xaxis, min(starts, default=1), max((row[1] for row in histogram), default=1))
        axes.yaxis.set_major_formatter(number_ticks())
        return Chart(source, as_svg(figure, f"Documents of {_plain(source)} by length"))


def share_chart(names: Sequence[str], have: Sequence[float], asked: Sequence[float | None]) -> Chart:
    """Draw each source's share of the train split's tokens, next to the share of training rows that the config
    wants."""
    wanted = [share if share is not None else 0.0 for share in asked]
    compare = any(share is not None for share in asked)
    thickness = 0.38 if compare else 0.7
    with drawing(920, 70 + 34 * len(names)) as (figure, axes):
        places = list(range(len(names)))
        shift = thickness / 2 if compare else 0.0
        axes.barh([p - shift for p in places], [100 * s for s in have], height=thickness, color=SERIES[0])
        if compare:
            axes.barh([p + shift for p in places], [100 * s for s in wanted], height=thickness, color=SERIES[1])
        axes.set_yticks(places, [_plain(name) for name in names])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("percent")
        legend = [Entry("share of the train split's tokens", 0)]
        if compare:
            legend.append(Entry("share of training rows that the config asks for", 1))
        return Chart("Sources", as_svg(figure, "Share of each source"), tuple(legend), wide=True)


def _plain(name: str) -> str:
    """Return a name without characters that the drawing library or a page takes for markup."""
    return "".join(character if character.isalnum() or character in " ._-/" else "?" for character in name)
