"""Which strategy a name means on an arrangement of workers, and how workers are arranged on machines."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import Config, MeshShape, crossing_groups, effective_strategy, resolve_mesh
from headway.core.errors import ConfigError


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


def config_of(machines: int, workers: int, **parallel: Any) -> Config:
    model = {"dim": 64, "layers": 2, "heads": 8, "kv_heads": 8, "ffn_dim": 128}
    return Config(model=model, parallel={"machines": str(machines), "workers": workers, **parallel})


@pytest.mark.parametrize(
    ("machines", "workers", "copies", "shards"), [(1, 8, 2, 4), (4, 2, 4, 2), (2, 8, 2, 8), (4, 1, 2, 2), (3, 4, 3, 4)]
)
def test_a_copy_of_hsdp_is_on_every_machine(machines: int, workers: int, copies: int, shards: int) -> None:
    mesh = resolve_mesh(config_of(machines, workers, strategy="hsdp"), machines * workers)
    assert (mesh.dp_replicate, mesh.dp_shard) == (copies, shards)


def test_tensor_groups_lie_within_machines() -> None:
    config = config_of(2, 4, tensor=2)
    mesh = resolve_mesh(config, 8)
    groups: dict[int, set[int]] = {}
    for rank in range(8):
        groups.setdefault(mesh.data_rank(rank), set()).add(rank // 4)
    assert all(len(machines) == 1 for machines in groups.values()) and crossing_groups(config, 8) == []


def test_tensor_groups_that_straddle_a_border_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="some groups would lie on one machine of 3 workers and some on two"
    ) as caught:
        resolve_mesh(config_of(2, 3, tensor=2), 6)
    assert caught.value.fix == "parallel.tensor=1"


def test_groups_over_several_machines_are_warned_of() -> None:
    (warning,) = crossing_groups(config_of(2, 2, tensor=4), 4)
    assert "parallel.tensor=4 spans machines, which have 2 workers each" in warning
    (warning,) = crossing_groups(config_of(2, 4, tensor=2, context=4), 8)
    assert "parallel.context=4 spans machines" in warning
    assert crossing_groups(config_of(1, 2, tensor=4), 4) == [], "under torchrun machines are unknown"
