"""Host memory between training and the process that writes: a state as it will lie on the disk.

The copy is all that training waits for. It is a file in memory rather than a shared segment with a name: it goes when
the last process that has it open goes, so no death leaves anything behind.
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
from typing import TYPE_CHECKING

from headway.checkpoint.format.file_layout import Elements, Piece, ShardFile
from headway.core.allocator import give_back_freed_memory
from headway.core.errors import CheckpointError, explaining_refusals
from headway.core.files import begin_flush
from headway.core.format import format_bytes

if TYPE_CHECKING:
    import torch

    from headway.core.types import StateBlocks

#: Images begin at multiples of this, so that copies run at full speed.
_ALIGNMENT = 4096
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
#: Copied to a file before the disk begins to write it.
_COPIED_BYTES = 4 * 2**20
#: Smaller files go through the page cache: they take no time, and whoever starts again finds them there.
_LARGE_BYTES = 32 * 2**20
#: Freed by a copy before the kernel gets it.
_GIVEN_BACK_BYTES = 16 * 2**20
#: Given to the disk at once.
_DIRECT_BYTES = 16 * 2**20


def file_offsets(files: Sequence[ShardFile]) -> list[int]:
    """Where each file begins in a buffer; the last number is the size of all."""
    offsets = [0]
    for file in files:
        offsets.append(offsets[-1] + -(-file.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets


class StagingBuffer:
    """Room for one state of one worker."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("headway-checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self._files: Sequence[ShardFile] = ()
        self._views: dict[str, torch.Tensor] = {}
        self._pinned: torch.Tensor | None = None

    def prepare(self, files: Sequence[ShardFile], pinned: bool, ahead: bool = True) -> None:
        """Make room for these files, and lay out all but the elements.

        Args:
            pinned: The state is on a GPU, which copies faster to memory that stays in its place.
            ahead: Fetch all pages from the kernel now, on a thread: the first copy would wait for each of them.

        Raises:
            CheckpointError: the system takes no file of that size, not even in memory.
        """
        import torch

        if self._files == files:
            return
        self._release()
        offsets = file_offsets(files)
        size = max(offsets[-1], 1)
        # Limits for files hold for those in memory too; where memory is short, another attempt may have more.
        with explaining_refusals(CheckpointError, f"{format_bytes(size)} in memory, to be saved"):
            os.ftruncate(self.descriptor, size)
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

    def fill(self, blocks: StateBlocks, spent: Collection[str] = ()) -> None:
        """Copy the elements of the pieces that were prepared for; when this returns, the state may change again.

        Args:
            blocks: By name.
            spent: Names of tensors that nobody needs any more: in host memory they make room for the copies.
        """
        import torch

        on_gpu, freed_bytes = False, 0
        with torch.no_grad():
            for name, view in self._views.items():
                local = blocks[name].local
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
            _unpin(self._pinned)
            self._pinned = None
        self._files, self._views = (), {}

    def close(self) -> None:
        """Let go of it. Safe to call twice."""
        self._release()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _free(local: torch.Tensor) -> int:
    """Let go of the elements of a tensor in host memory that has it for itself; returns their bytes."""
    storage, nbytes = local.untyped_storage(), local.nbytes
    if local.device.type != "cpu" or not storage.resizable() or storage.nbytes() != nbytes:
        return 0
    storage.resize_(0)
    return nbytes


def _populate(content: torch.Tensor, step_bytes: int = 64 * 1024**2) -> None:
    """Have the kernel provide all pages now. Only time is lost where it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    for begin in range(0, content.numel(), step_bytes):
        address = ctypes.c_void_p(content.data_ptr() + begin)
        length = ctypes.c_size_t(min(step_bytes, content.numel() - begin))
        if libc.madvise(address, length, _MADV_POPULATE_WRITE) != 0:
            return


def _pin(content: torch.Tensor) -> torch.Tensor | None:
    """Have CUDA keep the memory in its place; None where it will not, which costs speed only."""
    import torch

    status = torch.cuda.cudart().cudaHostRegister(content.data_ptr(), content.numel(), 0)
    if int(status) == 0:
        return content
    # CUDA keeps the error until somebody asks for it, as PyTorch does after every kernel: so let it be one of no use.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return None


def _unpin(content: torch.Tensor) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(content.data_ptr())


class StagedFiles:
    """The files in a buffer, for who writes them.

    Args:
        descriptor: Of the buffer.
        files: As the buffer was prepared for.
    """

    def __init__(self, descriptor: int, files: Sequence[ShardFile]) -> None:
        self._descriptor = descriptor
        self._begins = {file.file: begin for file, begin in zip(files, file_offsets(files), strict=False)}
        # Closed when the last view of it goes.
        self._content = memoryview(mmap.mmap(descriptor, max(file_offsets(files)[-1], 1), access=mmap.ACCESS_READ))
        self._views: dict[str, memoryview] = {}
        for file in files:
            begin = self._begins[file.file] + len(file.preamble)
            for piece in file.pieces:
                self._views[piece.name] = self._content[begin : begin + piece.nbytes]
                begin += piece.nbytes

    def elements(self, piece: Piece) -> memoryview:
        """The bytes of a piece."""
        return self._views[piece.name]

    def copy(self, file: ShardFile, descriptor: int) -> None:
        """Write a whole file: from here to the disk where that can be, else within the kernel, which is twice as fast
        here as by way of this process's memory."""
        done, begin = self._write_directly(file, descriptor), self._begins[file.file]
        try:
            while done < file.nbytes:
                count = min(_COPIED_BYTES, file.nbytes - done)
                copied = os.sendfile(descriptor, self._descriptor, begin + done, count)
                begin_flush(descriptor, done, copied)
                done += copied
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSOCK, errno.ENOSYS) or done:
                raise
            Elements(self.elements).copy(file, descriptor)  # not every kernel copies from file to file

    def _write_directly(self, file: ShardFile, descriptor: int) -> int:
        """Write a large file past the page cache: that saves a copy, and memory for one, which can take longer to get
        than the disk takes to write. Not one with parts of tensors, which are read again to hash the whole.

        Returns:
            How many of the file's bytes are written: not all, or none, where the file system has no such way.
        """
        flags, direct = fcntl.fcntl(descriptor, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)  # Linux
        if not direct or file.nbytes < _LARGE_BYTES or not all(piece.is_whole for piece in file.pieces):
            return 0
        done, begin = 0, self._begins[file.file]
        size = -(-file.nbytes // _ALIGNMENT) * _ALIGNMENT  # there are zeros up to there
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct)
            while done < size:
                done += os.write(descriptor, self._content[begin + done : begin + min(size, done + _DIRECT_BYTES)])
        except OSError as error:
            if error.errno != errno.EINVAL:  # it has none, or one for other alignments
                raise
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        if done > file.nbytes:
            os.ftruncate(descriptor, file.nbytes)
        return min(done, file.nbytes)
