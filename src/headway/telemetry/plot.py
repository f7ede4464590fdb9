"""A picture of recorded metrics for a notebook: one SVG that needs no script, in colours for light and dark grounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from headway.core.arrays import Floats
from headway.core.files.atomic import write_text
from headway.telemetry.curves import Steps, axis_labels, half_window, smooth, thin

#: Of the Okabe-Ito palette, those that are seen on white and on black.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH = 640
_HEIGHT = 300
_LEFT = 58
_RIGHT = 12
_TOP = 12
_BOTTOM = 40
#: A curve with fewer points shows each of them.
_FEW = 40


@dataclass(frozen=True, repr=False)
class Plot:
    """Curves by step. A notebook shows it; `save("loss.svg")` writes it."""

    curves: Mapping[str, tuple[Steps, Floats]]
    """By name: rising steps and finite values, both of shape (points,)."""

    def svg(self) -> str:
        """Return the picture as one SVG element."""
        known = {name: curve for name, curve in self.curves.items() if len(curve[0])}
        if not known:
            return "<p>nothing is recorded under this name</p>"
        first = min(float(steps[0]) for steps, _ in known.values())
        last = max(float(steps[-1]) for steps, _ in known.values())
        low = min(float(values.min()) for _, values in known.values())
        high = max(float(values.max()) for _, values in known.values())
        room = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
        area = _Area(first, max(last, first + 1), low - room, high + room)
        colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(known))]
        lines = [_curve(area, *curve, colour) for curve, colour in zip(known.values(), colours, strict=True)]
        legend = [
            f'<tspan fill="{colour}" dx="12">{escape(name)}</tspan>'
            for name, colour in zip(known, colours, strict=True)
        ]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
            f' aria-label="{escape(", ".join(known))} by step" style="max-width:{_WIDTH}px;width:100%;height:auto"'
            f' font-family="sans-serif" font-size="12" fill="#808080">{area.axes()}{"".join(lines)}'
            f'<text x="{_WIDTH - _RIGHT}" y="{_TOP + 12}" text-anchor="end">{"".join(legend)}</text></svg>'
        )

    def save(self, path: str | Path) -> Path:
        """Write the picture as an SVG file, and return its path."""
        write_text(Path(path), self.svg())
        return Path(path)

    def _repr_html_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        return f"Plot of {', '.join(self.curves)}"


@dataclass(frozen=True)
class _Area:
    """What part of the plane is shown."""

    left: float
    right: float
    low: float
    high: float

    def x(self, steps: Floats) -> Floats:
        """Return positions of steps in the picture."""
        return _LEFT + (steps - self.left) / (self.right - self.left) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, values: Floats) -> Floats:
        """Return positions of values in the picture."""
        return _HEIGHT - _BOTTOM - (values - self.low) / (self.high - self.low) * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> str:
        """Return rules and labels."""
        across = _ticks(self.left, self.right)
        up = _ticks(self.low, self.high)
        parts = []
        for y, label in zip(self.y(np.array(up)), axis_labels(up), strict=True):
            rule = f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#808080" stroke-opacity="0.25"/>'
            parts.append(f'{rule}<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        for x, label in zip(self.x(np.array(across)), axis_labels(across), strict=True):
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{label}</text>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        return "".join(parts) + f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between two."""
    size = 10 ** math.floor(math.log10((high - low) / 5))
    gap = next(digit * size for digit in (1, 2, 5, 10) if (high - low) / (digit * size) <= 6)
    return [round(number * gap, 12) for number in range(math.ceil(low / gap), math.floor(high / gap) + 1)]


def _curve(area: _Area, steps: Steps, values: Floats, colour: str) -> str:
    """Return a curve: the mean over neighbouring steps, with every step faintly behind it where they are many."""
    half = half_window(len(values))
    behind = "" if half == 0 else _line(area, *thin(steps, values), f'stroke="{colour}" stroke-opacity="0.3"')
    points = ""
    if len(values) < _FEW:
        pairs = zip(area.x(steps.astype(np.float64)), area.y(values), strict=True)
        points = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in pairs)
    return behind + _line(area, *thin(steps, smooth(values, half)), f'stroke="{colour}" stroke-width="1.8"') + points


def _line(area: _Area, steps: Steps, values: Floats, style: str) -> str:
    pairs = zip(area.x(steps.astype(np.float64)), area.y(values), strict=True)
    return f'<polyline fill="none" {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)}"/>'
