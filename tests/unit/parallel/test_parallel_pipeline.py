"""What a stage does for one micro-batch; how stages work together is in tests/distributed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.parallel.pipeline import ReceiveBuffers, _Lane, _Part

STAGES = [range(1), range(1, 2)]


def lane(micro_batches: int = 2) -> _Lane:
    lane = _Lane()
    batches: list[dict[str, Any]] = [{"number": n} for n in range(micro_batches)]
    lane.begin(batches, [10 + n for n in range(micro_batches)], lambda last: nullcontext())
    return lane


def test_every_stage_and_micro_batch_draws_from_a_stream_of_its_own() -> None:
    """Stages that drew the same masks would make the layers' dropout depend on each other."""

    def draw(stage: int, micro_batch: int) -> float:
        part = _Part(lambda *_: torch.rand(()), lane(), stage, STAGES, torch.manual_seed)
        return float(part(torch.zeros(1), torch.tensor([micro_batch])))

    drawn = [draw(stage, micro_batch) for stage in range(2) for micro_batch in range(2)]
    assert len(set(drawn)) == 4
    assert drawn == [draw(stage, micro_batch) for stage in range(2) for micro_batch in range(2)]


def test_a_stage_gets_its_layers_the_micro_batch_and_what_the_stage_before_gave() -> None:
    seen: list[Any] = []

    def forward(batch: Any, x: torch.Tensor | None, layers: range) -> torch.Tensor:
        seen.append((batch["number"], x, layers))
        return torch.tensor(1.5)

    x = torch.ones(2)
    first, last = (_Part(forward, lane(), stage, STAGES, torch.manual_seed) for stage in range(2))
    assert first(torch.zeros(1), torch.tensor([1])).shape == ()
    assert last(x, torch.tensor([0])).shape == (1,), "a loss that a schedule can pass on"
    assert seen == [(1, None, range(1)), (0, x, range(1, 2))]


def test_a_micro_batch_that_a_schedule_leaves_out_is_an_error() -> None:
    three = lane(3)
    assert [three.is_last_backward(0) for _ in range(2)] == [False, False]
    with pytest.raises(RuntimeError, match="all of its 3 micro-batches"):
        three.end()
    assert three.is_last_backward(0)
    three.end()


def test_only_micro_batches_under_way_have_buffers_to_receive_into() -> None:
    def record(buffer: torch.Tensor | None) -> Any:
        return SimpleNamespace(buffer=buffer)

    inputs = {n: (record(torch.ones(3, requires_grad=True)), record(None), SimpleNamespace()) for n in range(4)}
    gradients = {n: (record(torch.ones(2, dtype=torch.float64)),) for n in range(4)}

    def existing() -> list[int]:
        return [n for n in range(4) if any(getattr(i, "buffer", None) is not None for i in inputs[n] + gradients[n])]

    buffers = ReceiveBuffers([inputs, gradients], torch.device("cpu"))
    assert existing() == []
    buffers.allocate(inputs[2])
    buffers.allocate(gradients[2])
    assert existing() == [2] and inputs[2][1].buffer is None
    first, other = inputs[2][0].buffer, gradients[2][0].buffer
    assert first.shape == (3,) and first.requires_grad and first.is_leaf
    assert other.dtype == torch.float64 and not other.requires_grad
    buffers.free(inputs[2])
    buffers.free(gradients[2])
    assert existing() == []
