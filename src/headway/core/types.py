"""The small types that packages on one floor share instead of importing each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

#: One micro-batch: named tensors (or any nested structure of them). The language-model feed gives
#: ``{"ids": int64 (rows, sequence_length), "targets": int64 (rows, sequence_length)}``.
MicroBatch = Mapping[str, Any]

#: Target value that takes no part in the loss.
IGNORE_TARGET = -100


class Feed(Protocol):
    """Where batches come from: a pure function of (step, lane), so it has no state to save."""

    @property
    def rows(self) -> int:
        """Rows in one epoch."""
        ...

    def batch(self, step: int, lane: int) -> Sequence[MicroBatch]:
        """The micro-batches of one lane of one step (both counted from 0)."""
        ...

    def rows_by_source(self, first_step: int, last_step: int) -> dict[str, int]:
        """Rows consumed per source by steps `first_step` to `last_step` (exclusive), for the ledger."""
        ...

    def describe(self, last_step: int) -> dict[str, Any]:
        """Plain JSON of all that the rows of the steps before `last_step` follow from, but the data itself."""
        ...

    def metrics(self, step: int) -> dict[str, float]:
        """What the record of a step (counted from 0) says of its rows, for `metrics.jsonl`."""
        ...


#: A flat, named view of everything that must survive: "model.<parameter>", "optimizer.<moment>.<parameter>".
StateTensors = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Block:
    """What one worker has of a tensor, perhaps all, perhaps none: a box of its elements, or a run of them.

    A run is what has another number of dimensions than the tensor: neighbours in row-major order.
    """

    local: torch.Tensor
    """The live elements."""
    offset: tuple[int, ...]
    """Where the box begins in the whole tensor, per dimension; of a run, the number of its first element."""
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Block:
        """All of a tensor."""
        return cls(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape))

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same elements of the whole tensor: a view, if that is contiguous."""
        return part_of(whole, self.offset, tuple(self.local.shape))

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the tensor."""
        return tuple(self.local.shape) == self.shape


def part_of(whole: torch.Tensor, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """A box of a tensor, or a run of its elements where the numbers of dimensions differ; see `Block`."""
    index = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
    return (whole if len(size) == whole.ndim else whole.reshape(-1))[index]


#: The same view of what one worker has of the state; names that only others have are absent.
StateBlocks = dict[str, Block]
