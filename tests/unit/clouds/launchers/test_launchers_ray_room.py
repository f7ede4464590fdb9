"""A Ray cluster without room for a run is named, with the key that says what the run asks for."""

from __future__ import annotations

from typing import Any

import pytest

from headway.clouds.launchers.ray import _shortage


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("nodes", "needs", "machines", "spread"),
    [
        ([node(CPU=2)], {"CPU": 1}, 1, False),
        ([node(CPU=2)], {"CPU": 1}, 2, False),
        ([node(CPU=1), node(CPU=1)], {"CPU": 1}, 2, True),
        ([node(CPU=4), node(CPU=4, GPU=8), node(CPU=4, GPU=8)], {"GPU": 8}, 2, True),
        ([node(CPU=4, GPU=8)], {"GPU": 4, "CPU": 0}, 2, False),
    ],
)
def test_a_cluster_with_room(nodes: list[Any], needs: dict[str, float], machines: int, spread: bool) -> None:
    assert _shortage(nodes, needs, machines, spread=spread) is None


@pytest.mark.parametrize(
    ("nodes", "needs", "machines", "spread", "has"),
    [
        ([node(CPU=2)], {"GPU": 1}, 1, False, "1 machine with 1 GPU each, and the Ray cluster has 0 GPU on 1 node"),
        ([node(CPU=64)], {"CPU": 1}, 2, True, "2 machines with 1 CPU each, and the Ray cluster has 64 CPU on 1 node"),
        ([node(GPU=8), node(alive=False, GPU=8)], {"GPU": 8}, 2, True, "has 8 GPU on 1 node"),
        ([node(GPU=4), node(GPU=4)], {"GPU": 8}, 1, False, "has 8 GPU on 2 nodes"),
    ],
)
def test_a_cluster_without_room(
    nodes: list[Any], needs: dict[str, float], machines: int, spread: bool, has: str
) -> None:
    assert has in (_shortage(nodes, needs, machines, spread=spread) or "")
