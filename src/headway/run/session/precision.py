"""The choice of `train.precision: auto`, before the processes of a run are started."""

from __future__ import annotations

from headway.config import Config, load_resolved
from headway.core.coordination.launched import world_size_from_environment
from headway.core.process.variables import ONE_THREAD, with_variables
from headway.telemetry.arithmetic import cpu_multiplies_bf16


def with_precision(config: Config, *, restart: bool = False) -> Config:
    """Replace `train.precision: auto` by that of the run, if it has begun, or else by the faster one here.

    Call it before the run's processes are started: those that measure may find different speeds.

    Args:
        config: Resolved.
        restart: Whether an earlier run of this name does not count.
    """
    if config.train.precision != "auto":
        return config
    file = config.run_directory / "config.yaml"
    known = "auto"
    if file.is_file() and not restart:
        known = load_resolved(file).train.precision
    if known == "auto":
        known = "bf16" if config.train.weights != "fp32" else _faster_precision(config.train.device)
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": known})})


def _faster_precision(device: str) -> str:
    """Return the faster one of bf16 and fp32, without any use of a GPU: copies of this process could not use it."""
    with with_variables(ONE_THREAD):  # NumPy's threads would prevent copies of this process
        import torch

    accelerated = torch.cuda.is_available() or torch.backends.mps.is_available()
    if device in ("cuda", "mps") or (device == "auto" and accelerated):
        return "bf16"
    if world_size_from_environment() is not None:
        return "fp32"  # workers that were started one by one could measure different speeds
    return "bf16" if cpu_multiplies_bf16() else "fp32"
