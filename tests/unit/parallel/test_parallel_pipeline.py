"""What a stage does for one micro-batch; how stages work together is in tests/distributed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from headway.parallel.pipeline import _Lane, _Part

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
