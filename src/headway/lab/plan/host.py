"""Host memory of a worker on an accelerator: the second column of a plan.

Offloaded tensors are those of `training/optimizer/offload.py` and of DeepSpeed (`lab/plan/deepspeed.py`); what a save
stages is that of `checkpoint/save/staging.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from headway.config import Config
from headway.config.optimizers import FP32_BYTES
from headway.lab.plan.layout import Layout
from headway.lab.plan.stages import Stage

#: An assumption: the interpreter, PyTorch with CUDA's libraries and its context, and batches on their way.
REST_BYTES = 4 * 2**30
#: Bytes moved per parameter by one update: norm, clipping, AdamW.
BYTES_PER_UPDATE = 40
#: Staging buffers of a run that also keeps its state in memory (`checkpoint.memory_every`), and of any other.
_BUFFERS = {True: 3, False: 1}


@dataclass(frozen=True)
class HostPlan:
    """Host memory of one worker by part, in bytes; the first parts are named as those on the device."""

    weights: int = 0
    """The copies of weights that are updated."""
    gradients: int = 0
    """Gradients, and their sums."""
    optimizer: int = 0
    """Moments."""
    pinned: int = 0
    """Buffers for copies to and from the device."""
    saves: int = 0
    """The copy of the state that is written while training continues."""
    rest: int = 0
    """The process itself."""
    updated: int = 0
    """Not memory: bytes that an update moves here."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {name: count for name, count in asdict(self).items() if name != "updated"}

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())


def plan_host(config: Config, stage: Stage, layout: Layout) -> HostPlan:
    """Plan the host memory of a worker on an accelerator, for strategies other than DeepSpeed's.

    With `optimizer.offload` it has copies of its weights and gradients, and the moments; with `zero3` shards of them
    and of frozen weights.
    """
    name = config.optimizer.name
    if layout.strategy.cuts_parameters:
        shards = layout.shards
        weights = stage.shard(shards)
        moments = stage.shard_of_moments(shards, name)
        frozen = stage.frozen // shards
    else:
        owners = layout.mesh.replicas if layout.strategy.divides_update else 1
        weights = stage.largest_share(owners)
        moments = stage.largest_moments(owners, name)
        frozen = 0
    saves = staged_bytes(config, weights + moments)
    if not config.optimizer.offload:
        return HostPlan(saves=saves, rest=REST_BYTES)
    return HostPlan(
        weights=weights + frozen,
        gradients=weights,
        optimizer=moments,
        saves=saves,
        rest=REST_BYTES,
        updated=BYTES_PER_UPDATE * weights // FP32_BYTES,
    )


def staged_bytes(config: Config, state: int) -> int:
    """Return the bytes that saves hold of a worker's part of the state."""
    return _BUFFERS[config.checkpoint.memory_every is not None] * state
