"""The hash of a file out of those of its parts: every byte is in it, and no header leads it astray."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from headway.checkpoint.format import file_hash
from headway.checkpoint.format.file_hash import is_as_written, parts_hash
from headway.checkpoint.format.manifest import FileEntry


def entry_of(content: bytes) -> FileEntry:
    """As docs/checkpoint-format.md says, word for word."""
    begin = 8 + int.from_bytes(content[:8], "little")
    spans = sorted(entry["data_offsets"] for entry in json.loads(content[8:begin]).values())
    parts = [content[:begin], *(content[begin + first : begin + last] for first, last in spans)]
    whole = b"".join(hashlib.sha256(part).digest() for part in parts)
    return FileEntry(bytes=len(content), parts_sha256=hashlib.sha256(whole).hexdigest())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(5), "none": torch.empty(0, 3), "b": torch.ones(3, 2), "c": torch.zeros(1).bool()}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_any_byte_that_changes_changes_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hash, "_READ_BYTES", 7)
    content = path.read_bytes()
    entry = entry_of(content)
    assert is_as_written(path, entry)
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        assert not is_as_written(path, entry), position
    for other in (b"", content[:7], content[:-1], content + b"x", bytes(len(content))):
        path.write_bytes(other)
        assert not is_as_written(path, entry)


def header(*offsets: Any, **more: Any) -> bytes:
    record = {str(n): {"dtype": "U8", "shape": [1], "data_offsets": span} for n, span in enumerate(offsets)} | more
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"7",
        b"{",
        b"[" * 200_000,
        header([0, 4]),
        header([0, 8], [4, 8]),
        header([0, 4], [5, 8]),
        header([-8, 0], [0, 8]),
        header([0, 12], [12, 8]),
        header([0, 2**70]),
        header([0, float("inf")]),
        header([0, 8, 8]),
        header(None),
        header([[0], 8]),
        header([0, 8], more={}),
        header([0, 8], __metadata__={"format": "pt"}),
    ],
)
def test_a_header_that_lies_is_damage(path: Path, text: bytes) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert file_hash._parts_hash_of(path, 1) is None
    assert not is_as_written(path, FileEntry(bytes=path.stat().st_size, parts_sha256="0" * 64))


def test_a_length_that_lies_takes_no_memory(path: Path) -> None:
    with path.open("wb") as file:
        file.write((2**63).to_bytes(8, "little"))
        os.ftruncate(file.fileno(), 2**40)  # holes, no bytes
    assert file_hash._parts_hash_of(path, 1) is None
    assert not is_as_written(path, FileEntry(bytes=2**40, parts_sha256="0" * 64))


def test_a_header_without_tensors_has_one_part(path: Path) -> None:
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    assert is_as_written(path, FileEntry(bytes=10, parts_sha256=parts_hash(path.read_bytes(), [])))
