"""Rows as the tensors that a model trains on. Apart from the rows, which can be counted without PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.arrays import Bools
from headway.core.types import IGNORE_TARGET, MicroBatch
from headway.data.feeding.rows import RowBlock


def micro_batch_of(block: RowBlock) -> MicroBatch:
    """Make the micro-batch that a model trains on from some rows.

    Returns:
        `ids` and next-token `targets`, int64 (n, T). A target is `IGNORE_TARGET` if it is padding, if it is not
        trained, or if it begins a piece that continues a document from another row. With the mask it is also
        `IGNORE_TARGET` if it belongs to another document than its input. The mask adds `documents`, int32 (n, T), the
        number of each input's document in its row (-1: padding); `positions`, int64 (n, T), the place of each input in
        its document; and `document_bounds`, int32 (segments + 1,), the starts of documents in the flattened inputs, and
        the end. The bounds are computed on the CPU, which avoids a device synchronization. They are padded with the
        end to 2^k + 1 elements (empty segments), so that compiled code sees few shapes.
    """
    rows = torch.from_numpy(block.tokens)
    # Clone even a single row, whose two parts are contiguous already: they must not share memory.
    ids, targets = (part.clone(memory_format=torch.contiguous_format) for part in (rows[:, :-1], rows[:, 1:]))
    if block.trained is not None:
        targets[torch.from_numpy(~block.trained[:, 1:])] = IGNORE_TARGET
    if block.documents is None:
        return {"ids": ids, "targets": targets}
    now = block.documents[:, :-1]
    after = block.documents[:, 1:]
    ignored = (after < 0) | (after != now) if block.masked else after < 0
    if block.continued is not None:
        ignored |= block.continued[:, 1:]
    targets[torch.from_numpy(ignored)] = IGNORE_TARGET
    if not block.masked:
        return {"ids": ids, "targets": targets}
    first = np.ones(now.shape, dtype=bool)
    first[:, 1:] = now[:, 1:] != now[:, :-1]
    place = np.broadcast_to(np.arange(now.shape[1]), now.shape)
    positions = place - np.maximum.accumulate(np.where(first, place, 0), axis=1)
    return {
        "ids": ids,
        "targets": targets,
        "documents": torch.from_numpy(now.copy()),
        "positions": torch.from_numpy(positions),
        "document_bounds": torch.from_numpy(_bounds(first)),
    }


def _bounds(first: Bools) -> NDArray[np.int32]:
    """Return where segments start in flattened rows, padded with the end to 2^k + 1 elements."""
    starts = np.flatnonzero(first)
    bounds = np.full(2 ** (len(starts) - 1).bit_length() + 1, first.size, dtype=np.int32)
    bounds[: len(starts)] = starts
    return bounds
