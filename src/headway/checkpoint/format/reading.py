"""Reading tensors that may be spread over several safetensors files, and cut in other ways than they are wanted.

Files are mapped, so that what is read is what is needed. Which parts of which slices make up what a worker wants is
worked out by PyTorch's distributed checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headway.checkpoint.format.manifest import DTYPES, Manifest, Slice, TensorEntry
from headway.checkpoint.format.sealing import SEALED, SealedFile
from headway.core.errors import CheckpointError
from headway.core.foreign import open_regular, parse_json
from headway.core.types import part_of

if TYPE_CHECKING:
    import torch

    from headway.core.types import Block, StateTensors


class Shard(Protocol):
    """An open safetensors file; what it gives stays when it goes."""

    def keys(self) -> list[str]:
        """Names of the tensors in it."""
        ...

    def get_slice(self, name: str) -> Any:
        """Tells the type and the shape of a tensor: `get_dtype()`, `get_shape()`."""
        ...

    def get_tensor(self, name: str) -> torch.Tensor:
        """One of them."""
        ...


@contextmanager
def open_shard(path: Path, framework: str = "pt") -> Iterator[Shard]:
    """A file of a checkpoint: mapped, or if it is sealed, opened in parts.

    Raises:
        CheckpointError: it is missing or is no such file, or what is read of it cannot be.
        ConfigError: it is sealed, and there is no key.
    """
    import safetensors

    with _told_well(path):
        open_regular(path).close()  # what opens it below would wait for a FIFO
        yield SealedShard(path) if path.name.endswith(SEALED) else safetensors.safe_open(str(path), framework)


@contextmanager
def _told_well(path: Path) -> Iterator[None]:
    import safetensors

    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error}", where=str(path), fix="restore it from a copy"
        ) from None


@dataclass(frozen=True)
class _Described:
    """A tensor of a sealed file, and where in the content its elements are."""

    dtype: str
    shape: list[int]
    begin: int
    end: int

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return self.shape


class SealedShard:
    """A sealed safetensors file. Nothing is mapped: of a tensor that is asked for, its chunks are decrypted."""

    def __init__(self, path: Path) -> None:
        self._file = SealedFile(path)
        # It was authenticated, so it is as Headway has written it.
        length = int.from_bytes(self._file.read(0, 8), "little")
        header = parse_json(bytes(self._file.read(8, 8 + length)))
        self._tensors = {
            name: _Described(entry["dtype"], entry["shape"], *(8 + length + at for at in entry["data_offsets"]))
            for name, entry in header.items()
        }

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> _Described:
        """Type and shape of a tensor."""
        return self._tensors[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor, in memory of its own."""
        import torch

        found = self._tensors[name]
        dtype = getattr(torch, next(key for key, value in DTYPES.items() if value == found.dtype))
        if found.begin == found.end:
            return torch.empty(found.shape, dtype=dtype)
        elements = torch.frombuffer(self._file.read(found.begin, found.end), dtype=torch.uint8)
        return elements.view(dtype).reshape(found.shape)


def contradiction(manifest: Manifest, name: str, file: Shard) -> str | None:
    """How an open file (`open_shard`) differs from what the manifest says is in it, in words; None if it does not."""
    expected = {tensor: (manifest.tensors[tensor].dtype, part.shape) for tensor, part in manifest.slices_of(name)}
    names = set(file.keys())
    if names != expected.keys():
        return f"holds other tensors than the manifest says: {', '.join(sorted(names ^ expected.keys())[:5])}"
    for tensor, (dtype, shape) in expected.items():
        block = file.get_slice(tensor)
        found = (str(block.get_dtype()), tuple(block.get_shape()))
        if found != (dtype, shape):
            return f"holds '{tensor}' as {found}, the manifest says {(dtype, shape)}"
    return None


class SavedTensors:
    """The tensors of a checkpoint. A file is opened, and compared with the manifest, when something in it is wanted."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._opened: dict[str, Shard] = {}

    def whole(self, name: str) -> torch.Tensor:
        """One tensor on the CPU; mapped if it lies in one piece.

        Raises:
            CheckpointError: a file is missing, unreadable or does not hold what the manifest says.
        """
        import torch

        entry = self._manifest.tensors[name]
        parts = [(part, self._slice(name, part)) for part in entry.slices]
        if len(parts) == 1:
            return parts[0][1].reshape(entry.shape)
        whole = torch.empty(entry.shape, dtype=parts[0][1].dtype)
        for part, elements in parts:
            part_of(whole, part.offset, part.shape).copy_(elements)
        return whole

    def copy_into(self, name: str, block: Block) -> None:
        """Overwrite a part of the state, on whatever device it is; nothing else is read.

        Raises:
            CheckpointError: as `whole`.
        """
        entry, size = self._manifest.tensors[name], tuple(block.local.shape)
        if 0 in size:
            return
        same = _same_slice(entry, block)
        if same is not None:
            block.local.copy_(self._slice(name, same))
        elif len(entry.slices) == 1 or len(size) != len(entry.slices[0].shape):
            # Of one mapped piece only what is touched is read. A run out of boxes, or a box out of runs, is rare enough
            # (DeepSpeed and another strategy) to go by way of the whole.
            block.local.copy_(block.of(self.whole(name)))
        else:
            for part, here, there in _overlaps(name, entry, block):
                block.local[there].copy_(self._slice(name, part)[here])

    def _slice(self, name: str, part: Slice) -> torch.Tensor:
        path = self._folder / part.file
        if part.file not in self._opened:
            with open_shard(path) as file:
                difference = contradiction(self._manifest, part.file, file)
            if difference:
                raise CheckpointError(
                    f"{part.file} {difference}", where=str(self._folder), fix="use another checkpoint"
                )
            self._opened[part.file] = file
        with _told_well(path):
            return self._opened[part.file].get_tensor(name)


def files_of(manifest: Manifest, name: str, block: Block) -> set[str]:
    """The files that `SavedTensors.copy_into` may read for a block; none for a tensor that the checkpoint lacks."""
    entry = manifest.tensors.get(name)
    if entry is None or 0 in block.local.shape:
        return set()
    same = _same_slice(entry, block)
    return {part.file for part in (entry.slices if same is None else [same])}


def _same_slice(entry: TensorEntry, block: Block) -> Slice | None:
    """The one that was cut as the block is, if there is one."""
    size = tuple(block.local.shape)
    return next((s for s in entry.slices if (s.offset, s.shape) == (block.offset, size)), None)


_Index = tuple[slice, ...]


def _overlaps(name: str, entry: TensorEntry, block: Block) -> Iterator[tuple[Slice, _Index, _Index]]:
    """The slices that share elements with a block that is cut alike, and which: in the slice, and in the block."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    chunks = [ChunkStorageMetadata(torch.Size(s.offset), torch.Size(s.shape)) for s in entry.slices]
    saved = TensorStorageMetadata(TensorProperties(block.local.dtype), torch.Size(entry.shape), chunks)
    wanted = ChunkStorageMetadata(torch.Size(block.offset), block.local.shape)
    for item in create_read_items_for_chunk_list(name, saved, [wanted]):
        assert item.storage_index.index is not None, "it says which chunk"
        here = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
        there = tuple(slice(o, o + n) for o, n in zip(item.dest_offsets, item.lengths, strict=True))
        yield entry.slices[item.storage_index.index], here, there


def read_tensors(folder: Path, manifest: Manifest) -> StateTensors:
    """All tensors, whole, on the CPU; those in one piece are mapped and read when touched.

    Raises:
        CheckpointError: a file is missing, unreadable or does not hold what the manifest says.
    """
    saved = SavedTensors(folder, manifest)
    return {name: saved.whole(name) for name in manifest.tensors}
