"""Runs that must not come out right: a campaign that finds nothing wrong with them would find nothing at all.

Each loses something on the way that a resume needs, as a bug would: what is lost is taken out of the newest checkpoint,
with hashes that agree, so that nothing but what the run does from there on can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.checkpoint.store import CheckpointStore
from headway.core.types import StateTensors

#: The control whose run goes on from a step before that of its weights, so that it uses rows twice.
CURSOR = "cursor"


def forge(run: Path, control: str) -> None:
    """Take something out of the newest checkpoint of a run.

    Args:
        run: The run directory.
        control: A key of `CONTROLS`.
    """
    store = CheckpointStore(run / "checkpoints", keep=1_000_000)
    info = store.list()[-1]
    state = {name: tensor.clone() for name, tensor in store.load(info).items()}
    step = CONTROLS[control](state, info.step)
    if step != info.step:
        store.discard(info.step)
    store.save(step, state, info.cursor, info.context)


def _without_moments(state: StateTensors, step: int) -> int:
    for name, tensor in state.items():
        if name.startswith("optimizer.") and tensor.is_floating_point():
            tensor.zero_()
    return step


def _without_a_weight(state: StateTensors, step: int) -> int:
    """The lowest bit of one element."""
    import torch

    name = min(name for name, tensor in state.items() if name.startswith("model.") and tensor.numel())
    state[name].view(-1).view(torch.uint8)[0] ^= 1
    return step


def _without_a_step(state: StateTensors, step: int) -> int:
    """The cursor is one step behind the weights; in the end it is where it should be, and only they are not."""
    return step - 1


#: What is lost -> how; gives the step that the checkpoint says it is of.
CONTROLS: dict[str, Callable[[StateTensors, int], int]] = {
    "moments": _without_moments,
    "one bit of a weight": _without_a_weight,
    CURSOR: _without_a_step,
}
