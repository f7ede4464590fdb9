"""The save plan: which worker writes which pieces of a state, each piece once and about equally many bytes each.

The choice among workers that have the same piece is that of PyTorch's distributed checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.checkpoint.format.file_layout import Piece, ShardFile, plan_files

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True)
class SavePlan:
    """The part of a state that one worker writes, until any worker's pieces change."""

    mine: Sequence[Piece] | None = None
    """The pieces that this worker has; None before the first plan."""
    pieces: Sequence[Piece] = ()
    """The pieces that it writes."""
    files: Sequence[ShardFile] = ()

    @classmethod
    def agree(
        cls, mine: Sequence[Piece], gather: Callable[[Any], Sequence[Any]], rank: int, max_shard_bytes: int
    ) -> SavePlan:
        """Make the plan together with the other workers, all of which call this."""
        everyone = gather([piece.record() for piece in mine])
        pieces = assign_writers([[Piece.parse(record) for record in worker] for worker in everyone])[rank]
        return cls(mine, pieces, plan_files(pieces, rank, max_shard_bytes))


def assign_writers(workers: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """Assign every piece to one of the workers that have it.

    If some workers have a whole tensor and others a part of it, one of the former writes it. No worker writes a piece
    without elements, unless the tensor itself has none. Every process computes the same plan.

    Args:
        workers: Pieces that each worker has.

    Returns:
        Pieces that each worker writes.
    """
    if len(workers) == 1:
        return [list(workers[0])]
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.planner import SavePlan as PlanOfWorker

    whole = {piece.name for pieces in workers for piece in pieces if piece.is_whole}
    wanted = [[p for p in pieces if (p.is_whole if p.name in whole else 0 not in p.size)] for pieces in workers]
    plans = dedup_save_plans([PlanOfWorker([_item(piece) for piece in pieces]) for pieces in wanted])
    chosen = [{(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items} for plan in plans]
    return [
        [piece for piece in pieces if (piece.name, piece.offset) in mine]
        for pieces, mine in zip(wanted, chosen, strict=True)
    ]


def _item(piece: Piece) -> WriteItem:
    """Convert a piece to PyTorch's form; its planner counts only bytes, so the piece is given as a vector of bytes."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    offset = torch.Size(piece.offset)
    size = torch.Size([piece.nbytes])
    data = TensorWriteData(ChunkStorageMetadata(offset, size), TensorProperties(torch.uint8), size)
    return WriteItem(MetadataIndex(piece.name, offset), WriteItemType.SHARD, tensor_data=data)
