"""Making a checkpoint: parts are written under a name that nobody reads, and one rename makes them visible.

Whatever kills a save, on whichever line, leaves the checkpoints that were there before, plus at most a hidden folder
that the next save clears away.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.format.file_layout import Piece, ShardFile, Source, write_file
from headway.checkpoint.format.folders import REPLACED, TEMPORARY, discard, remove
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
from headway.checkpoint.format.signing import Key, signed
from headway.checkpoint.save.memory_snapshot import clear_notes
from headway.checkpoint.verify import verify_checkpoint
from headway.core import console
from headway.core.cores import usable_cores
from headway.core.errors import CheckpointError
from headway.core.faults import fault_point
from headway.core.files import sync_folder

#: How much is read until it is told that it gets on.
_READ_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class WrittenPiece:
    """A piece as it lies in a file."""

    piece: Piece
    file: str
    begin: int
    """Where its elements begin, in bytes from the start of the file, or of what is sealed in it."""
    sha256: str


@dataclass(frozen=True)
class Part:
    """What one worker has written of a checkpoint."""

    files: dict[str, FileEntry]
    pieces: list[WrittenPiece]

    def record(self) -> dict[str, Any]:
        """Its JSON form."""
        files = {name: entry.model_dump() for name, entry in self.files.items()}
        return {"files": files, "pieces": [{**vars(p), "piece": p.piece.record()} for p in self.pieces]}

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Part:
        """From its JSON form."""
        files = {name: FileEntry(**entry) for name, entry in record["files"].items()}
        return cls(files, [WrittenPiece(**{**p, "piece": Piece.parse(p["piece"])}) for p in record["pieces"]])


def write_part(
    folder: Path,
    images: Iterable[ShardFile],
    source: Source,
    advance: Callable[[], None] = lambda: None,
    key: bytes | None = None,
) -> Part:
    """Write the files of one worker into an existing folder and flush them; nothing is visible yet.

    Args:
        folder: Where to.
        images: What.
        source: Has the bytes.
        advance: Called after each file.
        key: Encrypts the files; they are not when there is none.

    Raises:
        OSError: they cannot be written.
    """
    files: dict[str, FileEntry] = {}
    pieces: list[WrittenPiece] = []
    with ThreadPoolExecutor(usable_cores()) as pool:
        for image in images:
            name, entry, hashes = write_file(folder, image, source, pool, key)
            files[name] = entry
            advance()
            begin = len(image.preamble)
            for piece in image.pieces:
                pieces.append(WrittenPiece(piece, name, begin, hashes[piece.name]))
                begin += piece.nbytes
    return Part(files, pieces)


class Publisher:
    """Gives finished checkpoints their place among the others of a run.

    Args:
        directory: The `checkpoints` folder; it is made when it is needed.
        may_write: Called before anything is touched and right before a save becomes visible; raises when this process
            no longer owns the run.
        sign_with: Signs manifests.
    """

    def __init__(
        self, directory: Path, may_write: Callable[[], None] = lambda: None, sign_with: Key | None = None
    ) -> None:
        self.directory, self._may_write, self._sign_with = directory, may_write, sign_with

    def assert_owned(self) -> None:
        """Make sure that this process may write.

        Raises:
            CheckpointError: it no longer owns the run.
        """
        self._may_write()

    def begin(self, step: int, tag: object) -> Path:
        """An empty folder for a save; `tag` tells saves of the same step apart.

        Raises:
            CheckpointError: this process does not own the run.
            OSError: it cannot be made.
        """
        # Or a process that lost the run would clear away the save of the one that has it.
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
        """Where a save is made."""
        return self.directory / f"{TEMPORARY}{step_name(step)}-{tag}"

    def is_past(self, step: int, tag: object) -> bool:
        """Whether a save of a later step with this tag is in the making."""
        folders = self.directory.glob(f"{TEMPORARY}step-*-{tag}")
        steps = (step_of(path.name.removeprefix(TEMPORARY).removesuffix(f"-{tag}")) for path in folders)
        return any(found is not None and found > step for found in steps)

    def finish(
        self,
        folder: Path,
        parts: Sequence[Part],
        cursor: Mapping[str, int],
        context: Mapping[str, Any],
        advance: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Write the manifest of a folder whose files are all there, last, and publish it.

        Args:
            folder: Which.
            parts: What is in it.
            cursor: Where the run is.
            context: What the state belongs to.
            advance: Called again and again while files are read, by several threads.

        Returns:
            What is there afterwards.

        Raises:
            CheckpointError: this process no longer owns the run, or the files are gone.
            OSError: it cannot be written.
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
            manifest = signed(manifest, self._sign_with)
        fault_point("checkpoint.manifest")
        write_manifest(folder, manifest)
        sync_folder(folder)
        advance()
        return self._publish(folder, manifest, advance)

    def _publish(self, temporary: Path, manifest: Manifest, advance: Callable[[], None]) -> Manifest:
        target = self.directory / step_name(manifest.step)
        aside = self.directory / (REPLACED + target.name)
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
            target.rename(aside)
            fault_point("checkpoint.replace")
        temporary.rename(target)
        sync_folder(self.directory)
        return manifest

    def clear_leftovers(self) -> None:
        """Remove what killed saves have left, and put back a checkpoint that a killed replacement has put aside."""
        for path in self.directory.glob(f"{TEMPORARY}*"):
            remove(path)
        for path in self.directory.glob(f"{REPLACED}*"):
            name = self.directory / path.name.removeprefix(REPLACED)
            if os.path.lexists(name):
                discard(path)
            else:
                path.rename(name)


def _assert_there(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Somebody may have moved or removed the folder meanwhile: its name would be that of another one by then."""
    lost = [n for n, entry in files.items() if not (folder / n).is_file() or (folder / n).stat().st_size != entry.bytes]
    if lost:
        raise CheckpointError(
            f"{', '.join(lost)} is gone, or is not what was written",
            where=str(folder),
            fix="leave the checkpoints where they are while a run writes them",
        )


def _entries(folder: Path, written: Iterable[WrittenPiece], advance: Callable[[], None]) -> dict[str, TensorEntry]:
    """The manifest's tensors. Of those in several pieces the hash is taken from the files, which are in memory still:
    no worker has ever had them whole."""
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
        if all(_is_stretch(p.piece) for p in ordered):
            for piece in ordered:
                with _elements(folder, piece, advance) as view:
                    _update(hasher, view, advance)
        else:
            _update(hasher, _put_together(folder, ordered, advance), advance)
        return hasher.hexdigest()

    return digest


def _update(hasher: hashlib._Hash, view: memoryview, advance: Callable[[], None]) -> None:
    for begin in range(0, len(view), _READ_BYTES):
        with view[begin : begin + _READ_BYTES] as part:
            hasher.update(part)
        advance()


def _is_stretch(piece: Piece) -> bool:
    """Whether its elements are neighbours in the whole: a run, or a box that spans all dimensions but the first."""
    return len(piece.size) != len(piece.shape) or piece.size[1:] == piece.shape[1:]


def _put_together(folder: Path, pieces: Sequence[WrittenPiece], advance: Callable[[], None]) -> memoryview:
    import numpy as np

    first = pieces[0].piece
    # The type does not matter, only the size of an element.
    kind = np.dtype(f"V{ITEM_BYTES[first.dtype]}")
    whole = np.empty(first.shape, kind)
    for piece in pieces:
        box = tuple(slice(o, o + n) for o, n in zip(piece.piece.offset, piece.piece.size, strict=True))
        with _elements(folder, piece, advance) as view:
            _copy_rows(whole[box], np.frombuffer(view, kind).reshape(piece.piece.size), advance)
    return whole.reshape(-1).view(np.uint8).data


def _copy_rows(target: Any, source: Any, advance: Callable[[], None]) -> None:
    """Copy one array into another, a few MiB at a time: the source is read from disk meanwhile."""
    rows = max(1, _READ_BYTES * len(source) // max(1, source.nbytes))
    for begin in range(0, len(source), rows):
        target[begin : begin + rows] = source[begin : begin + rows]
        advance()


@contextmanager
def _elements(folder: Path, piece: WrittenPiece, advance: Callable[[], None]) -> Iterator[memoryview]:
    """The elements of a piece, out of its file."""
    if piece.file.endswith(SEALED):
        file, content = SealedFile(folder / piece.file), bytearray(piece.piece.nbytes)
        for begin in range(0, len(content), _READ_BYTES):
            end = min(begin + _READ_BYTES, len(content))
            content[begin:end] = file.read(piece.begin + begin, piece.begin + end)
            advance()
        yield memoryview(content)
        return
    start = piece.begin - piece.begin % mmap.ALLOCATIONGRANULARITY  # where a mapping can begin
    length = piece.begin - start + piece.piece.nbytes
    with (
        (folder / piece.file).open("rb") as opened,
        mmap.mmap(opened.fileno(), length, offset=start, access=mmap.ACCESS_READ) as mapping,
        memoryview(mapping) as view,
        view[piece.begin - start :] as elements,
    ):
        yield elements
