"""The fixed tree, worker by worker and lane by lane, without processes."""

import pytest
import torch

from headway.parallel.tree import LaneAccumulator


def tree_sum(lanes: list[torch.Tensor]) -> torch.Tensor:
    """The definition: neighbours first."""
    if len(lanes) == 1:
        return lanes[0]
    return tree_sum([a + b for a, b in zip(lanes[::2], lanes[1::2], strict=True)])


def random_lanes(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(1000, generator=generator) * 10.0**i for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_lanes_of_one_worker_add_up_in_the_order_of_the_tree(count: int) -> None:
    lanes = random_lanes(count)
    accumulator = LaneAccumulator()
    for lane in lanes:
        buffer = lane.clone()
        accumulator.add(buffer)
        buffer.zero_()  # the step reuses the buffer
    assert torch.equal(accumulator.take(), tree_sum(lanes))


def test_the_tree_is_not_the_running_sum() -> None:
    """Otherwise the tests above could not tell the right order from the wrong one."""
    lanes = random_lanes(8)
    running = lanes[0].clone()
    for lane in lanes[1:]:
        running += lane
    assert not torch.equal(running, tree_sum(lanes))


@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_a_number_of_lanes_that_is_no_power_of_two_is_refused(count: int) -> None:
    accumulator = LaneAccumulator()
    for lane in random_lanes(count):
        accumulator.add(lane)
    with pytest.raises(RuntimeError, match="power of two"):
        accumulator.take()


def test_the_accumulator_can_be_used_again() -> None:
    accumulator = LaneAccumulator()
    for count in (4, 4, 4):
        lanes = random_lanes(count)
        for lane in lanes:
            accumulator.add(lane)
        assert torch.equal(accumulator.take(), tree_sum(lanes))
