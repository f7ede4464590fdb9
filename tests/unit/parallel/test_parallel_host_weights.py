"""Weights in bf16 with masters in host memory, against AdamW on fp32 tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from headway.config import Config
from headway.parallel.host_weights.engine import HostWeights
from headway.parallel.host_weights.place import place_on_both_sides
from headway.parallel.host_weights.transfers import PIECE
from headway.parallel.world import World
from headway.training.optimizer import build_optimizer
from support.gpu import needs_gpu

ONE = World(0, 1, 0, torch.device("cpu"))


def config(**optimizer: object) -> Config:
    train = {"steps": 1, "weights": "bf16", "precision": "bf16"}
    return Config.model_validate({"train": train, "optimizer": {"learning_rate": 0.01, **optimizer}})


def engine_of(model: nn.Module, settings: Config, world: World = ONE) -> HostWeights:
    made = place_on_both_sides(model, world, lambda: HostWeights(model, world, settings), None, cuts=False, fresh=True)
    assert isinstance(made, HostWeights)
    made.take_over(build_optimizer(settings.optimizer, model, world.device))
    return made


def passes(engine: HostWeights, batches: list[torch.Tensor]) -> None:
    engine.begin()
    for number, batch in enumerate(batches):
        with engine.micro_batch(True, last=number == len(batches) - 1):
            engine.backward(engine.model(batch).float().square().sum())
        engine.end_lane()
    engine.reduce()


def batches_of(size: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, size, generator=generator).bfloat16() for _ in range(4)]


def masters(engine: HostWeights, model: nn.Module) -> list[torch.Tensor]:
    found = [engine.part_of(p) for p in model.parameters()]
    return [block.local for block in found if block is not None]


def expected_update(model: nn.Module, values: list[torch.Tensor], steps: int) -> list[torch.Tensor]:
    """The masters after AdamW of PyTorch on fp32 tensors, with gradients of a copy of the model in bf16."""
    kept = [nn.Parameter(value.clone()) for value in values]
    groups = [
        {"params": [p for p in kept if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in kept if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for step in range(steps):
        with torch.no_grad():
            for p, master in zip(model.parameters(), kept, strict=True):
                p.copy_(master)
                master.grad = torch.zeros_like(master)
        for batch in batches_of(4, step):
            gradients = torch.autograd.grad(model(batch).float().square().sum(), list(model.parameters()))
            for master, gradient in zip(kept, gradients, strict=True):
                assert master.grad is not None
                master.grad += gradient.float()
        for master in kept:
            assert master.grad is not None
            master.grad *= 0.5
        adamw.step()
    return [master.detach() for master in kept]


def test_masters_are_those_of_adamw_in_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    other = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).bfloat16()
    first = [p.detach().clone() for p in model.parameters()]
    engine = engine_of(model, config())
    for step in range(3):
        passes(engine, batches_of(4, step))
        assert engine.update(0.5)
    for found, wanted, p in zip(
        masters(engine, model), expected_update(other, first, 3), model.parameters(), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
        assert p.dtype == torch.bfloat16 and torch.equal(p, found.bfloat16())


def test_a_tensor_of_several_pieces_is_updated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are independent of each other, so their number changes no bit."""
    found = []
    for piece in (PIECE, 16):
        monkeypatch.setattr("headway.parallel.host_weights.transfers.PIECE", piece)
        torch.manual_seed(0)
        model = nn.Linear(4, 24)
        engine = engine_of(model, config())
        passes(engine, batches_of(4))
        engine.update(1.0)
        found.append(masters(engine, model))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def leaves_no_gradient(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    seen: list[StorageWeakRef] = []

    def watch(p: torch.Tensor) -> None:
        assert p.grad is not None
        seen.append(StorageWeakRef(p.grad.untyped_storage()))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(watch)  # before the engine's
    engine = engine_of(model, config(), World(0, 1, 0, device))
    engine.begin()
    for number, batch in enumerate(batches_of(4)):
        with engine.micro_batch(True, last=number == 3):
            engine.backward(model(batch.to(device)).float().square().sum())
        engine.norm_parts()  # waits for the copies
        assert len(seen) == (number + 1) * 12
        assert all(gradient.expired() for gradient in seen), "it is freed when it has been copied"
        assert all(p.grad is None for p in model.parameters())


def test_no_gradient_stays_after_its_copy() -> None:
    leaves_no_gradient(ONE.device)


@needs_gpu
def test_no_gradient_stays_on_a_gpu() -> None:
    leaves_no_gradient(torch.device("cuda", 0))


def test_the_norm_is_that_of_the_sums() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    engine = engine_of(model, config())
    passes(engine, batches_of(4))
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for batch in batches_of(4):
        gradients = torch.autograd.grad(model(batch).float().square().sum(), list(model.parameters()))
        for sums, gradient in zip(total, gradients, strict=True):
            sums += gradient.double()
    (found,) = engine.norm_parts()
    assert found == pytest.approx(float(sum(sums.square().sum() for sums in total)), rel=1e-6)


def test_a_step_that_is_skipped_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    engine = engine_of(model, config())
    before = [tensor.clone() for tensor in masters(engine, model)]
    passes(engine, batches_of(4))
    engine.skip()
    assert engine.norm_parts() == [0.0]
    assert all(torch.equal(a, b) for a, b in zip(before, masters(engine, model), strict=True))


def test_moments_in_bf16_are_rounded_once_a_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 5, bias=False)
    engine = engine_of(model, config(moments="bf16"))
    first = model.weight.detach().clone().requires_grad_()
    passes(engine, batches_of(4))
    engine.update(1.0)
    gradient = torch.zeros_like(model.weight, dtype=torch.float32)
    for batch in batches_of(4):
        gradient += torch.autograd.grad(nn.functional.linear(batch, first).float().square().sum(), first)[0].float()
    moments = engine.moments(model.weight)
    assert moments["exp_avg"].local.dtype == torch.bfloat16
    assert torch.equal(moments["exp_avg"].local, (gradient * (1 - 0.9)).bfloat16())
    assert float(moments["step"].local) == 1.0


def test_a_parameter_without_a_gradient_has_one_of_zero() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    engine = engine_of(model, config())
    unused = masters(engine, model)[2].clone()
    engine.begin()
    with engine.micro_batch(True, last=True):
        engine.backward(model[0](batches_of(4)[0]).sum())
    engine.reduce()
    engine.update(1.0)
    torch.testing.assert_close(masters(engine, model)[2], unused * (1 - 0.01 * 0.1))
