"""Who writes what of a state that several workers hold: everything once, and about equally much each.

The planning is PyTorch's distributed checkpointing's, which knows how to choose among those that have the same part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.checkpoint.format.file_layout import Piece

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem


def assign_writers(workers: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """For each worker the pieces that it writes, of those that it has.

    Where some have all of a tensor and others a part of it, those that have all write it; a part without elements is
    nobody's, unless the tensor has none. The result is the same wherever it is worked out.
    """
    if len(workers) == 1:
        return [list(workers[0])]
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.planner import SavePlan

    whole = {piece.name for pieces in workers for piece in pieces if piece.is_whole}
    wanted = [[p for p in pieces if (p.is_whole if p.name in whole else 0 not in p.size)] for pieces in workers]
    plans = dedup_save_plans([SavePlan([_item(piece) for piece in pieces]) for pieces in wanted])
    chosen = [{(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items} for plan in plans]
    return [
        [piece for piece in pieces if (piece.name, piece.offset) in mine]
        for pieces, mine in zip(wanted, chosen, strict=True)
    ]


def _item(piece: Piece) -> WriteItem:
    """The same for PyTorch, which counts bytes only: so a byte's type will do, and a size in bytes."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    offset, size = torch.Size(piece.offset), torch.Size([piece.nbytes])
    data = TensorWriteData(ChunkStorageMetadata(offset, size), TensorProperties(torch.uint8), size)
    return WriteItem(MetadataIndex(piece.name, offset), WriteItemType.SHARD, tensor_data=data)
