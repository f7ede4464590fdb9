"""The space of a study: keys of the config with the values that they may take, conditions and constraints."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from headway.core.errors import ConfigError
from headway.lab.tune.expressions import Expression

Kind = Literal["log", "uniform", "int", "log_int", "choice"]
_KINDS: Mapping[str, Kind] = {**{kind: kind for kind in get_args(Kind)}, "range": "uniform"}
#: What the values of a trial are drawn with: the range of a key, and what it is given.
Draw = Callable[["Range"], Any]
#: Most points of a grid.
MOST_POINTS = 100_000


@dataclass(frozen=True)
class Range:
    """The values that one key may take."""

    key: str
    kind: Kind
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    """Distance between neighbouring values, from the lowest on; None is any value between the ends."""
    choices: tuple[Any, ...] = ()
    when: Expression | None = None
    """The key is left as the config has it unless this holds."""

    @property
    def is_whole(self) -> bool:
        """Whether values are whole numbers."""
        return self.kind in ("int", "log_int")

    @property
    def names(self) -> tuple[Any, ...]:
        """The choices as a journal keeps them: plain values as they are, lists and mappings as JSON."""
        return tuple(one if _is_plain(one) else json.dumps(one) for one in self.choices)

    def value_of(self, kept: Any) -> Any:
        """Return the value that a journal's entry stands for."""
        return self.choices[self.names.index(kept)] if self.kind == "choice" else kept

    def kept(self, value: Any) -> Any:
        """Return a value as a journal keeps it."""
        return self.names[self.choices.index(value)] if self.kind == "choice" else value

    def points(self) -> tuple[Any, ...]:
        """Return the values of a grid, as a journal keeps them.

        Raises:
            ConfigError: there are infinitely many.
        """
        if self.kind == "choice":
            return self.names
        step = self.step or (1.0 if self.kind == "int" else None)
        if step is None:
            raise ConfigError(
                "a grid needs a finite number of values",
                where=f"space: {self.key}",
                fix=f"{self.key}: {{choice: [...]}}, or give the range a step",
            )
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        if count > MOST_POINTS:
            raise _wrong(self.key, f"{count:,} values are too many for a grid", "a larger step")
        values = (self.low + step * index for index in range(count))
        return tuple(round(value) if self.is_whole else value for value in values)


@dataclass(frozen=True)
class Space:
    """The ranges in their order, and what must hold for all values together."""

    ranges: tuple[Range, ...]
    constraints: tuple[Expression, ...] = ()

    def drawn(self, draw: Draw, base: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of one trial by key; a key whose condition does not hold is absent.

        Args:
            draw: Returns a value of a range, as a journal keeps it.
            base: Values of the config by dotted key, for keys that a trial leaves alone.
        """
        found: dict[str, Any] = {}
        for one in self.ranges:
            if one.when is None or one.when({**base, **found}):
                found[one.key] = one.value_of(draw(one))
        return found

    def kept(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a trial as a journal keeps them."""
        return {one.key: one.kept(values[one.key]) for one in self.ranges if one.key in values}

    def broken(self, values: Mapping[str, Any], base: Mapping[str, Any]) -> str | None:
        """Return the first constraint that does not hold for a trial's values; None if all do."""
        known = {**base, **values}
        return next((one.text for one in self.constraints if not one(known)), None)

    def grid(self, base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the points of the grid that keep all constraints, as a journal keeps them, the last key fastest.

        Raises:
            ConfigError: a range has infinitely many values, or there are too many points.
        """
        sides = [one.points() for one in self.ranges]
        if math.prod(map(len, sides)) > MOST_POINTS:
            raise ConfigError(
                f"the grid has more than {MOST_POINTS:,} points", where="space", fix="sampler: random, or fewer values"
            )
        seen = set[str]()
        for point in itertools.product(*sides):
            kept = dict(zip((one.key for one in self.ranges), point, strict=True))
            values = self.drawn(partial(_given, kept), base)
            chosen = {key: kept[key] for key in values}
            # Without the keys that a condition leaves alone, points recur.
            if (name := json.dumps(chosen)) not in seen and self.broken(values, base) is None:
                seen.add(name)
                yield chosen


def _given(kept: Mapping[str, Any], one: Range) -> Any:
    return kept[one.key]


def parse_space(given: Mapping[str, Any], constraints: Sequence[str], base: Mapping[str, Any]) -> Space:
    """Parse a space.

    Args:
        given: Ranges by dotted key: `{log: [1e-5, 1e-2]}`, `{choice: [4, 6]}`, `{uniform: [0, 0.3], step: 0.1}`,
            `{int: [1, 8]}`, `{log_int: [16, 1024]}`, each with an optional `when`.
        constraints: Expressions over keys.
        base: Values of the config by dotted key.

    Raises:
        ConfigError: a range is empty or has another form, or an expression names an unknown key.
    """
    if not given:
        raise ConfigError(
            "there is nothing to search", where="space", fix="optimizer.learning_rate: {log: [1e-5, 1e-2]}, for example"
        )
    ranges: list[Range] = []
    for key, value in given.items():
        found = _range(key, value)
        if found.when is not None:
            _check_keys(found.when, {*base, *(one.key for one in ranges)}, f"space: {key}: when")
        ranges.append(found)
    parsed = []
    for text in constraints:
        one = _expression(text, "constraints")
        _check_keys(one, {*base, *given}, "constraints")
        parsed.append(one)
    return Space(tuple(ranges), tuple(parsed))


def _range(key: str, value: Any) -> Range:
    if isinstance(value, list):
        value = {"choice": value}
    kinds = [name for name in value if name in _KINDS] if isinstance(value, dict) else []
    if len(kinds) != 1 or value.keys() - {kinds[0], "step", "when"}:
        example = f"{key}: {{choice: [...]}}, {{log: [low, high]}}, {{uniform: [low, high]}} or {{int: [low, high]}}"
        raise _wrong(key, "a range has one of the kinds choice, log, uniform, int, log_int; step and when", example)
    kind = _KINDS[kinds[0]]
    ends = value[kinds[0]]
    step = value.get("step")
    when = None if value.get("when") is None else _expression(str(value["when"]), f"space: {key}: when")
    if kind == "choice":
        return _choice(key, ends, step, when)
    if not (isinstance(ends, list) and len(ends) == 2 and all(map(_is_number, ends))):
        raise _wrong(key, f"{kinds[0]} takes its two ends", f"{key}: {{{kinds[0]}: [low, high]}}")
    low, high = ends
    if not low < high:
        raise _wrong(key, f"the range from {low:g} to {high:g} is empty", "the lower end first")
    if kind in ("log", "log_int") and low <= 0:
        raise _wrong(key, f"{low:g} has no logarithm", f"a lower end above 0, or uniform: [{low:g}, {high:g}]")
    if kind in ("int", "log_int") and any(end != int(end) for end in ends):
        raise _wrong(key, "the ends of whole numbers are whole", "uniform, for other numbers")
    if step is not None and (not _is_number(step) or step <= 0 or kind == "log"):
        raise _wrong(key, "a step is a number above 0, of a range without logarithm", "leave step out")
    if step is not None and kind in ("int", "log_int") and (step != int(step) or kind == "log_int"):
        raise _wrong(key, "the step of whole numbers is whole, and a logarithmic range has none", "leave step out")
    return Range(key, kind, float(low), float(high), None if step is None else float(step), when=when)


def _choice(key: str, choices: Any, step: Any, when: Expression | None) -> Range:
    if not isinstance(choices, list) or not choices or step is not None:
        raise _wrong(key, "choice takes a list of at least one value, and no step", f"{key}: {{choice: [4, 6, 8]}}")
    found = Range(key, "choice", choices=tuple(choices), when=when)
    if len({json.dumps(name) for name in found.names}) < len(choices):
        raise _wrong(key, "a value is given twice", "keep one")
    return found


def _expression(text: str, where: str) -> Expression:
    try:
        return Expression(text)
    except ValueError as error:
        raise ConfigError(str(error), where=where, fix="for example: optimizer.name == 'muon'") from None


def _check_keys(expression: Expression, known: set[str], where: str) -> None:
    for key in expression.keys:
        if key not in known:
            raise ConfigError(
                f"'{expression.text}' names {key}, which is neither a key of the config nor one given before it",
                where=where,
                fix="keys are dotted, as headway config show prints them; texts have quotes",
            )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _wrong(key: str, what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=f"space: {key}", fix=fix)
