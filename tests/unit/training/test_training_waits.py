"""How often one step has the host wait for the device, counted without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.config import Config, resolve
from headway.models.build import build_model
from headway.parallel.ddp import DataParallel, ElasticDataParallel
from headway.parallel.world import World
from headway.training.health import queued_update
from headway.training.optimizer import build_optimizer, materialize
from headway.training.state import TrainState
from headway.training.step import TrainStep
from headway.training.task import LANGUAGE_MODELLING, Task
from support.states import parts

META = torch.device("meta")


class Crossings(TorchDispatchMode):
    """Plays the device: "meta" computes nothing, and whoever wants a number of it gets a one. On a GPU each of these
    would wait until all that was queued before is done."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host: list[str] = []
        """What made the host wait, and among them the update."""
        self.to_device = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten, name = torch.ops.aten, operator.overloadpacket
        if name is aten._local_scalar_dense and args[0].is_meta:
            self.to_host.append("number")
            return 1.0
        if name in (aten._to_copy, aten.copy_):
            source = args[1] if name is aten.copy_ else args[0]
            target = args[0].device if name is aten.copy_ else torch.device(kwargs.get("device") or source.device)
            if source.is_meta and target != META:
                self.to_host.append("tensor")
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            self.to_device += not source.is_meta and target == META
        if name is aten._fused_adamw_ and self.to_host[-1:] != ["update"]:  # a call for each group of parameters
            self.to_host.append("update")
        return operator(*args, **kwargs)


def on_meta(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Move both as they are on the CPU: PyTorch would begin no fused optimizer there."""
    materialize(optimizer)
    before, state = list(model.parameters()), dict(optimizer.state)
    there = dict(zip(before, model.to(META).parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [there[p] for p in group["params"]]
    optimizer.state.clear()
    for p, tensors in state.items():
        optimizer.state[there[p]] = {name: tensor.to(META) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("strategy", "determinism", "queues", "waits"),
    [
        (DataParallel, "run", True, ["update", "tensor"]),
        (DataParallel, "run", False, ["tensor", "number", "update"]),
        (ElasticDataParallel, "elastic", True, ["tensor", "tensor", "update"]),
    ],
)
def test_a_step_waits_for_the_device_for_losses_and_norm_alone_and_if_it_can_once_and_with_the_update_queued(
    monkeypatch: pytest.MonkeyPatch, strategy: type, determinism: str, queues: bool, waits: list[str]
) -> None:
    monkeypatch.setattr(queued_update, "_QUEUES", ("meta",) if queues else ())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which "meta" cannot be asked
    shape = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 32}
    c = resolve(Config.model_validate({"train": {"steps": 10}, "model": shape, "determinism": determinism}))
    model = build_model(c.model, vocab_size=32, seed=0)
    optimizer = build_optimizer(c.optimizer, model, torch.device("cpu"))
    on_meta(model, optimizer)
    world = World(0, 1, 0, META)
    state, spread = TrainState(model, optimizer), strategy(model, world, c)
    rows = {"ids": torch.zeros(2, 8, dtype=torch.int64), "targets": torch.ones(2, 8, dtype=torch.int64)}
    task = Task(model, None, LANGUAGE_MODELLING)
    for _ in range(2):
        with Crossings() as seen:
            result = TrainStep(parts(c, task, state, spread, world)).run({0: [rows, rows], 1: [rows, rows]}, (True,))
        assert not result.skipped
        assert seen.to_host == waits
        assert seen.to_device == 4 * len(rows), "the micro-batches, and no number that the host has made"
