"""Staging buffers: host memory that training copies a state to, and the writer process writes to disk.

Training waits only for the copy. A buffer is an anonymous file in memory, not a named shared segment: it disappears
with the last process that has it open, so a killed process leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.format.file_layout import Elements, Piece, ShardFile
from headway.core.errors import CheckpointError, explaining_refusals
from headway.core.files.atomic import begin_flush
from headway.core.format import format_bytes
from headway.core.machine.allocator import give_back_freed_memory
from headway.core.types import StateBlocks

if TYPE_CHECKING:
    import torch

#: Files begin at multiples of this, so that copies run at full speed.
_ALIGNMENT = 4096
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
#: Bytes copied to a file before the kernel is asked to begin writing them to disk.
_COPIED_BYTES = 4 * 2**20
#: Smaller files go through the page cache: they take no time, and a restart finds them there.
_LARGE_BYTES = 32 * 2**20
#: Bytes that a copy frees before they are returned to the kernel.
_GIVEN_BACK_BYTES = 16 * 2**20
#: Bytes of one direct write.
_DIRECT_BYTES = 16 * 2**20


def file_offsets(files: Sequence[ShardFile]) -> list[int]:
    """Return the offset of each file in a buffer, and the total size as the last number."""
    offsets = [0]
    for file in files:
        offsets.append(offsets[-1] + -(-file.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets


class StagingBuffer:
    """Host memory for one worker's part of a state, laid out as its files will be.

    Args:
        folder: Folder on a disk, where memory is too short: then it is a file there, without a name.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._is_on_disk = folder is not None
        if folder is None and hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("headway-checkpoint")
        else:
            with tempfile.TemporaryFile(dir=folder) as file:
                self.descriptor = os.dup(file.fileno())
        self._files: Sequence[ShardFile] = ()
        self._views: dict[str, torch.Tensor] = {}
        self._pinned: torch.Tensor | None = None

    def prepare(self, files: Sequence[ShardFile], pinned: bool, ahead: bool = True) -> None:
        """Allocate the memory for these files, and write everything but the tensors' elements.

        Args:
            files: The files of this worker's part.
            pinned: Whether to pin the memory, since a GPU copies faster to pinned memory.
            ahead: Whether to fault in all pages now, on a thread; otherwise the first copy waits for each page.

        Raises:
            CheckpointError: The system refuses a file of that size, even in memory.
        """
        import torch

        if self._files == files:
            return
        self._release()
        offsets = file_offsets(files)
        size = max(offsets[-1], 1)
        # Limits on file size apply to files in memory too. If memory is short, a later attempt may have more.
        place = "on disk" if self._is_on_disk else "in memory"
        with explaining_refusals(CheckpointError, f"{format_bytes(size)} {place}, to be saved"):
            os.ftruncate(self.descriptor, size)
            if self._is_on_disk:  # a disk that fills up later would kill the process when it writes to a page
                os.posix_fallocate(self.descriptor, 0, size)
            mapping = mmap.mmap(self.descriptor, size)
        content = torch.frombuffer(mapping, dtype=torch.uint8)
        if ahead:
            threading.Thread(target=_populate, args=(content,), daemon=True).start()
        for file, begin in zip(files, offsets, strict=False):
            mapping[begin : begin + len(file.preamble)] = file.preamble
            begin += len(file.preamble)
            for piece in file.pieces:
                self._views[piece.name] = content[begin : begin + piece.nbytes]
                begin += piece.nbytes
        if pinned:
            self._pinned = _pin(content)
        self._files = files

    def is_prepared_for(self, files: Sequence[ShardFile]) -> bool:
        """Return whether the memory is laid out as these files."""
        return self._files == files

    def move_in(self, blocks: StateBlocks) -> None:
        """Move the elements of all prepared pieces that may be moved here: their tensors lie in this memory then.

        One tensor after the other, so that there is never a second copy of more than one.
        """
        import torch

        freed_bytes = 0
        with torch.no_grad():
            for name, view in self._views.items():
                local = blocks[name].local
                if not blocks[name].movable or local.data_ptr() == view.data_ptr():
                    continue
                here = view.view(local.dtype).view(local.shape)
                local.set_(here.copy_(local))  # type: ignore[call-overload]
                freed_bytes += local.nbytes
                if freed_bytes >= _GIVEN_BACK_BYTES:
                    give_back_freed_memory()
                    freed_bytes = 0

    def empty(self) -> None:
        """Return the memory, which nothing uses any more, to the system."""
        self._release()
        os.ftruncate(self.descriptor, 0)

    def fill(self, blocks: StateBlocks, spent: Collection[str] = ()) -> None:
        """Copy the elements of all prepared pieces, but those that lie here; when this returns, they may change again.

        Args:
            blocks: This worker's part of the state, by tensor name.
            spent: Names of tensors that are no longer needed. Those in host memory are emptied as they are copied.
        """
        import torch

        on_gpu = False
        freed_bytes = 0
        with torch.no_grad():
            for name, view in self._views.items():
                local = blocks[name].local
                if local.data_ptr() == view.data_ptr():
                    continue
                view.view(local.dtype).view(local.shape).copy_(local, non_blocking=local.is_cuda)
                on_gpu |= local.is_cuda
                if name in spent:
                    freed_bytes += _free(local)
                if freed_bytes >= _GIVEN_BACK_BYTES:
                    give_back_freed_memory()
                    freed_bytes = 0
        if on_gpu:
            torch.cuda.synchronize()

    def _release(self) -> None:
        if self._pinned is not None:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None
        self._files = ()
        self._views = {}

    def close(self) -> None:
        """Release the memory; safe to call twice."""
        self._release()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _free(local: torch.Tensor) -> int:
    """Free the elements of a tensor in host memory that owns its storage, and return how many bytes that freed."""
    storage = local.untyped_storage()
    nbytes = local.nbytes
    if local.device.type != "cpu" or not storage.resizable() or storage.nbytes() != nbytes:
        return 0
    storage.resize_(0)
    return nbytes


def _populate(content: torch.Tensor, step_bytes: int = 64 * 1024**2) -> None:
    """Fault in all pages now; a kernel without that request costs only time."""
    libc = ctypes.CDLL(None, use_errno=True)
    for begin in range(0, content.numel(), step_bytes):
        address = ctypes.c_void_p(content.data_ptr() + begin)
        length = ctypes.c_size_t(min(step_bytes, content.numel() - begin))
        if libc.madvise(address, length, _MADV_POPULATE_WRITE) != 0:
            return


def _pin(content: torch.Tensor) -> torch.Tensor | None:
    """Pin the memory; return None if CUDA refuses, which costs only speed."""
    import torch

    status = torch.cuda.cudart().cudaHostRegister(content.data_ptr(), content.numel(), 0)
    if int(status) == 0:
        return content
    # CUDA keeps the error until the next check, which PyTorch makes after every kernel: clear it with a dummy kernel.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return None


class StagedFiles:
    """The files in a staging buffer, as the writer process reads them.

    Args:
        descriptor: File descriptor of the buffer.
        files: The files that the buffer was prepared for.
    """

    def __init__(self, descriptor: int, files: Sequence[ShardFile]) -> None:
        self._descriptor = descriptor
        self._begins = {file.file: begin for file, begin in zip(files, file_offsets(files), strict=False)}
        # The mapping is closed with the last view of it.
        self._content = memoryview(mmap.mmap(descriptor, max(file_offsets(files)[-1], 1), access=mmap.ACCESS_READ))
        self._views: dict[str, memoryview] = {}
        for file in files:
            begin = self._begins[file.file] + len(file.preamble)
            for piece in file.pieces:
                self._views[piece.name] = self._content[begin : begin + piece.nbytes]
                begin += piece.nbytes

    def elements(self, piece: Piece) -> memoryview:
        """Return the bytes of a piece."""
        return self._views[piece.name]

    def copy(self, file: ShardFile, descriptor: int) -> None:
        """Write a whole file: directly to the disk where possible, otherwise by a copy within the kernel.

        A copy within the kernel is twice as fast here as one through this process's memory.
        """
        done = self._write_directly(file, descriptor)
        begin = self._begins[file.file]
        try:
            while done < file.nbytes:
                count = min(_COPIED_BYTES, file.nbytes - done)
                copied = os.sendfile(descriptor, self._descriptor, begin + done, count)
                begin_flush(descriptor, done, copied)
                done += copied
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSOCK, errno.ENOSYS) or done:
                raise
            Elements(self.elements).copy(file, descriptor)  # this kernel cannot copy from file to file

    def _write_directly(self, file: ShardFile, descriptor: int) -> int:
        """Write a large file past the page cache (`O_DIRECT`).

        That saves a copy and the memory for it, which can take longer to allocate than the disk takes to write. A file
        with parts of tensors goes through the cache, since it is read again to hash the whole tensors.

        Returns:
            The number of bytes written; fewer than all, or none, if the file system does not support direct writes.
        """
        # Linux
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        direct = getattr(os, "O_DIRECT", 0)
        if not direct or file.nbytes < _LARGE_BYTES or not all(piece.is_whole for piece in file.pieces):
            return 0
        done = 0
        begin = self._begins[file.file]
        size = -(-file.nbytes // _ALIGNMENT) * _ALIGNMENT  # the buffer has zeros up to there
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct)
            while done < size:
                done += os.write(descriptor, self._content[begin + done : begin + min(size, done + _DIRECT_BYTES)])
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: no direct writes here, or other alignments
                raise
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        if done > file.nbytes:
            os.ftruncate(descriptor, file.nbytes)
        return min(done, file.nbytes)
