"""Copies between device and host memory, a piece at a time, through a few pinned buffers and on a stream of their own.

The host adds and rounds while the device computes: gradients arrive during the backward pass, weights leave during the
update.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import torch

#: Elements of one piece. Fixed, so that the bits of an update do not depend on memory.
PIECE = 2**22
_BUFFERS = 8
_LARGEST_ELEMENT_BYTES = 4
#: What the pinned buffers take of the host's memory.
PINNED_BYTES = _BUFFERS * PIECE * _LARGEST_ELEMENT_BYTES


def pieces(elements: int) -> Iterator[slice]:
    """Yield the pieces of so many elements, in order."""
    for begin in range(0, elements, PIECE):
        yield slice(begin, min(begin + PIECE, elements))


class Transfers:
    """The copies of one worker, in the order in which they are asked for.

    On a CPU each is done at once. On a GPU `add` and `send` return before the copy has been made; a buffer is used
    again only after its last copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._device = device
        self._added: list[Future[None]] = []
        self._free: SimpleQueue[tuple[torch.Tensor, torch.cuda.Event | None]] = SimpleQueue()
        if self._is_gpu:
            self._stream = torch.cuda.Stream(device)
            self._adder = ThreadPoolExecutor(1, "headway-gradients")  # one thread: sums keep their order
            for _ in range(_BUFFERS):
                buffer = torch.empty(PIECE * _LARGEST_ELEMENT_BYTES, dtype=torch.uint8, pin_memory=True)
                self._free.put((buffer, None))

    @torch.no_grad()
    def add(self, total: torch.Tensor, gradient: torch.Tensor, *, is_first: bool) -> None:
        """Add a gradient to its sum in host memory, which is complete after `finish_sums`.

        The gradient may be released at once; its memory is free when it has been copied.

        Args:
            total: fp32, contiguous, on the host.
            gradient: Of the same size, on the device.
            is_first: Overwrite the sum instead.
        """
        flat = gradient.reshape(-1)
        sums = total.view(-1)
        if not self._is_gpu:
            _take(sums, flat.to(sums.device), is_first)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for piece in pieces(flat.numel()):
            buffer = self._buffer(flat.dtype, piece.stop - piece.start)
            with torch.cuda.stream(self._stream):
                buffer.copy_(flat[piece], non_blocking=True)
                copied = self._stream.record_event()
            self._added.append(self._adder.submit(self._add_arrived, sums[piece], buffer, copied, [flat], is_first))

    def _add_arrived(
        self,
        sums: torch.Tensor,
        buffer: torch.Tensor,
        copied: torch.cuda.Event,
        source: list[torch.Tensor],
        is_first: bool,
    ) -> None:
        """Wait for a piece, release the gradient on the device, and add the piece; on the thread."""
        try:
            copied.synchronize()
            source.clear()
            _take(sums, buffer, is_first)
        finally:
            self._free.put((_whole(buffer), None))

    def finish_sums(self) -> None:
        """Wait until every gradient has been added."""
        waiting = self._added
        self._added = []
        for added in waiting:
            added.result()

    @torch.no_grad()
    def send(self, weight: torch.Tensor, master: torch.Tensor) -> None:
        """Copy part of a master to the weight on the device, rounded to its type; kernels that are queued later see it
        after `finish_weights`.

        Args:
            weight: On the device, at most a piece, (n,).
            master: On the host, (n,).
        """
        if not self._is_gpu:
            weight.copy_(master)
            return
        buffer = self._buffer(weight.dtype, weight.numel())
        buffer.copy_(master)
        with torch.cuda.stream(self._stream):
            weight.copy_(buffer, non_blocking=True)
            self._free.put((_whole(buffer), self._stream.record_event()))

    def finish_weights(self) -> None:
        """Let what the device computes from now on see the weights that were sent."""
        if self._is_gpu:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def begin_weights(self) -> None:
        """Let the copies of weights wait for what the device still computes with the old ones."""
        if self._is_gpu:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _buffer(self, dtype: torch.dtype, elements: int) -> torch.Tensor:
        """Return a pinned buffer whose last copy is over; waits for one."""
        buffer, copied = self._free.get()
        if copied is not None:
            copied.synchronize()
        return buffer[: elements * dtype.itemsize].view(dtype)


def _take(sums: torch.Tensor, more: torch.Tensor, is_first: bool) -> None:
    if is_first:
        sums.copy_(more)
    else:
        sums.add_(more)


def _whole(buffer: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the buffer that a view is a part of."""
    return torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
