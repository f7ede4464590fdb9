"""Runs that must not come out right: a campaign that finds nothing wrong with them would find nothing at all.

Each loses something on the way that a resume needs, as a bug would: what is lost is taken out of the newest checkpoint,
with hashes that agree, so that nothing but the comparison with the undisturbed run can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.core.types import StateTensors


def forge(run: Path, control: str) -> None:
    """Take something out of the newest checkpoint of a run.

    Args:
        run: The run directory.
        control: A key of `CONTROLS`.
    """
    store = CheckpointStore(run / "checkpoints", keep=1_000_000)
    info = store.list()[-1]
    state = {name: tensor.clone() for name, tensor in store.load(info).items()}
    cursor = CONTROLS[control](state, info)
    store.save(info.step, state, cursor, info.context)


def _without_moments(state: StateTensors, info: CheckpointInfo) -> dict[str, int]:
    for name, tensor in state.items():
        if name.startswith("optimizer.") and tensor.is_floating_point():
            tensor.zero_()
    return info.cursor


def _without_a_weight(state: StateTensors, info: CheckpointInfo) -> dict[str, int]:
    """The lowest bit of one element."""
    import torch

    name = min(name for name, tensor in state.items() if name.startswith("model.") and tensor.numel())
    state[name].view(-1).view(torch.uint8)[0] ^= 1
    return info.cursor


def _without_a_count(state: StateTensors, info: CheckpointInfo) -> dict[str, int]:
    return {**info.cursor, "skipped_steps": info.cursor.get("skipped_steps", 0) + 1}


#: What is lost -> how.
CONTROLS: dict[str, Callable[[StateTensors, CheckpointInfo], dict[str, int]]] = {
    "moments": _without_moments,
    "one bit of a weight": _without_a_weight,
    "cursor": _without_a_count,
}
