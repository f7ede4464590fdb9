"""Compressed files of several members: nothing behind a damaged place is passed over without a word."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.text.reading.compression import open_content
from support.sources import find, read

ENDINGS = ["gz", "zst", "bz2", "xz"]
TEXTS = [f"document {number}" for number in range(300)]


def _members(ending: str) -> list[bytes]:
    """Three members of a hundred lines."""
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
    methods: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    if ending == "zst":
        methods["zst"] = pytest.importorskip("zstandard").ZstdCompressor().compress
    return [methods[ending](b"".join(lines[start : start + 100])) for start in (0, 100, 200)]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("damage", ["a byte", "64 bytes"])
def test_damage_where_a_member_begins_is_noticed(tmp_path: Path, ending: str, damage: str) -> None:
    first, second, third = _members(ending)
    second = b"\0" * 64 + second[64:] if damage == "64 bytes" else bytes([second[0] ^ 1]) + second[1:]
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(first + second + third)
    found = read(path)
    assert found.texts == TEXTS[:100]
    (bad,) = found.bad
    assert "cannot be read from here on" in bad.reason and bad.where == f"{path}:101"


@pytest.mark.parametrize("ending", ["zst", "bz2", "xz"])
@pytest.mark.parametrize("kept", [1, 40])
def test_a_file_cut_within_its_first_member_is_noticed(tmp_path: Path, ending: str, kept: int) -> None:
    (tmp_path / f"a.txt.{ending}").write_bytes(_members(ending)[0][:kept])
    found = read(tmp_path / f"a.txt.{ending}")
    assert not found.texts and "ends too early" in found.bad[0].reason


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_of_no_bytes_is_empty_as_a_plain_one_is(tmp_path: Path, ending: str) -> None:
    _members(ending)  # which skips what needs an extra
    for name in (f"a.txt.{ending}", f"a.jsonl.{ending}"):
        (tmp_path / name).touch()
        found = read(tmp_path / name)
        assert not found.texts and not found.bad


def test_zeros_may_pad_xz_but_not_bz2(tmp_path: Path) -> None:
    padding = b"\0" * 40_000
    for ending in ("xz", "bz2"):
        (tmp_path / f"a.jsonl.{ending}").write_bytes(b"".join(part + padding for part in _members(ending)))
    assert read(tmp_path / "a.jsonl.xz").texts == TEXTS and not read(tmp_path / "a.jsonl.xz").bad
    found = read(tmp_path / "a.jsonl.bz2")
    assert (found.texts, len(found.bad)) == (TEXTS[:100], 1)


@pytest.mark.parametrize("compress", [bz2.compress, lzma.compress])
def test_what_a_few_bytes_hold_comes_in_parts(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    size = 24 * 2**20
    ending = "bz2" if compress is bz2.compress else "xz"
    (tmp_path / f"a.txt.{ending}").write_bytes(compress(b"x" * size))
    (file,) = find(tmp_path / f"a.txt.{ending}")[0].files
    tracemalloc.start()
    try:
        with open_content(file) as stream:
            count = sum(map(len, iter(lambda: stream.read(2**16), b"")))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == size and peak < 16 * 2**20  # of which xz takes eight to look back
