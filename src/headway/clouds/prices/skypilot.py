"""SkyPilot's catalogue of prices as a source: `vms.csv` of a cloud, as `~/.sky/catalogs` or its repository has it.

The columns are those of https://github.com/skypilot-org/skypilot-catalog. Zones of a region become one offer at the
price of the cheapest zone. The file of Google Cloud lists hosts and accelerators apart; a machine costs both.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from io import StringIO
from pathlib import Path

from headway.core.errors import ConfigError
from headway.core.files.foreign import read_given_bytes
from headway.cost.offers import BadOffer, Offer, cheapest_per_region, make_offer, number_of
from headway.cost.price_files import PRICE_FILE_BYTES, parsing_prices, reading_prices

_NEEDED = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "SpotPrice", "Region")

#: SkyPilot's names of accelerators that have another name here.
_GPUS = {
    "A100": "A100-40GB",
    "A100-80GB": "A100",
    "H100-SXM": "H100",
    "H200-SXM": "H200",
    "A100-80GB-SXM": "A100",
    "RTX4090": "RTX-4090",
    "RTX3090": "RTX-3090",
    "RTX5090": "RTX-5090",
    "RTXA6000": "RTX-A6000",
    "A6000": "RTX-A6000",
    "RTX6000-Ada": "RTX-6000-Ada",
    "V100": "V100-16GB",
    "V100-32GB": "V100",
}

#: Names that mean another accelerator in the catalogue of one cloud: RunPod has SXM modules under names of their own.
_GPUS_OF_CLOUD = {"runpod": {"A100-80GB": "A100-PCIe", "H100": "H100-PCIe"}}

#: Machines of Google Cloud that are sold with their accelerators: prefix of the machine, accelerator, and how its
#: number follows from the name.
_GCP_MACHINES = (
    (re.compile(r"a2-highgpu-(\d+)g"), "A100"),
    (re.compile(r"a2-ultragpu-(\d+)g"), "A100-80GB"),
    (re.compile(r"a2-megagpu-(16)g"), "A100"),
    (re.compile(r"a3-highgpu-(\d+)g"), "H100"),
    (re.compile(r"a3-megagpu-(8)g"), "H100-MEGA"),
    (re.compile(r"a3-ultragpu-(8)g"), "H200"),
    (re.compile(r"a4-highgpu-(8)g"), "B200"),
)


def read_catalogue(path: Path, cloud: str | None = None, day: date | None = None) -> list[Offer]:
    """Read the offers with accelerators from a catalogue.

    Args:
        path: The file `vms.csv`.
        cloud: Name of the cloud; that of the file's folder when not given.
        day: When the prices were valid; the file's modification when not given.

    Raises:
        ConfigError: it cannot be read, or a line is broken; the error has its number.
    """
    with reading_prices(path, "name SkyPilot's vms.csv"):
        text = read_given_bytes(path, PRICE_FILE_BYTES).decode("utf-8")
        day = day or datetime.fromtimestamp(path.stat().st_mtime, UTC).date()
    named = cloud or path.absolute().parent.name
    lines = csv.DictReader(StringIO(text, newline=""))
    with parsing_prices(lines, path, "get the file anew"):
        return _read(lines, path, named, day)


def _read(lines: csv.DictReader[str], path: Path, named: str, day: date) -> list[Offer]:
    missing = [name for name in _NEEDED if name not in (lines.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"the prices have no column {missing[0]}",
            where=f"{path}, line 1",
            fix=f"a catalogue has the columns {', '.join(_NEEDED)}",
        )
    read = _gcp_offers if named.lower() == "gcp" else _offers
    source = str(path)
    try:
        found = cheapest_per_region(read(lines, named.lower(), source, day))
    except _BrokenLine as error:
        raise ConfigError(
            f"a line of the prices is broken: it {error}",
            where=f"{path}, line {error.line}",
            fix="correct or remove the line, or get the file anew",
        ) from None
    if not found:
        raise ConfigError(
            "no line of the prices has an accelerator", where=str(path), fix="name the vms.csv of a cloud with GPUs"
        )
    return found


class _BrokenLine(ValueError):
    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


def _offers(lines: csv.DictReader[str], cloud: str, source: str, day: date) -> Iterator[Offer]:
    gpus = {**_GPUS, **_GPUS_OF_CLOUD.get(cloud, {})}
    for row in lines:
        name = (row["AcceleratorName"] or "").strip()
        if not name or not (row["InstanceType"] or "").strip() or name.startswith("tpu"):
            continue
        record = _record(row, lines.line_num, cloud, source, day)
        record.update(
            instance=row["InstanceType"], gpu=gpus.get(name, name), gpus=_number(row, "AcceleratorCount", lines)
        )
        yield from _terms(record, _price(row, "Price", lines), _price(row, "SpotPrice", lines), lines.line_num)


def _gcp_offers(lines: csv.DictReader[str], cloud: str, source: str, day: date) -> Iterator[Offer]:
    hosts: list[tuple[int, dict[str, object], str, int, str, tuple[float | None, float | None]]] = []
    parts: dict[tuple[str, int, str], tuple[float | None, float | None]] = {}
    for row in lines:
        name = (row["AcceleratorName"] or "").strip()
        instance = (row["InstanceType"] or "").strip()
        zone = row.get("AvailabilityZone") or row["Region"] or ""
        prices = _price(row, "Price", lines), _price(row, "SpotPrice", lines)
        if name and not instance:
            if not name.startswith("tpu"):
                parts[name, int(_number(row, "AcceleratorCount", lines)), zone] = prices
        elif instance and not name:
            for pattern, gpu in _GCP_MACHINES:
                if (match := pattern.fullmatch(instance)) is not None:
                    record = _record(row, lines.line_num, cloud, source, day)
                    record.update(instance=instance, gpu=_GPUS.get(gpu, gpu), gpus=int(match[1]))
                    hosts.append((lines.line_num, record, gpu, int(match[1]), zone, prices))
    for line, record, gpu, count, zone, prices in hosts:
        added = parts.get((gpu, count, zone))
        if added is not None:
            sums = [None if a is None or b is None else round(a + b, 6) for a, b in zip(prices, added, strict=True)]
            yield from _terms(record, sums[0], sums[1], line)


def _record(row: Mapping[str, str | None], line: int, cloud: str, source: str, day: date) -> dict[str, object]:
    if None in row or None in row.values():
        raise _BrokenLine(line, "has not as many values as the first line has columns")
    return {"cloud": cloud, "region": row["Region"], "source": source, "date": day.isoformat()}


def _terms(record: dict[str, object], on_demand: float | None, spot: float | None, line: int) -> Iterator[Offer]:
    for is_spot, price in ((False, on_demand), (True, spot)):
        if price is None:
            continue
        try:
            yield make_offer({**record, "spot": is_spot, "usd_per_hour": price})
        except BadOffer as error:
            raise _BrokenLine(line, str(error)) from None


def _number(row: Mapping[str, str | None], column: str, lines: csv.DictReader[str]) -> float:
    value = row[column] or ""
    number = number_of(value)
    if number is None or not math.isfinite(number):
        raise _BrokenLine(lines.line_num, f"has '{value:.40}' as {column}, which is not a number")
    return number


def _price(row: Mapping[str, str | None], column: str, lines: csv.DictReader[str]) -> float | None:
    return None if not (row[column] or "").strip() else _number(row, column, lines)
