"""Memory between training and the process that writes, on machines with GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.checkpoint.images import Piece, plan_images
from headway.checkpoint.staging import Slot
from headway.core.types import Block


class Cuda:
    """As CUDA's runtime: it has no memory to keep in place, and the next kernel gets the blame for that."""

    def __init__(self) -> None:
        self.error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.error = 2
        return self.error

    def kernel(self, *_: Any, **__: Any) -> None:
        error, self.error = self.error, 0
        if error:
            raise torch.AcceleratorError("CUDA error: out of memory")


def test_memory_that_cannot_be_kept_in_its_place_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, state = Cuda(), {"weight": Block.whole(torch.arange(6.0))}
    images = plan_images([Piece.of(name, block) for name, block in state.items()], 0, 2**20)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=cuda.cudaHostRegister))
    monkeypatch.setattr(torch, "zeros", cuda.kernel)
    slot = Slot()
    try:
        slot.prepare(images, pinned=True)
        cuda.kernel()  # of the training, which goes on
        slot.fill(state)
        assert torch.equal(slot._views["weight"].view(torch.float32), torch.arange(6.0))
    finally:
        slot.close()
