"""The content of memory at points of a step, its peak, and what is held beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from headway.lab.plan.host import HostPlan

#: A channel's buffer for one direction, and the most channels of a communicator (NCCL's user guide, `NCCL_BUFFSIZE` and
#: `NCCL_MAX_CTAS`).
_NCCL_BUFFER = 4 * 2**20
_NCCL_CHANNELS = 32


@dataclass(frozen=True)
class Moment:
    """The content of memory at one point of a step, in bytes."""

    name: str = ""
    weights: int = 0
    """Weights of this worker."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Tensors saved for the backward pass, including autocast's copies of weights."""
    buffers: int = 0
    """The loss and its chunk of logits, temporaries, rotary tables, batches, sums of lanes."""
    communication: int = 0
    """Gathered weights, and gradients in flight."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())

    def plus(self, name: str = "", **more: int) -> Moment:
        """Return a moment with more bytes in some parts, under another name if one is given."""
        return Moment(name or self.name, **{part: count + more.get(part, 0) for part, count in self.parts.items()})


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of the worker that needs most."""

    moments: Sequence[Moment]
    communicators: int = 0
    """Groups of workers with buffers in NCCL."""
    host: HostPlan = field(default_factory=HostPlan)
    """Host memory of the worker that has most there; nothing where it is the device's memory."""
    caches: bool = False
    """Whether an allocator keeps freed blocks, as PyTorch's for CUDA does."""

    @property
    def peak(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak."""
        return self.peak.total

    @property
    def pool_bytes(self) -> int:
        """Bytes that the allocator reserves in addition to those allocated at the peak.

        A freed block serves only the stream that it was allocated on (PyTorch, `c10/cuda/CUDACachingAllocator.cpp`,
        `BlockPool` and `Block::stream`), and collectives have streams of their own. So the largest amounts of both are
        reserved, although they are not needed at the same time. Holes between blocks are not in it: their number
        follows from the order of all requests, and expandable segments leave hardly any.
        """
        if not self.caches:
            return 0
        sent = max(moment.communication for moment in self.moments)
        others = max(moment.total - moment.communication for moment in self.moments)
        return sent + others - self.peak_bytes

    @property
    def library_bytes(self) -> int:
        """Bytes of NCCL's buffers at most: one to send and one to receive for every channel of a communicator."""
        return self.communicators * 2 * _NCCL_CHANNELS * _NCCL_BUFFER

    @property
    def reserve_bytes(self) -> int:
        """Bytes that are held in addition to the tensors of the peak; without those of the driver."""
        return self.pool_bytes + self.library_bytes

    def fits(self, usable: float, whole: float) -> bool:
        """Return whether the tensors fit into the usable bytes of a device, and all that is held into the whole."""
        return self.peak_bytes <= usable and self.peak_bytes + self.reserve_bytes <= whole
