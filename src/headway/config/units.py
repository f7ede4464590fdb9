"""Quantities as people write them: "2B tokens", "500 steps", "10 min", "64Ki"."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

_SCALES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "b": 10**9,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SECONDS = {
    "s": 1,
    "sec": 1,
    "second": 1,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
    "day": 86400,
}
# Commas only between thousands: "1,5B" is 1.5 billion to half of the world. Exponents of what there can be.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]+)?(?:e[0-9]{1,2})?"
_NUMBER = re.compile(rf"^\s*({_DIGITS})\s*([a-z]*)\s*([a-z]*)\s*$", re.IGNORECASE)


def _split(text: str) -> tuple[Decimal, str, str]:
    """Number (exact, so that 2.3B is a whole number) and up to two words."""
    match = _NUMBER.match(text)
    if not match:
        point = "; the decimal sign is a point" if re.match(r"\s*[0-9]+,[0-9]", text) else ""
        raise ValueError(f"'{text}' is not a quantity; write for example 500, 64k, 2B or '10 min'{point}")
    number, first, second = match.groups()
    return Decimal(number.replace("_", "").replace(",", "")), first, second


def parse_count(value: Any, unit: str) -> int:
    """A whole number of `unit` ("tokens", "bytes", ...) from 64000, "64k", "64Ki" or "2B tokens".

    Raises:
        ValueError: the text is no quantity, has another unit, or is not a whole number.
    """
    if isinstance(value, bool) or value is None:
        raise ValueError(f"expected a number of {unit}, got {value!r}")
    if isinstance(value, (int, float)):
        if not math.isfinite(value) or value != int(value):
            raise ValueError(f"expected a whole number of {unit}, got {value}")
        return int(value)
    number, scale, tail = _split(str(value))
    # "500 tokens": the first word is the unit itself. "256 MB" is common usage for 256M bytes.
    if not tail and scale.lower().rstrip("s") == unit.rstrip("s"):
        scale = ""
    if unit == "bytes" and scale.lower() == "b":
        # Nobody who writes 100 B means a hundred billion bytes, and not everybody who writes 2B two.
        raise ValueError(f"'{value}' could be bytes or billions; write '{number} bytes' or '{number} GB'")
    if unit == "bytes" and scale.lower() not in _SCALES and scale.lower().endswith("b"):
        scale = scale[:-1]
    if scale.lower() not in _SCALES or (tail and tail.lower().rstrip("s") != unit.rstrip("s")):
        raise ValueError(f"'{value}' is not a number of {unit}; write for example 500, 64k, 64Ki or '2B {unit}'")
    amount = number * _SCALES[scale.lower()]
    if amount != int(amount):
        raise ValueError(f"'{value}' is not a whole number of {unit}")
    return int(amount)


def _either_case(text: str) -> str:
    """A pattern of JSON Schema, which knows no flags, for a text in capitals or not."""
    return re.sub(r"(?<!\\)[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", text)


#: The same, as patterns for editors. Something above zero is asked for everywhere.
_SCALE = "(k|m|b|g|t|ki|mi|gi|ti)?"
_BYTES = "(k|m|g|t|ki|mi|gi|ti)"  # 2 B could be bytes or billions
_ABOVE_ZERO = rf"(?=.*[1-9])\s*{_DIGITS.replace('(?:', '(')}\s*"
_TIME = r"(s|(sec|second|min|minute|h|hour|d|day)s?)"
_PERCENT = r"\s*(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?)\s*%"


def written(*units: str, number: bool = True, others: Sequence[str] = ()) -> dict[str, Any]:
    """JSON Schema of a quantity above zero: a number, if it may be one, or a text in one of these units.

    Args:
        units: Of "tokens", "rows", "steps", "documents", "bytes" and "seconds".
        number: Whether a unit can be left out, and then a scale be given alone.
        others: Patterns, in small letters, of other texts that will do.
    """
    words = {"seconds": _TIME, "bytes": rf"({_BYTES}b?|{_BYTES}?\s*bytes?)"}
    patterns = [_ABOVE_ZERO + words.get(unit, rf"{_SCALE}\s*{unit}?") for unit in units]
    patterns += [_ABOVE_ZERO + (f"{_BYTES}?" if "bytes" in units else _SCALE)] if number else []
    no_minutes = r"(?!.*[0-9]\s*m\s*$)" if "steps" in units else ""  # nor millions: see `Interval.parse`
    text = {"type": "string", "pattern": "^" + no_minutes + _either_case(rf"({'|'.join([*patterns, *others])})\s*$")}
    return {"anyOf": [{"type": "integer", "minimum": 1}, text]} if number else text


#: Mark whole numbers that may be given with a unit.
TOKENS, BYTES = WithJsonSchema(written("tokens")), WithJsonSchema(written("bytes"))
Tokens = Annotated[int, BeforeValidator(lambda v: parse_count(v, "tokens")), Field(ge=1), TOKENS]
Bytes = Annotated[int, BeforeValidator(lambda v: parse_count(v, "bytes")), Field(ge=1), BYTES]


@dataclass(frozen=True)
class Interval:
    """How often something happens: every so many steps, tokens or seconds."""

    amount: int
    unit: Literal["steps", "tokens", "seconds"]

    @classmethod
    def parse(cls, value: Any) -> Interval:
        """From 500, "500 steps", "1B tokens", "10 min" or an Interval.

        Raises:
            ValueError: not an interval, or not positive.
        """
        if isinstance(value, Interval):
            return value
        if isinstance(value, str):
            number, first, tail = _split(value)
            word = first.lower() if first.lower() in _SECONDS else first.lower().rstrip("s")
            if not tail and word in _SECONDS:
                return cls._positive(number * _SECONDS[word], "seconds", value)
            if (tail or first).lower().rstrip("s") == "token":
                return cls._positive(parse_count(value, "tokens"), "tokens", value)
            if first == "m" and not tail:
                # Ten million steps between checkpoints is never what "10m" was meant to say.
                raise ValueError(f"'{value}' could be minutes or millions; write '{number} min' or '{number}M steps'")
        return cls._positive(parse_count(value, "steps"), "steps", value)

    @classmethod
    def _positive(cls, amount: int | Decimal, unit: Literal["steps", "tokens", "seconds"], value: Any) -> Interval:
        if amount < 1:
            raise ValueError(f"'{value}' must be at least one {unit.rstrip('s')}")
        if amount != int(amount):
            raise ValueError(f"'{value}' is not a whole number of {unit}")
        return cls(int(amount), unit)

    def __str__(self) -> str:
        if self.unit == "seconds":
            for word, seconds in (("h", 3600), ("min", 60)):
                if self.amount % seconds == 0:
                    return f"{self.amount // seconds} {word}"
            return f"{self.amount} s"
        return f"{self.amount} {self.unit}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            # In a union ("a share or an interval") pydantic also offers plain numbers to this serializer.
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value: str(value) if isinstance(value, Interval) else value
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {**written("steps", "tokens", "seconds"), "examples": [500, "1B tokens", "10 min"]}


def _is_a_time(interval: Interval) -> Interval:
    if interval.unit != "seconds":
        raise ValueError("this is a time; write for example '12 h' or '2 days'")
    return interval


def parse_seconds(text: str) -> int:
    """Whole seconds from "10 s", "2 min" or "1 h".

    Raises:
        ValueError: that is no time, or less than a second.
    """
    return _is_a_time(Interval.parse(text)).amount


def _is_no_time(interval: Interval) -> Interval:
    if interval.unit == "seconds":
        raise ValueError("this is a function of the step; give steps or tokens, not a time")
    return interval


#: An interval in seconds only, and one in steps or tokens only.
Duration = Annotated[Interval, AfterValidator(_is_a_time), WithJsonSchema(written("seconds", number=False))]
StepInterval = Annotated[Interval, AfterValidator(_is_no_time), WithJsonSchema(written("steps", "tokens"))]
#: A share from 0 to 1, a percentage, or so many steps or tokens.
SHARE_OR_INTERVAL = WithJsonSchema(
    {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, *written("steps", "tokens", others=[_PERCENT])["anyOf"]]}
)


@dataclass(frozen=True)
class Amount:
    """So much of a source: a number of documents, or of bytes of text."""

    amount: int
    unit: Literal["documents", "bytes"]

    @classmethod
    def parse(cls, value: Any) -> Amount:
        """From "10k documents", "2 GB" or an Amount.

        Raises:
            ValueError: not such an amount, or not positive.
        """
        if isinstance(value, Amount):
            return value
        documents = isinstance(value, str) and value.strip().lower().rstrip("s").endswith("document")
        if not documents and not (isinstance(value, str) and value.strip().lower().endswith(("b", "byte", "bytes"))):
            raise ValueError(f"'{value}' says neither documents nor bytes; write for example '10k documents' or '2 GB'")
        unit: Literal["documents", "bytes"] = "documents" if documents else "bytes"
        amount = parse_count(value, unit)
        if amount < 1:
            raise ValueError(f"'{value}' must be at least one {unit.rstrip('s')}")
        return cls(amount, unit)

    def __str__(self) -> str:
        return f"{self.amount} {self.unit}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {**written("documents", "bytes", number=False), "examples": ["10k documents", "2 GB"]}


def share_or_interval(value: Any) -> float | Interval:
    """A number up to 1 with a point is a share; whole numbers are steps ('1' is one step, '1.0' is all).

    Raises:
        ValueError: not an amount of steps or tokens, or more than all of them.
    """
    if isinstance(value, str) and value.strip().endswith("%"):
        percent, *words = _split(value.strip()[:-1])
        if any(words) or percent > 100:
            raise ValueError(f"'{value}' is no share; write for example '2 %'")
        return float(percent / 100)
    if isinstance(value, float) or value == 0:
        return float(value)
    return _is_no_time(Interval.parse(value))
