"""SkyPilot's catalogues, in hand-made files with their columns."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import pytest

from headway.clouds.prices.skypilot import read_catalogue
from headway.core.errors import ConfigError
from headway.cost.price_book import snapshot

AWS = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone
a1.large,,,2.0,4.0,,0.05,0.04,us-east-1,use1-az1
p5.48xlarge,H100,8.0,192.0,2048.0,"{'Gpus': [{'Name': 'H100', 'Count': 8}]}",55.0,20.0,us-east-1,use1-az1
p5.48xlarge,H100,8.0,192.0,2048.0,"{'Gpus': [{'Name': 'H100', 'Count': 8}]}",55.0,14.0,us-east-1,use1-az2
p5.48xlarge,H100,8.0,192.0,2048.0,,58.0,,eu-north-1,eun1-az1
p4d.24xlarge,A100,8.0,96.0,1152.0,,,9.5,us-east-1,use1-az1
"""
GCP = """InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice
a3-highgpu-2g,52.0,468.0,,,,us-east4,us-east4-a,2.5,0.5
a3-highgpu-8g,208.0,1872.0,,,,us-east4,us-east4-a,10.0,2.0
n1-standard-8,8.0,30.0,,,,us-east4,us-east4-a,0.4,0.1
,,,H100,2,,us-east4,us-east4-a,20.0,4.25
,,,tpu-v5p-8,1,tpu-v5p-8,us-east4,us-east4-a,16.8,6.72
"""


def write(tmp_path: Path, text: str, cloud: str = "aws") -> Path:
    path = tmp_path / cloud / "vms.csv"
    path.parent.mkdir()
    path.write_text(text)
    return path


def test_zones_become_one_offer_at_the_price_of_the_cheapest(tmp_path: Path) -> None:
    path = write(tmp_path, AWS)
    os.utime(path, (1_790_000_000, 1_790_000_000))  # 2026-09-21
    found = {offer.key: offer for offer in read_catalogue(path)}
    assert {key: offer.usd_per_hour for key, offer in found.items()} == {
        "aws/us-east-1/p5.48xlarge/spot": 14.0,
        "aws/us-east-1/p5.48xlarge/on-demand": 55.0,
        "aws/eu-north-1/p5.48xlarge/on-demand": 58.0,
        "aws/us-east-1/p4d.24xlarge/spot": 9.5,
    }
    spot = found["aws/us-east-1/p4d.24xlarge/spot"]
    assert (spot.gpu, spot.gpus, spot.source, spot.as_of) == ("A100-40GB", 8, str(path), date(2026, 9, 21))


def test_a_machine_of_google_costs_its_host_and_its_accelerators(tmp_path: Path) -> None:
    found = read_catalogue(write(tmp_path, GCP, "gcp"), day=date(2026, 11, 1))
    assert {offer.key: (offer.usd_per_hour, offer.gpus) for offer in found} == {
        "gcp/us-east4/a3-highgpu-2g/on-demand": (22.5, 2),
        "gcp/us-east4/a3-highgpu-2g/spot": (4.75, 2),
    }, "the price of eight accelerators is not known, and a host alone is no offer"


def test_an_imported_offer_has_the_accelerator_that_the_snapshot_gives_it(tmp_path: Path) -> None:
    """RunPod's `A100-80GB` is the PCIe card; the SXM module has a name of its own."""
    header, row = AWS.splitlines()[0], "1x_A100-80GB_SECURE,A100-80GB,1.0,8.0,117.0,,1.64,0.82,US,US-TX-1"
    found = {offer.key: offer.gpu for offer in read_catalogue(write(tmp_path, f"{header}\n{row}\n", "runpod"))}
    known = {offer.key: offer.gpu for offer in snapshot()}
    assert {key: known[key] for key in found if key in known} == {"runpod/US/1x_A100-80GB_SECURE/spot": "A100-PCIe"}
    assert set(found.values()) == {"A100-PCIe"}


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("58.0,,eu", "fifty,,eu", 5, "'fifty' as Price, which is not a number"),
        ("58.0,,eu", "nan,,eu", 5, "not a number"),
        ("58.0,,eu", "-58.0,,eu", 5, "not above zero"),
        ("58.0,,eu", "1e99,,eu", 5, "above $10,000"),
        ("8.0,96.0", "nan,96.0", 6, "'nan' as AcceleratorCount"),
        ("8.0,96.0", "eight,96.0", 6, "'eight' as AcceleratorCount"),
        (
            "p4d.24xlarge,A100,8.0,96.0,1152.0,,,9.5,us-east-1,use1-az1",
            "p4d.24xlarge,A100,8.0",
            6,
            "as many values",
        ),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, old: str, new: str, line: int, words: str) -> None:
    path = write(tmp_path, AWS.replace(old, new))
    with pytest.raises(ConfigError) as error:
        read_catalogue(path)
    lines = error.value.render().splitlines()
    assert len(lines) == 3 and words in lines[0], lines
    assert lines[1] == f"  where: {path}, line {line}"


def test_other_files_are_refused(tmp_path: Path) -> None:
    long = tmp_path / "long.csv"
    long.write_text("x" * 200_000)
    with pytest.raises(ConfigError, match="larger than field limit"):
        read_catalogue(long)
    with pytest.raises(ConfigError, match="no column AcceleratorName"):
        read_catalogue(write(tmp_path, AWS.replace("AcceleratorName", "Gpu")))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_catalogue(tmp_path / "none.csv")
    binary = tmp_path / "x.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_catalogue(binary)
    with pytest.raises(ConfigError, match="no line of the prices has an accelerator"):
        read_catalogue(write(tmp_path, AWS[: AWS.index("p5")], "azure"))
    huge = tmp_path / "huge.csv"
    with huge.open("wb") as file:
        file.truncate(2**40)  # a hole
    with pytest.raises(ConfigError, match="cannot be read"):
        read_catalogue(huge)
