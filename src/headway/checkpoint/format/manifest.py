"""The checkpoint format, up to version 4: the content of `manifest.json`, and the hash that names a state.

A checkpoint is a folder `step-00001000/` of safetensors files and this manifest, which is written last.
docs/checkpoint-format.md describes the format for readers in other languages.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from headway.checkpoint.format.sealing import SEALED
from headway.checkpoint.format.signing import SIGNATURE, Key, sign, signature_problem
from headway.core.errors import CheckpointError
from headway.core.files.foreign import ForeignFileError, parse_json, read_bytes
from headway.core.files.hashes import canonical_json, fingerprint, sha256_bytes
from headway.core.machine.cores import usable_cores
from headway.core.types import StateTensors

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
#: What a cursor counts of the steps that made no update.
_WITHOUT_UPDATE = ("skipped_steps", "left_out_steps", "steps_without_target")

#: PyTorch's name of a type -> its name in safetensors files and manifests.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

#: Bytes of an element, by the safetensors name of its type.
ITEM_BYTES = {name: int(re.findall(r"[0-9]+", name)[0]) // 8 if name != "BOOL" else 1 for name in DTYPES.values()}

_STEP_NAME = re.compile(r"step-[0-9]{8,}")


class _Part(BaseModel):
    # A later version of the format has another number, so an unknown key means damage.
    model_config = ConfigDict(extra="forbid", frozen=True)


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
#: No separators: a manifest can only name files beside itself.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors(\.sealed)?$")]
#: PyTorch's limits: sizes of 64 bits, and at most 64 dimensions.
Count = Annotated[int, Field(ge=0, lt=2**63)]
Shape = Annotated[tuple[Count, ...], Field(max_length=64)]

#: Begin and end (exclusive) of a box in each dimension.
_Box = list[tuple[int, int]]
#: How often the check for overlaps may visit a slice. For a grid it takes about log2(slices) visits.
_WORK_PER_SLICE = 64


class Slice(_Part):
    """A part of a tensor: the tensor of the same name in one file.

    A slice is a box of the whole tensor. If it has one dimension and the whole tensor has not, it is a run of
    consecutive elements in row-major order. Version 1 had only boxes.
    """

    file: FileName
    offset: Shape
    """Begin of the box in each dimension; for a run, the index of its first element."""
    shape: Shape


class TensorEntry(_Part):
    """One whole tensor of the state."""

    dtype: str
    """The safetensors name, one of `DTYPES`."""
    shape: Shape
    sha256: Sha256
    """Hash of the elements in row-major order, little-endian; independent of the slices."""
    slices: Annotated[tuple[Slice, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_a_tensor(self) -> Self:
        if self.dtype not in DTYPES.values():
            raise ValueError(f"unknown dtype '{self.dtype}'")
        runs = all(len(part.shape) == 1 for part in self.slices)
        whole = (math.prod(self.shape),) if runs else self.shape
        for part in self.slices:
            if not len(part.offset) == len(part.shape) == len(whole):
                raise ValueError("a slice and its tensor have different numbers of dimensions")
            if any(o + n > size for o, n, size in zip(part.offset, part.shape, whole, strict=True)):
                raise ValueError("a slice reaches beyond its tensor")
        if _any_overlap(self.slices):
            raise ValueError("two slices overlap")
        if sum(math.prod(part.shape) for part in self.slices) != math.prod(whole):
            raise ValueError("the slices do not cover the tensor")
        return self

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def _any_overlap(slices: Iterable[Slice]) -> bool:
    """Return whether any two boxes share an element.

    A tensor may have thousands of slices, so this avoids comparing each pair.

    Raises:
        ValueError: The boxes are arranged in a way that takes too much work; no way to cut a tensor gives that.
    """
    boxes = [
        [(begin, begin + length) for begin, length in zip(part.offset, part.shape, strict=True)]
        for part in slices
        if 0 not in part.shape
    ]
    work_left = _WORK_PER_SLICE * len(boxes)
    groups = [boxes]
    while groups:
        group = groups.pop()
        work_left -= len(group)
        if work_left < 0:
            raise ValueError("its slices are arranged in a way that no cut of a tensor gives")
        if len(group) < 2:
            continue
        halves = _halves(group)
        if halves is None:
            return True
        groups += halves
    return False


def _halves(boxes: list[_Box]) -> list[list[_Box]] | None:
    """Cut boxes into two groups by a plane, so that the larger group is as small as possible.

    Returns:
        The two groups; an empty list if the boxes follow one another in some dimension, so that no two overlap. None
        if no cut makes both groups smaller: then all boxes overlap.
    """
    best = len(boxes)
    cut_at = None
    for side in range(len(boxes[0])):
        begins = sorted(box[side][0] for box in boxes)
        ends = sorted(box[side][1] for box in boxes)
        if all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)):
            return []
        for place, begin in enumerate(begins):
            # Count the boxes that begin before this cut, and those that end after it.
            larger = max(bisect_left(begins, begin, hi=place + 1), len(boxes) - bisect_right(ends, begin))
            if larger < best:
                best = larger
                cut_at = (side, begin)
    if cut_at is None:
        return None
    side, cut = cut_at
    return [[box for box in boxes if box[side][0] < cut], [box for box in boxes if box[side][1] > cut]]


class FileEntry(_Part):
    """Size and hash of one file as it was written."""

    bytes: Count
    sha256: Sha256 | None = None
    """Hash of all bytes: for encrypted files, and in versions before 4."""
    parts_sha256: Sha256 | None = None
    """Hash of the hashes of its parts (`file_hash.parts_hash`)."""

    @model_validator(mode="after")
    def _has_a_hash(self) -> Self:
        if (self.sha256 is None) == (self.parts_sha256 is None):
            raise ValueError("a file has either a sha256 or a parts_sha256")
        return self

    @model_serializer(mode="wrap")
    def _what_it_has(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if value is not None}

    @property
    def hash(self) -> str:
        """The hash, of either kind."""
        return self.sha256 or self.parts_sha256 or ""


class Manifest(_Part):
    """The content of `manifest.json`."""

    format: Literal["headway-checkpoint"] = "headway-checkpoint"
    version: Literal[1, 2, 3, 4] = 4
    """Only version 3 has sealed files; only version 4 has hashes of parts."""
    step: Count
    cursor: dict[str, int]
    """Position of the run: `step` and the other counters of the training loop."""
    context: dict[str, Any]
    """Facts about the run and the attempt: fingerprints, world size, versions, time and others."""
    state_sha256: Sha256
    """`state_hash` of the tensors and the cursor."""
    files: dict[FileName, FileEntry]
    tensors: dict[str, TensorEntry]

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        unknown = {part.file for entry in self.tensors.values() for part in entry.slices} - self.files.keys()
        if unknown:
            raise ValueError(f"a tensor lies in '{min(unknown)}', which is not among the files")
        if self.version != 3 and any(name.endswith(SEALED) for name in self.files):
            raise ValueError(f"a file is encrypted, which version {self.version} does not have")
        if any((entry.parts_sha256 is not None) != (self.version == 4) for entry in self.files.values()):
            raise ValueError(f"a file's hash is not of the kind that version {self.version} has")
        if state_hash(self.tensors, self.cursor) != self.state_sha256:
            raise ValueError("state_sha256 does not belong to these tensors and this cursor")
        if self.cursor.get("step") != self.step:
            raise ValueError(f"its cursor is of step {self.cursor.get('step')}, and the checkpoint of step {self.step}")
        return self

    @property
    def total_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def has_moments(self) -> bool:
        """Whether the state includes moments, which exist from the first update on.

        A state that had no update has the initial moments, and they may be absent. Only the cursor can prove that: if
        it counts an update, the moments are part of the state, whether or not the tensors are here.
        """
        not_updated = sum(self.cursor.get(key, 0) for key in _WITHOUT_UPDATE)
        updated = self.cursor.get("step", self.step) != not_updated
        return updated or any(name.startswith("optimizer.") for name in self.tensors)

    def slices_of(self, file: str) -> list[tuple[str, Slice]]:
        """Return the slices that lie in one file, with their tensor names."""
        return self._by_file.get(file, [])

    @cached_property
    def _by_file(self) -> dict[str, list[tuple[str, Slice]]]:
        found: dict[str, list[tuple[str, Slice]]] = {}
        for name, entry in self.tensors.items():
            for part in entry.slices:
                found.setdefault(part.file, []).append((name, part))
        return found

    def render(self) -> bytes:
        """Return the content of `manifest.json`: these fields and their hash, which reveals bit rot."""
        record = self.model_dump(mode="json")
        text = json.dumps({**record, "manifest_sha256": fingerprint(record)}, indent=1, ensure_ascii=False)
        return text.encode("utf-8", "backslashreplace")  # file names may be invalid UTF-8

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Parse and verify the content of `manifest.json`.

        Raises:
            ValueError: The content is not a manifest, has an unknown version, is damaged, or lacks the required
                signature; the message says which.
        """
        record = parse_json(text)
        if not isinstance(record, dict) or record.get("format") != cls.model_fields["format"].default:
            raise ValueError("is not the manifest of a Headway checkpoint")
        if record.get("version") not in (1, 2, 3, 4):
            raise ValueError(f"has format version {record.get('version')!r}; this Headway reads versions 1 to 4")
        if record.pop("manifest_sha256", None) != fingerprint(record):
            raise ValueError("has changed since it was written (manifest_sha256 differs)")
        try:
            manifest = cls.model_validate(record)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"is not valid: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        problem = signature_problem(manifest.context.get(SIGNATURE), manifest.content_to_sign)
        if problem is not None:
            raise ValueError(problem)
        return manifest

    def content_to_sign(self) -> bytes:
        """Return what a signature covers: all but the signature."""
        return b"headway-checkpoint-signature\n" + canonical_json(self._unsigned().model_dump(mode="json"))

    def signed(self, key: Key) -> Self:
        """Return this manifest with a signature in its context."""
        signature = sign(self.content_to_sign(), key)
        return self.model_copy(update={"context": {**self._unsigned().context, SIGNATURE: signature}})

    def _unsigned(self) -> Self:
        context = {key: value for key, value in self.context.items() if key != SIGNATURE}
        return self.model_copy(update={"context": context})


def step_name(step: int) -> str:
    """Return the folder name of a checkpoint; eight digits, so that names sort by step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint folder's name; None if the name is no such name."""
    step = int(name[5:]) if _STEP_NAME.fullmatch(name) else None
    return step if step is not None and step_name(step) == name else None


class UnreadableManifest(CheckpointError):
    """The disk failed to deliver a manifest, so nothing is known about the checkpoint."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest and flush its content; the caller flushes the folder, with the names of all files."""
    with (folder / MANIFEST).open("wb") as file:
        file.write(manifest.render())
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint folder; the files that it names are not checked.

    Raises:
        CheckpointError: There is no manifest, or it cannot be trusted; `UnreadableManifest` if the disk failed.
    """
    path = folder / MANIFEST
    try:
        if path.is_symlink() or not path.is_file():
            raise ValueError("is missing" if not path.exists() else "is not a regular file")
        return Manifest.parse(read_bytes(path))
    except ForeignFileError as error:
        raise _untrusted(path, error.problem) from None
    except OSError as error:
        raise UnreadableManifest(
            f"{MANIFEST} cannot be read: {error.strerror or error}", where=str(path), fix="check its disk"
        ) from None
    except ValueError as error:
        raise _untrusted(path, str(error)) from None


def _untrusted(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{MANIFEST} {problem}", where=str(path), fix="restore the folder from a copy, or use another checkpoint"
    )


def state_hash(tensors: Mapping[str, TensorEntry], cursor: Mapping[str, int]) -> str:
    """Return the hash that names a state: equal weights, moments and cursor give equal hashes.

    It is the SHA-256 over one line ``[name, dtype, shape, sha256]`` of canonical JSON per tensor, sorted by name, and a
    last line with the cursor. World size, slices, attempt and time do not enter.
    """
    return _named(((name, t.dtype, t.shape, t.sha256) for name, t in tensors.items()), cursor)


def state_hash_of(tensors: StateTensors, hashes: Mapping[str, str], cursor: Mapping[str, int]) -> str:
    """Return the `state_hash` of a state in memory, given the hashes of its tensors (`hash_tensors`)."""
    return _named(((name, dtype_name(name, t), tuple(t.shape), hashes[name]) for name, t in tensors.items()), cursor)


def _named(described: Iterable[tuple[str, str, Shape, str]], cursor: Mapping[str, int]) -> str:
    lines: Iterable[Any] = ([name, dtype, list(shape), sha256] for name, dtype, shape, sha256 in sorted(described))
    return sha256_bytes(b"\n".join(canonical_json(line) for line in (*lines, dict(cursor))))


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """Return the safetensors name of a tensor's type.

    Raises:
        CheckpointError: The format does not support the type.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(
            f"checkpoints do not support tensors of type {dtype}", where=f"tensor '{name}'", fix="convert it"
        )
    return DTYPES[dtype]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements in row-major order; a view if the tensor is contiguous on the CPU.

    Elements have the byte order of the machine, which is little-endian on all platforms of PyTorch.
    """
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def hash_tensor(tensor: torch.Tensor) -> str:
    """Return the hex SHA-256 of a tensor's elements (`tensor_bytes`); dtype and shape do not enter."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def hash_tensors(tensors: StateTensors) -> dict[str, str]:
    """Return the hash of every tensor, computed on several threads; hashing releases the interpreter lock."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        return dict(zip(tensors, pool.map(hash_tensor, tensors.values()), strict=True))
