"""Publishing of checkpoints: parts are written to a hidden folder, and one rename makes the checkpoint visible.

A save that is killed at any line leaves all earlier checkpoints, and at most a hidden folder that the next save
removes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.checkpoint.format.file_layout import Piece
from headway.checkpoint.format.folders import REPLACED, TEMPORARY, discard, remove, replace_checkpoint
from headway.checkpoint.format.manifest import (
    ITEM_BYTES,
    FileEntry,
    Manifest,
    Slice,
    TensorEntry,
    state_hash,
    step_name,
    step_of,
    write_manifest,
)
from headway.checkpoint.format.sealing import SEALED, SealedFile
from headway.checkpoint.format.signing import Key
from headway.checkpoint.save.memory_snapshot import clear_notes
from headway.checkpoint.save.parts import CheckpointPart, WrittenPiece
from headway.checkpoint.verify import verify_checkpoint
from headway.core import console
from headway.core.errors import CheckpointError
from headway.core.files.atomic import sync_folder
from headway.core.machine.cores import usable_cores
from headway.core.process.faults import fault_point

#: Bytes read between two progress reports.
_READ_BYTES = 16 * 1024**2


class Publisher:
    """The publisher of a run's checkpoints: makes a folder for each save and moves it into place when complete.

    Args:
        directory: The run's `checkpoints` folder; made when needed.
        may_write: Called before any change and right before a save becomes visible. It raises an error if this process
            no longer owns the run.
        sign_with: Key to sign manifests with; None leaves them unsigned.
    """

    def __init__(
        self, directory: Path, may_write: Callable[[], None] = lambda: None, sign_with: Key | None = None
    ) -> None:
        self.directory = directory
        self._may_write = may_write
        self._sign_with = sign_with

    def assert_owned(self) -> None:
        """Raise an error unless this process owns the run.

        Raises:
            CheckpointError: This process does not own the run.
        """
        self._may_write()

    def begin(self, step: int, tag: object) -> Path:
        """Make an empty folder for a save; `tag` distinguishes saves of the same step.

        Raises:
            CheckpointError: This process does not own the run.
            OSError: The folder cannot be made.
        """
        # Checked before the clean-up, which would otherwise remove the new owner's save.
        self._may_write()
        if not self.directory.exists():
            self.directory.mkdir(parents=True)
            sync_folder(self.directory.parent)
        self.clear_leftovers()
        clear_notes(self.directory, but_of=tag)
        folder = self.folder(step, tag)
        folder.mkdir()
        return folder

    def folder(self, step: int, tag: object) -> Path:
        """Return the hidden folder of a save."""
        return self.directory / f"{TEMPORARY}{step_name(step)}-{tag}"

    def is_past(self, step: int, tag: object) -> bool:
        """Return whether a save of a later step with this tag is under way."""
        folders = self.directory.glob(f"{TEMPORARY}step-*-{tag}")
        steps = (step_of(path.name.removeprefix(TEMPORARY).removesuffix(f"-{tag}")) for path in folders)
        return any(found is not None and found > step for found in steps)

    def finish(
        self,
        folder: Path,
        parts: Sequence[CheckpointPart],
        cursor: Mapping[str, int],
        context: Mapping[str, Any],
        advance: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Write the manifest, the last file of a checkpoint, and publish the folder.

        Args:
            folder: The folder of the save; all other files are complete.
            parts: The parts of all workers.
            cursor: Position of the run.
            context: Facts about the run and the attempt.
            advance: Called repeatedly, by several threads, while files are read.

        Returns:
            The manifest of the published checkpoint.

        Raises:
            CheckpointError: This process no longer owns the run, or the files are gone.
            OSError: The manifest cannot be written, or the folder cannot be renamed.
        """
        tensors = _entries(folder, [piece for part in parts for piece in part.pieces], advance)
        files = {name: entry for part in parts for name, entry in part.files.items()}
        _assert_there(folder, files)
        manifest = Manifest(
            version=3 if any(name.endswith(SEALED) for name in files) else 4,
            step=cursor["step"],
            cursor=dict(cursor),
            context=dict(context),
            state_sha256=state_hash(tensors, cursor),
            files=files,
            tensors=tensors,
        )
        if self._sign_with is not None:
            manifest = manifest.signed(self._sign_with)
        fault_point("checkpoint.manifest")
        write_manifest(folder, manifest)
        sync_folder(folder)
        advance()
        return self._publish(folder, manifest, advance)

    def _publish(self, temporary: Path, manifest: Manifest, advance: Callable[[], None]) -> Manifest:
        target = self.directory / step_name(manifest.step)
        occupied = os.path.lexists(target)
        if occupied:
            there = verify_checkpoint(target, advance=lambda _: advance())
            if there.good and there.manifest and there.manifest.state_sha256 == manifest.state_sha256:
                remove(temporary)
                return there.manifest
            why = "; ".join(map(str, there.damage)) or "it holds another state"
            console.warning(f"replacing {target}: {why}")
        fault_point("checkpoint.rename")
        self._may_write()
        if occupied:
            replace_checkpoint(target, temporary)
        else:
            temporary.rename(target)
            sync_folder(self.directory)
        return manifest

    def clear_leftovers(self) -> None:
        """Remove the folders of killed saves, and restore a checkpoint that a killed replacement moved aside."""
        for path in self.directory.glob(f"{TEMPORARY}*"):
            remove(path)
        for path in self.directory.glob(f"{REPLACED}*"):
            name = self.directory / path.name.removeprefix(REPLACED)
            if os.path.lexists(name):
                discard(path)
            else:
                path.rename(name)


def _assert_there(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise an error if files are gone: the folder may have been moved, and its path may name another folder now."""
    lost = [n for n, entry in files.items() if not (folder / n).is_file() or (folder / n).stat().st_size != entry.bytes]
    if lost:
        raise CheckpointError(
            f"{', '.join(lost)} is gone, or is not what was written",
            where=str(folder),
            fix="leave the checkpoints where they are while a run writes them",
        )


def _entries(folder: Path, written: Iterable[WrittenPiece], advance: Callable[[], None]) -> dict[str, TensorEntry]:
    """Return the manifest's tensor entries.

    No worker has a tensor in several pieces as a whole, so its hash comes from the files, which are still cached.
    """
    by_name: dict[str, list[WrittenPiece]] = {}
    for piece in written:
        by_name.setdefault(piece.piece.name, []).append(piece)
    cut = [pieces for pieces in by_name.values() if len(pieces) > 1]
    with ThreadPoolExecutor(usable_cores()) as pool:
        hashes = dict(
            zip((pieces[0].piece.name for pieces in cut), pool.map(_cut_hash(folder, advance), cut), strict=True)
        )
    return {
        name: TensorEntry(
            dtype=pieces[0].piece.dtype,
            shape=pieces[0].piece.shape,
            sha256=hashes.get(name) or pieces[0].sha256,
            slices=tuple(Slice(file=p.file, offset=p.piece.offset, shape=p.piece.size) for p in pieces),
        )
        for name, pieces in sorted(by_name.items())
    }


def _cut_hash(folder: Path, advance: Callable[[], None]) -> Callable[[list[WrittenPiece]], str]:
    def digest(pieces: list[WrittenPiece]) -> str:
        ordered = sorted(pieces, key=lambda p: p.piece.offset)
        hasher = hashlib.sha256()
        if all(_is_contiguous(p.piece) for p in ordered):
            for piece in ordered:
                with _elements(folder, piece, advance) as view:
                    _update(hasher, view, advance)
        else:
            _update(hasher, _assemble(folder, ordered, advance), advance)
        return hasher.hexdigest()

    return digest


def _update(hasher: hashlib._Hash, view: memoryview, advance: Callable[[], None]) -> None:
    for begin in range(0, len(view), _READ_BYTES):
        with view[begin : begin + _READ_BYTES] as part:
            hasher.update(part)
        advance()


def _is_contiguous(piece: Piece) -> bool:
    """Return whether a piece's elements are contiguous in the whole tensor.

    They are in a run, and in a box that spans all dimensions but the first.
    """
    return len(piece.size) != len(piece.shape) or piece.size[1:] == piece.shape[1:]


def _assemble(folder: Path, pieces: Sequence[WrittenPiece], advance: Callable[[], None]) -> memoryview:
    import numpy as np

    first = pieces[0].piece
    # Only the size of an element matters, not its type.
    kind = np.dtype(f"V{ITEM_BYTES[first.dtype]}")
    whole = np.empty(first.shape, kind)
    for piece in pieces:
        box = tuple(slice(o, o + n) for o, n in zip(piece.piece.offset, piece.piece.size, strict=True))
        with _elements(folder, piece, advance) as view:
            _copy_rows(whole[box], np.frombuffer(view, kind).reshape(piece.piece.size), advance)
    return whole.reshape(-1).view(np.uint8).data


def _copy_rows(target: Any, source: Any, advance: Callable[[], None]) -> None:
    """Copy one array into another, a few MiB at a time, with progress reports: the copy reads from disk."""
    rows = max(1, _READ_BYTES * len(source) // max(1, source.nbytes))
    for begin in range(0, len(source), rows):
        target[begin : begin + rows] = source[begin : begin + rows]
        advance()


@contextmanager
def _elements(folder: Path, piece: WrittenPiece, advance: Callable[[], None]) -> Iterator[memoryview]:
    """Open the elements of a piece in its file."""
    if piece.file.endswith(SEALED):
        file = SealedFile(folder / piece.file)
        content = bytearray(piece.piece.nbytes)
        for begin in range(0, len(content), _READ_BYTES):
            end = min(begin + _READ_BYTES, len(content))
            content[begin:end] = file.read(piece.begin + begin, piece.begin + end)
            advance()
        yield memoryview(content)
        return
    start = piece.begin - piece.begin % mmap.ALLOCATIONGRANULARITY  # a mapping must begin at a multiple of this
    length = piece.begin - start + piece.piece.nbytes
    with (
        (folder / piece.file).open("rb") as opened,
        mmap.mmap(opened.fileno(), length, offset=start, access=mmap.ACCESS_READ) as mapping,
        memoryview(mapping) as view,
        view[piece.begin - start :] as elements,
    ):
        yield elements
