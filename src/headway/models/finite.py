"""Weights that are not finite are no model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from headway.core.errors import CheckpointError

_FETCH = "fetch the checkpoint again, or take an earlier one"


@torch.no_grad()
def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], where: Path, fix: str = _FETCH) -> None:
    """Check that all values of named weights are finite.

    Args:
        tensors: Names and weights; integers and those without values are passed over.
        where: File or folder that they come from.
        fix: What to do about others.

    Raises:
        CheckpointError: one is infinite or not a number.
    """
    for name, tensor in tensors:
        if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
            continue
        ends = torch.stack(torch.aminmax(tensor))  # without a copy of the tensor
        if not torch.isfinite(ends).all():
            raise CheckpointError(f"a weight is not finite: {name}", where=str(where), fix=fix)
