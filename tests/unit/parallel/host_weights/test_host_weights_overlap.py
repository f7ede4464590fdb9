"""Updates that continue while the next forward pass begins."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from headway.parallel.host_weights.overlap import OverlappedUpdate
from headway.parallel.host_weights.transfers import Transfers
from support.waits import LONG


class Layers(nn.Module):
    """Three layers that it declares, and a head that it uses outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        self.head = nn.Linear(2, 1, bias=False)

    def wrap_units(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.head.weight)


def test_each_layer_waits_for_its_own_weights() -> None:
    """The last update begins after the forward pass of the first layer, and yet the pass has its weights."""
    torch.manual_seed(0)
    model = Layers()
    overlapped = OverlappedUpdate(model, Transfers(torch.device("cpu")))
    begun = threading.Event()
    model.layers[0].register_forward_hook(lambda *_: begun.set())
    seen: list[bool] = []

    @torch.no_grad()
    def update(p: torch.Tensor) -> None:
        if p is model.layers[2].weight:
            seen.append(begun.wait(LONG))
        p.fill_(0.5)

    overlapped.start((p, lambda p=p: update(p)) for p in model.parameters())
    assert torch.equal(model.head.weight, torch.full((1, 2), 0.5)), "what is outside of layers is updated at once"
    assert not seen
    with torch.no_grad():
        assert float(model(torch.ones(1, 2))) == 1.0
    assert seen == [True]


def test_all_is_updated_when_it_is_finished() -> None:
    model = Layers()
    overlapped = OverlappedUpdate(model, Transfers(torch.device("cpu")))
    overlapped.start((p, lambda p=p: nn.init.zeros_(p)) for p in model.parameters())
    overlapped.finish()
    assert not any(p.any() for p in model.parameters())


def test_an_error_in_the_background_is_raised() -> None:
    model = Layers()
    overlapped = OverlappedUpdate(model, Transfers(torch.device("cpu")))

    def fail() -> None:
        raise MemoryError("no room")

    overlapped.start([(model.layers[1].weight, fail)])
    with pytest.raises(MemoryError, match="no room"):
        model(torch.ones(1, 2))
