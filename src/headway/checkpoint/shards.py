"""Safetensors files: writing them from live tensors, and reading tensors that may be spread over several.

Reading is the safetensors library's. Writing is not: here each tensor passes through memory once, is hashed and written
on the way, and a full disk is an `OSError` with its number.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.format import DTYPES, FileEntry, Manifest, tensor_bytes
from headway.core.errors import CheckpointError
from headway.core.faults import fault_point

if TYPE_CHECKING:
    import torch

    from headway.core.types import StateTensors


def plan_shards(tensors: StateTensors, max_bytes: int) -> list[list[str]]:
    """Tensor names per file, in the order of names; a tensor larger than `max_bytes` gets a file of its own."""
    shards: list[list[str]] = []
    room = 0
    for name in sorted(tensors):
        if tensors[name].nbytes > room or not shards:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= tensors[name].nbytes
    return shards


def write_shard(path: Path, tensors: StateTensors) -> tuple[FileEntry, dict[str, str]]:
    """Write one safetensors file and flush it to disk.

    Returns:
        The file's size and hash, and the SHA-256 of each tensor; both of the bytes as they were in memory, so that what
        a disk or its driver changes on the way is found later.

    Raises:
        CheckpointError: a tensor's dtype has no place in the format.
        OSError: the file cannot be written.
    """
    # Wide elements first, as the library does, so that every tensor is aligned when the file is mapped.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": dtype_name(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    hashes = {}
    preamble = len(text).to_bytes(8, "little") + text
    whole = hashlib.sha256(preamble)
    with path.open("wb") as file:
        file.write(preamble)
        for name, tensor in ordered:
            data = tensor_bytes(tensor)
            hashes[name] = hashlib.sha256(data).hexdigest()
            whole.update(data)
            file.write(data)
        fault_point("checkpoint.shard")
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(bytes=len(preamble) + end, sha256=whole.hexdigest()), hashes


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """The safetensors name of a tensor's type."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(
            f"tensors of type {dtype} have no place in a checkpoint", where=f"tensor '{name}'", fix="convert it"
        )
    return DTYPES[dtype]


@contextmanager
def open_shard(path: Path, framework: str = "pt") -> Iterator[Any]:
    """A safetensors file, mapped.

    Raises:
        CheckpointError: it is missing or is no such file.
    """
    import safetensors

    try:
        with safetensors.safe_open(str(path), framework) as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error}", where=str(path), fix="restore it from a copy"
        ) from None


def contradiction(manifest: Manifest, name: str, file: Any) -> str | None:
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


def read_tensors(folder: Path, manifest: Manifest) -> StateTensors:
    """All tensors on the CPU; those in one piece are mapped and read when touched.

    Raises:
        CheckpointError: a file is missing, unreadable or does not hold what the manifest says.
    """
    import torch

    tensors: StateTensors = {}
    for name in manifest.files:
        with open_shard(folder / name) as file:
            difference = contradiction(manifest, name, file)
            if difference:
                raise CheckpointError(f"{name} {difference}", where=str(folder), fix="use another checkpoint")
            for tensor, part in manifest.slices_of(name):
                block, shape = file.get_tensor(tensor), manifest.tensors[tensor].shape
                if part.shape == shape:
                    tensors[tensor] = block
                    continue
                whole = tensors.setdefault(tensor, torch.empty(shape, dtype=block.dtype))
                whole[tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))] = block
    return tensors
