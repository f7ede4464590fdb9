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
# Commas only between thousands: in half of the world "1,5B" means 1.5 billion. Exponents have at most two digits.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]+)?(?:e[0-9]{1,2})?"
_NUMBER = re.compile(rf"^\s*({_DIGITS})\s*([a-z]*)\s*([a-z]*)\s*$", re.IGNORECASE)


def _split(text: str) -> tuple[Decimal, str, str]:
    """Split a quantity into a number (exact, so that 2.3B is a whole number) and up to two words."""
    match = _NUMBER.match(text)
    if not match:
        point = "; the decimal sign is a point" if re.match(r"\s*[0-9]+,[0-9]", text) else ""
        raise ValueError(f"'{text}' is not a quantity; write for example 500, 64k, 2B or '10 min'{point}")
    number, first, second = match.groups()
    return Decimal(number.replace("_", "").replace(",", "")), first, second


def parse_count(value: Any, unit: str) -> int:
    """Parse a whole number of `unit` ("tokens", "bytes", ...) from 64000, "64k", "64Ki" or "2B tokens".

    Raises:
        ValueError: the text is not a quantity, has another unit, or is not a whole number.
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
        # "100 B" never means a hundred billion bytes, and "2B" does not always mean two bytes.
        raise ValueError(f"'{value}' could be bytes or billions; write '{number} bytes' or '{number} GB'")
    if unit == "bytes" and scale.lower() not in _SCALES and scale.lower().endswith("b"):
        scale = scale[:-1]
    if scale.lower() not in _SCALES or (tail and tail.lower().rstrip("s") != unit.rstrip("s")):
        raise ValueError(f"'{value}' is not a number of {unit}; write for example 500, 64k, 64Ki or '2B {unit}'")
    amount = number * _SCALES[scale.lower()]
    if amount != int(amount):
        raise ValueError(f"'{value}' is not a whole number of {unit}")
    return int(amount)


def parse_length(value: Any, unit: str = "tokens") -> int:
    """Parse a length of rows or contexts, where `k` is 1024: "2k" is 2048, and "128k" 131,072, as models are named.

    Raises:
        ValueError: as `parse_count`.
    """
    if isinstance(value, str):
        value = re.sub(r"(?<=[0-9])(\s*[km])(?!i)", r"\1i", value.strip(), flags=re.IGNORECASE)
    return parse_count(value, unit)


def _either_case(text: str) -> str:
    """Make a pattern ignore case; patterns of JSON Schema have no flags."""
    return re.sub(r"(?<!\\)[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", text)


#: Quantities as patterns for editors; all must be above zero.
_SCALE = "(k|m|b|g|t|ki|mi|gi|ti)?"
_BYTES = "(k|m|g|t|ki|mi|gi|ti)"  # 2 B could be bytes or billions
_ABOVE_ZERO = rf"(?=.*[1-9])\s*{_DIGITS.replace('(?:', '(')}\s*"
_TIME = r"(s|(sec|second|min|minute|h|hour|d|day)s?)"
_PERCENT = r"\s*(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?)\s*%"


def written(*units: str, number: bool = True, others: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON Schema of a quantity above zero: a number, if allowed, or a text in one of these units.

    Args:
        units: Some of "tokens", "rows", "steps", "documents", "bytes" and "seconds".
        number: Allow a number, or a number with a scale, without a unit.
        others: Lower-case patterns of further texts that are valid.
    """
    words = {"seconds": _TIME, "bytes": rf"({_BYTES}b?|{_BYTES}?\s*bytes?)"}
    patterns = [_ABOVE_ZERO + words.get(unit, rf"{_SCALE}\s*{unit}?") for unit in units]
    patterns += [_ABOVE_ZERO + (f"{_BYTES}?" if "bytes" in units else _SCALE)] if number else []
    no_minutes = r"(?!.*[0-9]\s*m\s*$)" if "steps" in units else ""  # nor millions: see `Interval.parse`
    text = {"type": "string", "pattern": "^" + no_minutes + _either_case(rf"({'|'.join([*patterns, *others])})\s*$")}
    return {"anyOf": [{"type": "integer", "minimum": 1}, text]} if number else text


#: JSON Schemas of whole numbers that may have a unit.
TOKENS = WithJsonSchema(written("tokens"))
BYTES = WithJsonSchema(written("bytes"))
STEPS = WithJsonSchema(written("steps"))
#: The marks of fields that take counts.
COUNTS = (TOKENS, BYTES, STEPS)
Tokens = Annotated[int, BeforeValidator(lambda v: parse_count(v, "tokens")), Field(ge=1), TOKENS]
Bytes = Annotated[int, BeforeValidator(lambda v: parse_count(v, "bytes")), Field(ge=1), BYTES]
Steps = Annotated[int, BeforeValidator(lambda v: parse_count(v, "steps")), Field(ge=1), STEPS]
#: Tokens of a row or a context.
Length = Annotated[int, BeforeValidator(parse_length), Field(ge=1), TOKENS]


@dataclass(frozen=True)
class Interval:
    """An interval between events, in steps, tokens or seconds."""

    amount: int
    unit: Literal["steps", "tokens", "seconds"]

    @classmethod
    def parse(cls, value: Any) -> Interval:
        """Parse 500, "500 steps", "1B tokens", "10 min" or an Interval.

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
                # "10m" between checkpoints was never meant as ten million steps.
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


def _check_is_time(interval: Interval) -> Interval:
    if interval.unit != "seconds":
        raise ValueError("this is a time; write for example '12 h' or '2 days'")
    return interval


def parse_seconds(text: str) -> int:
    """Parse "10 s", "2 min" or "1 h" into whole seconds.

    Raises:
        ValueError: it is not a time, or is less than a second.
    """
    return _check_is_time(Interval.parse(text)).amount


def _check_is_not_time(interval: Interval) -> Interval:
    if interval.unit == "seconds":
        raise ValueError("this is a function of the step; give steps or tokens, not a time")
    return interval


#: An interval in seconds only, and one in steps or tokens only.
Duration = Annotated[Interval, AfterValidator(_check_is_time), WithJsonSchema(written("seconds", number=False))]
StepInterval = Annotated[Interval, AfterValidator(_check_is_not_time), WithJsonSchema(written("steps", "tokens"))]
#: JSON Schema of a share from 0 to 1, a percentage, or an amount of steps or tokens.
SHARE_OR_INTERVAL = WithJsonSchema(
    {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, *written("steps", "tokens", others=[_PERCENT])["anyOf"]]}
)


@dataclass(frozen=True)
class Amount:
    """An amount of a source: a number of documents, or of bytes of text."""

    amount: int
    unit: Literal["documents", "bytes"]

    @classmethod
    def parse(cls, value: Any) -> Amount:
        """Parse "10k documents", "2 GB" or an Amount.

        Raises:
            ValueError: not an amount, or not positive.
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


#: JSON Schema of a share from 0 to 1, or a percentage.
PERCENT_OR_SHARE = {
    "anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "string", "pattern": rf"^{_PERCENT}\s*$"}]
}


def parse_share(value: Any) -> Any:
    """Parse a share such as 0.8 or "80 %".

    Raises:
        ValueError: it is a text, but not a percentage.
    """
    if not isinstance(value, str):
        return value
    percent, *words = _split(value.strip().removesuffix("%"))
    if not value.strip().endswith("%") or any(words) or percent > 100:
        raise ValueError(f"'{value}' is not a share; write for example '80 %'")
    return float(percent / 100)


def share_or_interval(value: Any) -> float | Interval:
    """Parse a share or an interval: a number up to 1 with a point is a share, a whole number is steps.

    So 1 is one step, and 1.0 is all steps.

    Raises:
        ValueError: not an amount of steps or tokens, or more than all of them.
    """
    if isinstance(value, str) and value.strip().endswith("%"):
        return float(parse_share(value))
    if isinstance(value, float) or value == 0:
        return float(value)
    return _check_is_not_time(Interval.parse(value))
