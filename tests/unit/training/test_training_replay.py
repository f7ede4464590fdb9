"""A step that is computed twice: no trace when all is well, and not one bit that goes unseen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.config import Config, resolve
from headway.core.errors import ConfigError, CorruptionError
from headway.core.process import faults
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World
from headway.training.health.replay import checksum, outliers
from headway.training.optimizer import build_optimizer
from headway.training.recording.copies import CopyMeter
from headway.training.setup.trial import LiveBytes
from headway.training.state import TrainState
from headway.training.step import TrainStep
from headway.training.task import Objective, Task
from support.states import parts

CPU = torch.device("cpu")
WORLD = World(0, 1, 0, CPU)


def run(replay_every: int, determinism: str = "run") -> list[torch.Tensor]:
    """Four steps of a model with dropout and running statistics, which its forward pass changes."""
    c = resolve(
        Config.model_validate(
            {"train": {"steps": 8}, "determinism": determinism, "health": {"replay_every": replay_every}}
        )
    )
    torch.manual_seed(0)
    norm: nn.Module = nn.BatchNorm1d(16) if determinism == "run" else nn.LayerNorm(16)
    model = nn.Sequential(nn.Linear(4, 16), norm, nn.Dropout(0.5), nn.Linear(16, 1))
    objective = Objective(lambda m, batch: m(batch["x"]).square().sum(), lambda batch: len(batch["x"]))
    task, state = Task(model, None, objective), TrainState(model, build_optimizer(c.optimizer, model, CPU))  # type: ignore[arg-type]
    strategy = make_strategy(c, model, WORLD)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        batches: dict[int, Any] = {
            lane: [{"x": torch.randn(6, 4, generator=generator)} for _ in range(2)] for lane in (0, 1)
        }
        TrainStep(parts(c, task, state, strategy, WORLD)).run(batches)
    return [block.local.clone() for block in state.blocks().values()]


@pytest.mark.parametrize("determinism", ["run", "elastic"])
def test_a_replay_leaves_no_trace(determinism: str) -> None:
    for mine, other in zip(run(0, determinism), run(2, determinism), strict=True):
        assert torch.equal(mine, other)


def test_copies_to_the_device_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def to_device(_: CopyMeter, batch: Any, device: torch.device) -> Any:
        copies[-1] += 1
        return batch

    monkeypatch.setattr(CopyMeter, "begin", lambda _, step: copies.append(0))
    monkeypatch.setattr(CopyMeter, "to_device", to_device)
    run(2)
    assert copies == [4] * 6, "two lanes of two micro-batches; two of the four steps are computed twice"


def test_one_flipped_bit_of_one_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_passed", type(faults._passed)())
    monkeypatch.setenv("HEADWAY_FAULTS", "flip@replay.0=4")
    run(3)  # not computed twice, so nothing is known of it
    monkeypatch.setattr(faults, "_passed", type(faults._passed)())
    with pytest.raises(CorruptionError, match=r"step 4 was computed twice, and the gradient of .* on worker 0"):
        run(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype).t()
    before = int(checksum(tensor))
    width = tensor.element_size() * 8
    content = tensor.contiguous().view(-1).view(torch.uint8)
    for bit in range(len(content) * 8):
        flipped = content.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        assert int(checksum(flipped.view(dtype))) != before, f"bit {bit % width} of element {bit // width}"
    assert int(checksum(tensor.t())) != before or dtype is torch.bool, "the order counts too"


def test_a_checksum_takes_little_memory_beside_its_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, 70)
    whole = int(checksum(tensor))
    monkeypatch.setattr("headway.training.health.replay._TOGETHER", 999)
    with LiveBytes() as live:
        assert int(checksum(tensor)) == whole
    assert live.peak < tensor.nbytes / 4


def test_who_differs_is_told_by_the_majority() -> None:
    assert outliers({0: 7, 1: 7, 2: 7}) == [] == outliers({3: 1})
    assert outliers({0: 7, 1: 8, 2: 7}) == [1]
    assert outliers({0: 7, 1: 8}) == [0, 1], "of two nobody knows which"


@pytest.mark.parametrize(
    "values", [{"determinism": "off"}, {"parallel": {"strategy": "deepspeed_zero1", "workers": 1}}], ids=str
)
def test_what_cannot_be_repeated_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"computed twice|same bits"):
        resolve(Config.model_validate({"train": {"steps": 8}, "health": {"replay_every": 5}, **values}))
