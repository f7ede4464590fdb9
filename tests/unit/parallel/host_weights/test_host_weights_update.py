"""AdamW in host memory on weights without masters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from headway.parallel.host_weights.memory import HostMemory
from headway.parallel.host_weights.transfers import Transfers
from headway.parallel.host_weights.update import HostAdamW, HostPart

BF16 = torch.bfloat16
SHAPE = (96, 4_096)  # more than one run of an update


def updated(
    weights: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    rows: slice = slice(None),
    *,
    seed: int = 0,
    rate: float = 1e-3,
) -> list[torch.Tensor]:
    """Update some rows of a matrix by each gradient; return weights and moments."""
    adamw = HostAdamW((0.9, 0.999), 1e-8, BF16, BF16, seed)
    master = weights[rows].clone()
    group = {"lr": rate, "weight_decay": 0.1}
    offset = (rows.start or 0, 0)
    part = HostPart(master.clone(), master, torch.empty(master.shape), group, "matrix", offset, tuple(weights.shape))
    state = adamw.first_moments(part, HostMemory())
    for gradient in gradients:
        part.total.copy_(gradient[rows])
        adamw.update(part, state, torch.full((), 2.0), Transfers(torch.device("cpu")))
    assert torch.equal(part.weight, part.master) and state["step"] == len(gradients)
    return [part.master, state["exp_avg"], state["exp_avg_sq"]]


@pytest.fixture(scope="module")
def weights() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(scope="module")
def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(SHAPE, generator=generator) for _ in range(3)]


def test_shards_get_the_bits_of_the_whole(weights: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    whole = updated(weights, gradients)
    shards = [updated(weights, gradients, rows) for rows in (slice(0, 7), slice(7, 96))]
    assert all(torch.equal(torch.cat(parts), of) for *parts, of in zip(*shards, whole, strict=True))
    other = updated(weights, gradients, seed=1)
    assert not any(map(torch.equal, other, whole))


def test_results_are_those_of_adamw_on_average(weights: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    exact = torch.nn.Parameter(weights.float())
    optimizer = torch.optim.AdamW([exact], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
    exact.grad = gradients[0] / 2
    optimizer.step()
    state = optimizer.state[exact]
    found = updated(weights, gradients[:1])
    for x, expected in zip(found, (exact.detach(), state["exp_avg"], state["exp_avg_sq"]), strict=True):
        distance = (x.float() - expected).abs() / expected.abs().clamp_min(1e-20)
        assert float(distance.max()) < 2**-7 + 1e-5  # a neighbour, at most one unit of the last bit away
        mean = float((x.double() - expected.double()).mean())
        unit = float(expected.double().square().mean().sqrt()) * 2**-7
        assert abs(mean) < 5 * unit / x.numel() ** 0.5


def test_small_updates_and_slow_decay_arrive() -> None:
    """At a rate of 1e-5 no weight of about 1 would move, and with 0.999 no moment would fall."""
    weights = torch.ones(SHAPE, dtype=BF16)
    ones = torch.ones(SHAPE)
    moved, _, squares = updated(weights, [2 * ones, *[0 * ones] * 50], rate=1e-5)
    exact = torch.nn.Parameter(weights.float())
    optimizer = torch.optim.AdamW([exact], lr=1e-5, betas=(0.9, 0.999), weight_decay=0.1)
    for scale in [1.0, *[0.0] * 50]:
        exact.grad = scale * ones
        optimizer.step()
    change = 1 - float(exact.detach().mean())
    assert abs((1 - float(moved.float().mean())) / change - 1) < 0.2
    expected = float(optimizer.state[exact]["exp_avg_sq"].mean())
    assert abs(float(squares.float().mean()) / expected - 1) < 2e-3
    assert expected < 0.96e-3  # from 1e-3
