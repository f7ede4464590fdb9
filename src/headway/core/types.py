"""Small types that packages of one layer share instead of importing each other."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch

#: One micro-batch: named tensors (or any nested structure of them). The language-model feed gives
#: ``{"ids": int64 (rows, sequence_length), "targets": int64 (rows, sequence_length)}``.
MicroBatch = Mapping[str, Any]

#: How much a layer keeps for the backward pass (`train.activation_checkpointing`).
Checkpointing: TypeAlias = Literal["none", "selective", "full", "offload"]

#: Target value that the loss ignores.
IGNORE_TARGET = -100


class Feed(Protocol):
    """A source of batches: a pure function of (step, lane), so it has no state to save."""

    @property
    def rows(self) -> int:
        """Rows in one epoch."""
        ...

    def batch(self, step: int, lane: int) -> Sequence[MicroBatch]:
        """Return the micro-batches of one lane of one step (both counted from 0)."""
        ...

    def rows_by_source(self, first_step: int, last_step: int) -> dict[str, int]:
        """Count the rows that steps `first_step` to `last_step` (exclusive) consume, by source, for the ledger."""
        ...

    def describe(self, last_step: int) -> dict[str, Any]:
        """Return as plain JSON what determines the rows of the steps before `last_step`, except the data itself."""
        ...

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step's rows (steps count from 0), for `metrics.jsonl`."""
        ...


@runtime_checkable
class KnowsLongestStep(Protocol):
    """A feed whose rows differ in length between steps, and that knows which are longest."""

    def longest_step(self, first: int, last: int) -> int:
        """Return the first of the steps `first` to `last` (exclusive) that has the longest rows."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A feed that may read the batches of the next steps with processes of its own."""

    def ahead(self, steps: range, lanes: Sequence[int]) -> Generator[dict[int, Sequence[MicroBatch]]] | None:
        """Start to read, and return the micro-batches of these lanes, step by step; closing it ends the processes.

        None if the feed has no processes.
        """
        ...


#: A flat, named view of the whole training state: "model.<parameter>", "optimizer.<moment>.<parameter>".
StateTensors = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Block:
    """The part of a tensor that one worker holds, which may be all or none of it.

    It is a box of elements, or a run of neighbours in row-major order. In a run, `local` has another number of
    dimensions than the tensor.
    """

    local: torch.Tensor
    """The live elements."""
    offset: tuple[int, ...]
    """Start of the box in the whole tensor, per dimension; for a run, the index of its first element."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    movable: bool = False
    """Whether `local` is its owner's own tensor in host memory, so that a save may exchange its memory for other memory
    with the same content, and write it from there."""

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Block:
        """Make a block that holds all of a tensor."""
        return cls(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape))

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this block's elements of the whole tensor: a view, if that is contiguous."""
        return part_of(whole, self.offset, tuple(self.local.shape))

    @property
    def is_whole(self) -> bool:
        """Whether the block holds all of the tensor."""
        return tuple(self.local.shape) == self.shape


def part_of(whole: torch.Tensor, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Return a box of a tensor, or a run of its elements if the numbers of dimensions differ; see `Block`."""
    index = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
    return (whole if len(size) == whole.ndim else whole.reshape(-1))[index]


#: The part of the state that one worker holds, by the same names; names held only by other workers are absent.
StateBlocks = dict[str, Block]


@dataclass(frozen=True)
class Fusion:
    """How the rows of one matrix hold the matrices of several projections, or a vector their vectors.

    The rows are cut into equal groups, and every group into the rows of each projection.
    """

    sizes: tuple[int, ...]
    """Rows of each projection in a group."""
    groups: int = 1
    by_columns: bool = False
    """The columns hold projections, not the rows."""
