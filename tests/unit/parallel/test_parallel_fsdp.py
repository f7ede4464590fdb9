"""The parts of a model that are gathered one at a time."""

import torch
from torch import nn

from headway.parallel.fsdp import wrap_units


class Model(nn.Module):
    """More of it is outside of its layers than in them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.layers = nn.ModuleList((nn.Linear(8, 16), nn.Linear(16, 8)))
        self.head = nn.Linear(8, 100, bias=False)


class ProjectsInItsLoss(Model):
    def output_projection(self) -> torch.Tensor:
        return self.head.weight


def test_parts_outside_of_layers_are_units_where_layers_are_small() -> None:
    model = Model()
    assert wrap_units(model) == [model.embedding, *model.layers, model.head]


def test_the_output_projection_stays_with_the_root() -> None:
    """The loss uses it outside of its module, when it would not be gathered."""
    model = ProjectsInItsLoss()
    assert wrap_units(model) == [model.embedding, *model.layers]
