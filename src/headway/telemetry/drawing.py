"""Drawings by matplotlib, for the files of `headway bench` and the page of `headway profile`.

A drawing is made in placeholder colours, which become CSS variables (`html.STYLE` defines them), and its letters stay
text, which the browser sets in the page's own font. So it follows light and dark.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headway.core.errors import needing
from headway.telemetry.charts import SERIES_COLOURS
from headway.telemetry.curves import axis_labels, short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#000001"
MUTED = "#000002"
_RULE = "#000003"
GROUND = "#000004"
SERIES = tuple(f"#0000{number:02x}" for number in range(0x10, 0x10 + SERIES_COLOURS))
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    _RULE: "var(--rule)",
    GROUND: "var(--ground)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)},
}
_RC = {
    "svg.fonttype": "none",
    "font.size": 12,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}


@contextmanager
def drawing(width: int, height: int) -> Iterator[tuple[Figure, Axes]]:
    """Make a figure of `width` x `height` CSS pixels with one pair of axes; the block draws in the page's style."""
    with needing("matplotlib", "report", "Drawing charts"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        yield figure, figure.add_subplot()


def ticks(label: Callable[[float], str]) -> Any:
    """Label every tick by itself."""
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: label(value))


def number_ticks() -> Any:
    """Label the ticks of an axis consistently, as `axis_labels` does."""
    from matplotlib.ticker import Formatter

    class Numbers(Formatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return short_number(x)

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            # A locator also yields ticks beyond the ends, which are not drawn and must not determine the unit.
            low, high = sorted(self.axis.get_view_interval()) if self.axis else (-math.inf, math.inf)
            shown = [value for value in values if low <= value <= high]
            labels = iter(axis_labels(shown))
            return [next(labels) if low <= value <= high else "" for value in values]

    return Numbers()


def as_svg(figure: Figure, label: str) -> str:
    """Return the figure as one SVG element without fixed size, in the page's colours."""
    import matplotlib

    buffer = io.StringIO()
    # The salt makes ids equal for equal charts, and different for charts of one page.
    with matplotlib.rc_context({**_RC, "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Inside a page a <style> would apply to the whole page, ids of groups would repeat for each chart, and links need
    # no namespace.
    svg = re.sub(r"<(metadata|style)[ >].*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg).replace("xlink:href", "href")
    svg = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{label}">', svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.strip()
