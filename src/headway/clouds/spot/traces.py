"""Recorded prices over time: CSV with `time,usd_per_hour`, or what `aws ec2 describe-spot-price-history` prints."""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.files.foreign import parse_json, read_given_bytes
from headway.cost.offers import STALE_DAYS, check_price, number_of
from headway.cost.price_files import PRICE_FILE_BYTES, parsing_prices, reading_prices

_COLUMNS = ("time", "usd_per_hour")
#: Times before the year 2001 are seconds since the start of a recording.
_FIRST_DATE = 1e9


@dataclass(frozen=True)
class Trace:
    """A price that holds from each time to the next. Times are Unix seconds, rising."""

    times: tuple[float, ...]
    prices: tuple[float, ...]

    def price_at(self, moment: float) -> float:
        """Return the price at a time; before the first one, the first."""
        return self.prices[max(0, bisect_right(self.times, moment) - 1)]

    @property
    def seconds(self) -> float:
        """Length of the trace."""
        return self.times[-1] - self.times[0]


def is_old(moment: float, now: float) -> bool:
    """Return whether a spot price of a time is stale; a time that is no date, but counts from a start, is not."""
    return _FIRST_DATE < moment < now - STALE_DAYS["spot"] * 86400


def read_trace(path: Path, zone: str | None = None) -> Trace:
    """Read a trace.

    Args:
        path: The file.
        zone: Availability zone, if the history has several.

    Raises:
        ConfigError: it cannot be read, or an entry is broken; the error has its line or number.
    """
    with reading_prices(path, "name a file of prices"):
        text = read_given_bytes(path, PRICE_FILE_BYTES).decode("utf-8")
    is_json = text.lstrip()[:1] in ("{", "[")
    entries = sorted(_history(text, path, zone) if is_json else _lines(text, path))
    if not entries:
        raise ConfigError("there are no prices", where=str(path), fix=f"lines of {','.join(_COLUMNS)}")
    return Trace(tuple(moment for moment, _ in entries), tuple(price for _, price in entries))


def _lines(text: str, path: Path) -> Iterator[tuple[float, float]]:
    lines = csv.DictReader(StringIO(text, newline=""))
    with parsing_prices(lines, path, "get it anew"):
        yield from _rows(lines, path)


def _rows(lines: csv.DictReader[str], path: Path) -> Iterator[tuple[float, float]]:
    if not set(_COLUMNS) <= set(lines.fieldnames or ()):
        raise ConfigError(
            f"the first line does not name the columns {' and '.join(_COLUMNS)}",
            where=f"{path}, line 1",
            fix=f"{','.join(_COLUMNS)}",
        )
    for row in lines:
        try:
            yield _moment(row["time"]), _price(row["usd_per_hour"])
        except ValueError as error:
            where = f"{path}, line {lines.line_num}"
            raise ConfigError(f"a line of the prices is broken: it {error}", where=where, fix="correct it") from None


def _history(text: str, path: Path, zone: str | None) -> Iterator[tuple[float, float]]:
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"the prices cannot be read: the file {error}", where=str(path), fix="get it anew") from None
    items: Any = content.get("SpotPriceHistory") if isinstance(content, dict) else content
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ConfigError("there is no SpotPriceHistory", where=str(path), fix="the output of the AWS CLI as it is")
    kinds = sorted({(str(item.get("AvailabilityZone")), str(item.get("InstanceType"))) for item in items})
    zones = sorted({place for place, _ in kinds})
    if zone is not None and zone not in zones:
        raise ConfigError(
            f"there are no prices of the zone '{zone}'", where="--zone", fix=f"one of: {', '.join(zones)}"
        )
    kept = [kind for kind in kinds if zone in (None, kind[0])]
    if len(kept) > 1:
        what = f"the history has {len(kept)} kinds of machines or zones"
        raise ConfigError(what, where=str(path), fix=f"--zone {zones[0]}; and ask AWS for one instance type")
    for number, item in enumerate(items, 1):
        if zone not in (None, item.get("AvailabilityZone")):
            continue
        try:
            yield _moment(item.get("Timestamp")), _price(item.get("SpotPrice"))
        except ValueError as error:
            raise ConfigError(f"entry {number} is broken: it {error}", where=str(path), fix="get it anew") from None


def _moment(value: Any) -> float:
    number = number_of(value)
    if number is None and isinstance(value, str):
        with suppress(ValueError):
            found = datetime.fromisoformat(value)
            number = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    if number is None or not 0 <= number < 253_402_300_800:
        raise ValueError(f"has the time {value!r:.40}, which is neither a date nor a number")
    return number


def _price(value: Any) -> float:
    return check_price(number_of(value), value)
