"""The disk that the kept checkpoints of a run take."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from headway.config import Config, ModelConfig
from headway.config.derived.host_weights import host_types
from headway.config.optimizers import FP32_BYTES, find_optimizer
from headway.config.units import Interval
from headway.core.machine.system import space_of
from headway.models.facts import parameter_shapes


@dataclass(frozen=True)
class DiskPlan:
    """Checkpoints of a run at its end, on the disk of its run directory."""

    checkpoint_bytes: int
    """Weights and moments of one checkpoint."""
    checkpoints: int
    """Checkpoints that are kept at most, and the one being written; those kept by age or by time are not counted."""
    uncounted: tuple[str, ...]
    """Rules that keep more, by an amount that is not known."""
    free_bytes: int | None
    """What is free there; None for other machines."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return self.checkpoints * self.checkpoint_bytes


def plan_disk(config: Config, model: ModelConfig, *, here: bool) -> DiskPlan:
    """Plan the disk of a run's checkpoints.

    Args:
        config: A resolved config.
        model: A complete config.
        here: Whether the run is planned for this machine, whose free space counts.
    """
    rules = config.checkpoint
    by_time = {"keep_for": rules.keep_for, "keep_every": rules.keep_every}
    uncounted = [
        f"checkpoint.{name}={value}" for name, value in by_time.items() if value is not None and value.unit == "seconds"
    ]
    milestones = _milestones(config, rules.keep_every)
    saved = rules.keep + rules.keep_best + milestones + 1
    free = free_bytes(Path(config.runs)) if here else None
    return DiskPlan(_checkpoint_bytes(config, model), saved, tuple(uncounted), free)


def free_bytes(folder: Path) -> int | None:
    """Return the free space of a folder that may not be there yet; None if it cannot be known."""
    folder = folder.absolute()
    there = next((parent for parent in (folder, *folder.parents) if parent.exists()), None)
    try:
        return None if there is None else space_of(there).free_bytes
    except OSError:
        return None


def _checkpoint_bytes(config: Config, model: ModelConfig) -> int:
    spec = find_optimizer(config.optimizer.name)
    if model.implementation == "transformers":
        from headway.lab.plan.pretrained import pretrained_stage

        shapes = pretrained_stage(config, model).shapes  # frozen weights are not saved
    else:
        shapes = parameter_shapes(model)
    if config.train.weights != "fp32":
        return host_types(config).kept_bytes * sum(map(prod, shapes.values()))
    return sum(FP32_BYTES * prod(shape) + spec.moment_bytes(name, shape) for name, shape in shapes.items())


def _milestones(config: Config, every: Interval | None) -> int:
    """Count the checkpoints that `checkpoint.keep_every` keeps until the last step."""
    train = config.train
    if every is None or every.unit == "seconds":
        return 0
    steps = train.resolved_steps
    last = steps if every.unit == "steps" else train.batches.tokens_before(steps)
    return last // every.amount
