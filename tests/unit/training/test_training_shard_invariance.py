"""Whether an optimizer's bits depend on cuts is tried, not believed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from headway.config import Config
from headway.core.errors import ConfigError
from headway.training.optimizer import build_optimizer
from headway.training.optimizer.whole_vectors import WholeVectorAdamW
from headway.training.setup.shard_invariance import check_shard_invariance

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 2])
def test_adamw_of_elastic_runs_passes(threads: int) -> None:
    before = torch.get_num_threads()
    check_shard_invariance(partial(build_optimizer, Config.model_validate({}).optimizer, elastic=True), CPU, threads)
    assert torch.get_num_threads() == before


class TailSensitive(torch.optim.SGD):
    """Rounds the last elements of a buffer otherwise, as a kernel without a vector for them might."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    tail = p.view(-1)[p.numel() // 8 * 8 :]
                    tail.copy_(torch.nextafter(tail, torch.full_like(tail, 9.0)))


def test_an_optimizer_whose_bits_depend_on_cuts_is_refused() -> None:
    def build(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
        return TailSensitive(model.parameters(), lr=0.1)

    with pytest.raises(ConfigError, match="where a matrix is cut") as error:
        check_shard_invariance(build, CPU, 1)
    assert "zero1" in error.value.fix


@pytest.mark.parametrize("shape", [(), (5,), (64,), (61, 37), (128, 3)])
def test_adamw_of_whole_vectors_is_adamw(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(shape, generator=generator)
    weights = [nn.Parameter(start.clone()) for _ in range(3)]
    # One whose memory has another order than its rows.
    weights[2] = nn.Parameter(start.clone().t().contiguous().t()) if len(shape) == 2 else weights[2]
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizers = [
        torch.optim.AdamW([weights[0]], weight_decay=0.1, **options),  # type: ignore[arg-type]
        *(WholeVectorAdamW([{"params": [p], "weight_decay": 0.1}], **options) for p in weights[1:]),  # type: ignore[arg-type]
    ]
    for _ in range(4):
        gradient = torch.randn(shape, generator=generator)
        for p, optimizer in zip(weights, optimizers, strict=True):
            p.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(weights[1], weights[2])
    assert optimizers[1].state[weights[1]].keys() == optimizers[0].state[weights[0]].keys()
    assert optimizers[1].state[weights[1]]["step"] == 4
