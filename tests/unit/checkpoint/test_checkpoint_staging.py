"""Memory between training and the process that writes: on machines with GPUs, and on its way to the disk."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.checkpoint.format.file_layout import Elements, Piece, ShardFile, plan_files
from headway.checkpoint.save import staging
from headway.checkpoint.save.staging import StagedFiles, StagingBuffer
from headway.core.types import Block


class Cuda:
    """As CUDA's runtime: it has no memory to keep in place, and the next kernel gets the blame for that."""

    def __init__(self) -> None:
        self.error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.error = 2
        return self.error

    def kernel(self, *_: Any, **__: Any) -> None:
        error, self.error = self.error, 0
        if error:
            raise torch.AcceleratorError("CUDA error: out of memory")


def test_memory_that_cannot_be_kept_in_its_place_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, state = Cuda(), {"weight": Block.whole(torch.arange(6.0))}
    images = plan_files([Piece.of(name, block) for name, block in state.items()], 0, 2**20)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=cuda.cudaHostRegister))
    monkeypatch.setattr(torch, "zeros", cuda.kernel)
    buffer = StagingBuffer()
    try:
        buffer.prepare(images, pinned=True)
        cuda.kernel()  # of the training, which goes on
        buffer.fill(state)
        assert torch.equal(buffer._views["weight"].view(torch.float32), torch.arange(6.0))
    finally:
        buffer.close()


class Disk:
    """What a file system takes directly; it sees where its writes begin and how long they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.takes: Callable[[int], int] = lambda count: count
        """Of so many bytes; may raise."""
        self.has_it, self.is_direct, self.taken = True, False, 0
        set_flags, write = fcntl.fcntl, os.write

        def flags(descriptor: int, command: int, value: int = 0) -> int:
            if command != fcntl.F_SETFL:
                return set_flags(descriptor, command, value)
            self.is_direct = bool(value & os.O_DIRECT)
            if self.is_direct and not self.has_it:
                raise OSError(errno.EINVAL, "Invalid argument")
            return 0

        def written(descriptor: int, content: memoryview) -> int:
            assert self.is_direct and len(content) % 4096 == 0
            if self.taken % 512:
                raise OSError(errno.EINVAL, "Invalid argument")
            count = write(descriptor, content[: self.takes(len(content))])
            self.taken += count
            return count

        monkeypatch.setattr(staging.fcntl, "fcntl", flags)
        monkeypatch.setattr(staging.os, "write", written)
        monkeypatch.setattr(staging, "_LARGE_BYTES", 0)
        monkeypatch.setattr(staging, "_DIRECT_BYTES", 8192)


@pytest.fixture
def blocks() -> dict[str, Block]:
    """Two tensors, which end in the middle of a page."""
    return {"first": Block.whole(torch.randn(5000)), "second": Block.whole(torch.randn(77, 31))}


@pytest.fixture
def staged(blocks: dict[str, Block]) -> Iterator[Callable[[], tuple[ShardFile, StagedFiles]]]:
    """Their one file, as it waits to be written."""
    buffer = StagingBuffer()

    def stage() -> tuple[ShardFile, StagedFiles]:
        images = plan_files([Piece.of(name, block) for name, block in blocks.items()], 0, 2**20)
        buffer.prepare(images, pinned=False)
        buffer.fill(blocks)
        return images[0], StagedFiles(buffer.descriptor, images)

    yield stage
    buffer.close()


Staged = Callable[[], tuple[ShardFile, StagedFiles]]


def _copied(to: Path, source: StagedFiles | Elements, image: ShardFile) -> bytes:
    with to.open("wb", buffering=0) as file:
        source.copy(image, file.fileno())
    return to.read_bytes()


def _expected(folder: Path, staged: tuple[ShardFile, StagedFiles]) -> bytes:
    return _copied(folder / "expected", Elements(staged[1].elements), staged[0])


def test_a_large_file_reaches_the_disk_as_it_is_in_memory(
    tmp_path: Path, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, source = staged()
    expected = _expected(tmp_path, (image, source))
    monkeypatch.setattr(staging, "_LARGE_BYTES", 0)
    assert len(expected) == image.nbytes
    assert _copied(tmp_path / "file", source, image) == expected


@pytest.mark.parametrize("takes", ["all", "some", "a part that ends nowhere"])
def test_it_goes_past_the_page_cache_as_far_as_the_disk_takes_it(
    tmp_path: Path, staged: Staged, monkeypatch: pytest.MonkeyPatch, takes: str
) -> None:
    image, source = staged()
    expected = _expected(tmp_path, (image, source))
    disk = Disk(monkeypatch)
    if takes != "all":
        disk.takes = lambda count: min(count, 4096) if takes == "some" or disk.taken < 12288 else 100
    assert _copied(tmp_path / "file", source, image) == expected
    assert disk.taken == (12388 if takes == "a part that ends nowhere" else -(-image.nbytes // 4096) * 4096)
    assert not disk.is_direct  # what follows, and the flush, is as it was


def test_a_file_system_that_has_no_such_way_gets_it_by_the_page_cache(
    tmp_path: Path, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, source = staged()
    expected = _expected(tmp_path, (image, source))
    disk = Disk(monkeypatch)
    disk.has_it = False
    assert _copied(tmp_path / "file", source, image) == expected
    assert disk.taken == 0


def test_a_full_disk_is_told(tmp_path: Path, staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    image, source = staged()
    disk = Disk(monkeypatch)

    def takes(count: int) -> int:
        if disk.taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return 4096

    disk.takes = takes
    with pytest.raises(OSError, match="No space"):
        _copied(tmp_path / "file", source, image)


@pytest.mark.parametrize("why", ["small", "has parts of tensors"])
def test_what_is_read_again_soon_goes_by_the_page_cache(
    tmp_path: Path, blocks: dict[str, Block], staged: Staged, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "has parts of tensors":
        blocks["second"] = Block(torch.randn(77, 31), (0, 31), (77, 62))
    image, source = staged()
    expected = _expected(tmp_path, (image, source))
    disk = Disk(monkeypatch)
    if why == "small":
        monkeypatch.setattr(staging, "_LARGE_BYTES", image.nbytes + 1)
    assert _copied(tmp_path / "file", source, image) == expected
    assert disk.taken == 0
