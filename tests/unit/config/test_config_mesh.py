"""Which strategy a name means on an arrangement of workers."""

from __future__ import annotations

import pytest

from headway.config import MeshShape, effective_strategy


@pytest.mark.parametrize(
    ("name", "mesh", "effective"),
    [
        ("auto", MeshShape(), "single"),
        ("auto", MeshShape(dp_shard=2), "ddp"),
        ("auto", MeshShape(cp=2), "ddp"),
        ("zero3", MeshShape(tp=2), "single"),
        ("fsdp", MeshShape(cp=2), "zero3"),
        ("hsdp", MeshShape(dp_replicate=2, dp_shard=2), "hsdp"),
        ("deepspeed_zero2", MeshShape(), "deepspeed_zero2"),
    ],
)
def test_alone_there_is_nothing_to_divide(name: str, mesh: MeshShape, effective: str) -> None:
    """Workers that share the positions of a row have gradients of the same weights; those of a matrix have not."""
    assert effective_strategy(name, mesh) == effective
