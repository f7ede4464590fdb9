"""Control runs that must fail: a campaign that does not detect them would detect nothing.

Each control removes something that a resume needs, as a bug would. It edits the newest checkpoint and keeps the hashes
consistent, so that only the further course of the run can reveal the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.checkpoint.store import CheckpointStore
from headway.core.types import StateTensors

#: The control whose run continues one step before that of its weights, so that it uses rows twice.
CURSOR = "cursor"


def forge(run: Path, control: str) -> None:
    """Remove something from the newest checkpoint of a run.

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
    """Flip the lowest bit of one element."""
    import torch

    name = min(name for name, tensor in state.items() if name.startswith("model.") and tensor.numel())
    state[name].view(-1).view(torch.uint8)[0] ^= 1
    return step


def _without_a_step(state: StateTensors, step: int) -> int:
    """Move the cursor one step behind the weights; at the end the cursor is right and only the weights are wrong."""
    return step - 1


#: Name of the loss -> function that applies it and returns the step to record in the checkpoint.
CONTROLS: dict[str, Callable[[StateTensors, int], int]] = {
    "moments": _without_moments,
    "one bit of a weight": _without_a_weight,
    CURSOR: _without_a_step,
}
