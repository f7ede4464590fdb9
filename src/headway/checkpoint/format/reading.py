"""Reading of tensors that are spread over several safetensors files, perhaps cut differently than a worker needs them.

Files are mapped, so that only the needed parts are read. PyTorch's distributed checkpointing works out which parts of
which slices make up a worker's block.
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
from headway.core.files.foreign import open_regular, parse_json
from headway.core.types import Block, StateTensors, part_of

if TYPE_CHECKING:
    import torch


class Shard(Protocol):
    """An open safetensors file; its tensors stay valid when it is closed."""

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        ...

    def get_slice(self, name: str) -> Any:
        """Return an object with the type and the shape of a tensor: `get_dtype()`, `get_shape()`."""
        ...

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        ...


@contextmanager
def open_shard(path: Path, framework: str = "pt") -> Iterator[Shard]:
    """Open a file of a checkpoint: map it, or decrypt only the needed chunks if it is sealed.

    Raises:
        CheckpointError: The file is missing, is no safetensors file, or cannot be read.
        ConfigError: The file is sealed, and there is no key.
    """
    import safetensors

    with _explain_read_errors(path):
        open_regular(path).close()  # refuses a FIFO, which the libraries below would wait for
        yield SealedShard(path) if path.name.endswith(SEALED) else safetensors.safe_open(str(path), framework)


@contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    import safetensors

    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error}", where=str(path), fix="restore it from a copy"
        ) from None


@dataclass(frozen=True)
class _Described:
    """A tensor of a sealed file, and the position of its elements in the content."""

    dtype: str
    shape: list[int]
    begin: int
    end: int

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return self.shape


class SealedShard:
    """A sealed safetensors file. Nothing is mapped; only the chunks of a requested tensor are decrypted."""

    def __init__(self, path: Path) -> None:
        self._file = SealedFile(path)
        # The header is authenticated, so it is as Headway wrote it and needs no validation.
        length = int.from_bytes(self._file.read(0, 8), "little")
        header = parse_json(bytes(self._file.read(8, 8 + length)))
        self._tensors = {
            name: _Described(entry["dtype"], entry["shape"], *(8 + length + at for at in entry["data_offsets"]))
            for name, entry in header.items()
        }

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> _Described:
        """Return the type and shape of a tensor."""
        return self._tensors[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in memory of its own."""
        import torch

        found = self._tensors[name]
        dtype = getattr(torch, next(key for key, value in DTYPES.items() if value == found.dtype))
        if found.begin == found.end:
            return torch.empty(found.shape, dtype=dtype)
        elements = torch.frombuffer(self._file.read(found.begin, found.end), dtype=torch.uint8)
        return elements.view(dtype).reshape(found.shape)


def contradiction(manifest: Manifest, name: str, file: Shard) -> str | None:
    """Return how an open file (`open_shard`) contradicts its manifest, in words; None if it does not."""
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
    """The tensors of a checkpoint. A file is opened and compared with the manifest when one of its tensors is read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._opened: dict[str, Shard] = {}

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU; it is mapped if it is stored in one piece.

        Raises:
            CheckpointError: A file is missing, unreadable or contradicts the manifest.
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
        """Overwrite a part of the state, on any device; nothing else is read.

        Raises:
            CheckpointError: As for `whole`.
        """
        entry = self._manifest.tensors[name]
        size = tuple(block.local.shape)
        if 0 in size:
            return
        same = _same_slice(entry, block)
        if same is not None:
            block.local.copy_(self._slice(name, same))
        elif len(entry.slices) == 1 or len(size) != len(entry.slices[0].shape):
            # Only the touched pages of a single mapped piece are read. A run from boxes, or a box from runs, is rare
            # (a change between DeepSpeed and another strategy), so it may read the whole tensor.
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
        with _explain_read_errors(path):
            return self._opened[part.file].get_tensor(name)


def files_of(manifest: Manifest, name: str, block: Block) -> set[str]:
    """Return the files that `SavedTensors.copy_into` may read for a block; none if the checkpoint lacks the tensor."""
    entry = manifest.tensors.get(name)
    if entry is None or 0 in block.local.shape:
        return set()
    same = _same_slice(entry, block)
    return {part.file for part in (entry.slices if same is None else [same])}


def _same_slice(entry: TensorEntry, block: Block) -> Slice | None:
    """Return the slice with the same offset and shape as the block, if there is one."""
    size = tuple(block.local.shape)
    return next((s for s in entry.slices if (s.offset, s.shape) == (block.offset, size)), None)


_Index = tuple[slice, ...]


def _overlaps(name: str, entry: TensorEntry, block: Block) -> Iterator[tuple[Slice, _Index, _Index]]:
    """Yield the slices that overlap a block, with the index of the shared elements in the slice and in the block."""
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
    """Return all tensors, whole, on the CPU; those stored in one piece are mapped and read when touched.

    Raises:
        CheckpointError: A file is missing, unreadable or contradicts the manifest.
    """
    saved = SavedTensors(folder, manifest)
    return {name: saved.whole(name) for name in manifest.tensors}
