"""A state that lies in the memory that its saves are written from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from headway.checkpoint.save.messages import WriterSettings
from headway.checkpoint.save.writer import CheckpointWriter
from headway.checkpoint.store import CheckpointStore
from headway.core.types import Block, StateBlocks
from support.states import equal, make_state


@pytest.fixture(params=["in memory", "on disk"])
def in_place(
    request: pytest.FixtureRequest, settings: WriterSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CheckpointWriter]:
    folder = tmp_path_factory.mktemp("disk") if request.param == "on disk" else None
    writer = CheckpointWriter(replace(settings, in_place=True, buffers_in=folder))
    yield writer
    writer.close()
    assert folder is None or not list(folder.iterdir()), "it is a file without a name"


def movable(state: dict[str, torch.Tensor]) -> StateBlocks:
    """The state's own tensors; those of other layouts and without elements are copied."""
    return {
        name: Block(tensor, (0,) * tensor.ndim, tuple(tensor.shape), movable=tensor.is_contiguous())
        for name, tensor in state.items()
    }


def places(state: dict[str, torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in state.values() if tensor.is_contiguous() and tensor.numel()]


def memory_of(writer: CheckpointWriter) -> list[int]:
    return sorted(os.fstat(buffer.descriptor).st_size for buffer in writer._buffers)


def test_what_is_saved_lies_in_one_buffer(in_place: CheckpointWriter, settings: WriterSettings) -> None:
    state = make_state(0)
    before = places(state)
    moved: list[int] = []
    for step in (1, 2, 3):
        in_place.settle()
        for name, tensor in make_state(step).items():
            state[name].copy_(tensor)
        in_place.submit(step, movable(state), {"step": step}, {"attempt": 1})
        assert moved in ([], places(state)), "it moves once"
        moved = places(state)
    assert not set(moved) & set(before)
    assert equal(state, make_state(3))
    unused, used = memory_of(in_place)
    assert unused == 0 and used >= sum(tensor.nbytes for tensor in state.values())
    in_place.wait()
    store = CheckpointStore(settings.directory)
    assert [info.step for info in store.list()] == [1, 2, 3]
    for info in store.list():
        assert store.verify(info.step).good and equal(store.load(info), make_state(info.step))


def test_settling_waits_until_the_save_is_done(in_place: CheckpointWriter, settings: WriterSettings) -> None:
    in_place.submit(1, movable(make_state(1)), {"step": 1}, {"attempt": 1})
    in_place.settle()
    assert CheckpointStore(settings.directory).info(1).step == 1


def test_a_state_with_more_tensors_moves_to_another_buffer(
    in_place: CheckpointWriter, settings: WriterSettings
) -> None:
    """Moments appear with the first update."""
    state = make_state(1)
    few = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
    in_place.submit(1, movable(few), {"step": 1}, {"attempt": 1})
    in_place.submit(2, movable(state), {"step": 2}, {"attempt": 1})
    assert equal(state, make_state(1))
    assert memory_of(in_place)[0] == 0
    in_place.wait()
    store = CheckpointStore(settings.directory)
    assert equal(store.load(store.info(1)), few) and equal(store.load(store.info(2)), state)
