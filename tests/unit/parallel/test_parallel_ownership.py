"""How updated weights get from their owners to the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headway.parallel.ownership import Ownership
from headway.parallel.replicas import Replicas


@pytest.mark.parametrize("rank", [0, 1])
def test_only_owners_copy_their_weights_into_what_is_sent(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Elsewhere what is there is out of date, and what arrives takes its place."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    owned = Ownership(model, lambda p: Replicas(None, rank, 2))
    mine = {p for p in model.parameters() if owned.is_mine(p)}
    before = {p: p.detach().clone() for p in model.parameters()}
    copied: list[int] = []
    cat = torch.cat

    def counted(parts: Any, *more: Any) -> torch.Tensor:
        copied.extend(part.numel() for part in parts)
        return cat(parts, *more)

    def broadcast(flat: torch.Tensor, src: int, **_: Any) -> Any:
        if src != rank:
            flat.fill_(7.0)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch, "cat", counted)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    owned.share(model.parameters(), 2**20)
    assert 0 < len(mine) < 4 and sum(copied) == sum(p.numel() for p in mine)
    for p, old in before.items():
        assert torch.equal(p, old if p in mine else torch.full_like(p, 7.0))
