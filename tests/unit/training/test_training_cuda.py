"""What only a GPU can show of optimizers, precision and memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.config.schema import OptimizerConfig
from headway.parallel.world import World
from headway.training.optimizer import build_optimizer, optimizer_tensors
from headway.training.setup.precision import autocast, convert_to_fp8
from headway.training.setup.trial import largest_that_fits, memory_limit_bytes
from headway.training.state import TrainState, parameter_names
from support.gpu import NEEDS_GPU, NEEDS_REAL_GPU

pytestmark = NEEDS_GPU


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.Linear(256, 16)).cuda()


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, precision: str = "fp32", rows: int = 64
) -> list[float]:
    losses, device = [], torch.device("cuda", 0)
    x = torch.randn(rows, 256, device=device, generator=torch.Generator(device).manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        with autocast(precision, device):
            loss = (net(x).float() - x[:, :16]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "adafactor"])
def test_moments_in_host_memory_train_as_those_on_the_gpu_do(name: str) -> None:
    results = []
    for offload in (False, True):
        net = model()
        config = OptimizerConfig.model_validate({"name": name, "learning_rate": 1e-3, "offload": offload})
        optimizer = build_optimizer(config, net, torch.device("cuda", 0))
        results.append(train(net, optimizer, 6))
        places = {t.device.type for t in optimizer_tensors(optimizer, parameter_names(net)).values() if t.ndim}
        assert places == ({"cpu"} if offload else {"cuda"})
    assert results[1] == pytest.approx(results[0], rel=1e-2)
    assert results[1][-1] < results[1][0]


@NEEDS_REAL_GPU
def test_8_bit_moments_on_the_gpu() -> None:
    pytest.importorskip("torchao")
    net = model()
    config = OptimizerConfig.model_validate({"name": "adamw8bit", "learning_rate": 1e-3})
    losses = train(net, build_optimizer(config, net, torch.device("cuda", 0)), 10)
    assert losses[-1] < losses[0]


def test_8_bit_products_on_the_gpu() -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit products")
    losses = {}
    for precision in ("bf16", "fp8"):
        net = model()
        if precision == "fp8":
            assert convert_to_fp8(net, 256) == ["0", "2", "3"]
        optimizer = build_optimizer(OptimizerConfig(learning_rate=1e-3), net, torch.device("cuda", 0))
        # Few and small ones: on an emulated GPU a product in 8 bits takes a hundred times as long as another.
        losses[precision] = train(net, optimizer, 8, precision, rows=16)
    assert losses["fp8"] != losses["bf16"]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.1)


@NEEDS_REAL_GPU
def test_the_micro_batch_that_fits_the_gpu() -> None:
    device = torch.device("cuda", 0)
    world, net = World(0, 1, 0, device), model()
    state = TrainState(net, build_optimizer(OptimizerConfig(), net, device))
    per_row = 2**20

    def attempt(rows: int) -> None:
        torch.empty(rows * per_row, dtype=torch.uint8, device=device)

    base = torch.cuda.memory_allocated(device)
    assert largest_that_fits([1, 2, 4, 8, 16], attempt, state, world, base + 9 * per_row) == 8
    assert largest_that_fits([1, 2, 4, 8, 16], attempt, state, world, memory_limit_bytes(world)) == 16
