from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headway.models.layers import attention


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["own attention", "PyTorch's attention"])
def logits_tolerance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """How far logits may be from those of transformers, relative and absolute: with its kernel they agree to the last
    digits, and our own for the CPU rounds otherwise."""
    if request.param == "own attention":
        return 1e-4
    monkeypatch.setattr(attention, "has_causal_products", lambda q, k: False)
    return 1e-5
