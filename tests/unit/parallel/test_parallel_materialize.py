"""First values of a model that is cut before it has memory."""

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import nn

from headway.config import MeshShape
from headway.parallel.materialize import materialize
from headway.parallel.world import World

CPU = torch.device("cpu")


class Given(World):
    """A worker that the others are not there for: what it would get from the first one is 7."""

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            assert tensor.device == self.device
            if not self.is_copied:
                tensor.fill_(7)


class Layer(nn.Linear):
    def make_buffers(self) -> None:
        self.register_buffer("table", torch.ones(2))


def test_only_the_worker_that_others_get_them_from_makes_first_values() -> None:
    """They would be thrown away on the others, and take minutes of a large model."""
    made: list[str] = []

    def first_value(name: str, size: Sequence[int]) -> torch.Tensor:
        made.append(name)
        return torch.full(size, 3.0, dtype=torch.float64)

    for rank, value, names in ((0, 3.0, ["weight", "bias", "table"]), (1, 7.0, [])):
        made.clear()
        layer = Layer(2, 3, device="meta")
        materialize(layer, Given(rank, 2, 0, CPU, MeshShape(dp_shard=2)), first_value)
        assert made == names
        assert all(torch.equal(t, torch.full_like(t, value)) for t in layer.state_dict().values())
        assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("mesh", "copied"),
    [
        (MeshShape(dp_shard=4), [0]),
        (MeshShape(pp=2, dp_shard=2), [0, 2]),  # of each stage the first
        (MeshShape(pp=4), [0, 1, 2, 3]),
    ],
)
def test_who_that_is(mesh: MeshShape, copied: list[int]) -> None:
    assert [rank for rank in range(4) if World(rank, 4, 0, CPU, mesh).is_copied] == copied
