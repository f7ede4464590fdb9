from __future__ import annotations

import torch

from headway.core.types import Block


def test_a_box_and_a_run_find_their_elements_in_the_whole() -> None:
    whole = torch.arange(12.0).view(3, 4)
    box = Block(torch.empty(2, 3), (1, 1), (3, 4))
    assert torch.equal(box.of(whole), torch.tensor([[5.0, 6.0, 7.0], [9.0, 10.0, 11.0]]))
    run = Block(torch.empty(5), (3,), (3, 4))
    assert torch.equal(run.of(whole), torch.tensor([3.0, 4.0, 5.0, 6.0, 7.0]))
    run.of(whole).zero_()
    assert whole.flatten().tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 8, 9, 10, 11]


def test_parts_that_are_nothing_or_one_number() -> None:
    assert Block(torch.empty(0), (12,), (3, 4)).of(torch.ones(3, 4)).numel() == 0
    assert Block(torch.empty(()), (), ()).of(torch.tensor(7.0)) == 7.0
    assert Block(torch.empty(1), (0,), ()).of(torch.tensor(7.0)).tolist() == [7.0]


def test_only_all_elements_in_their_shape_are_whole() -> None:
    assert Block.whole(torch.ones(3, 4)).is_whole
    assert not Block(torch.ones(12), (0,), (3, 4)).is_whole
    assert not Block(torch.ones(1, 4), (0, 0), (3, 4)).is_whole
