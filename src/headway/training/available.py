"""What a config asks of the machine and the installation, checked before a run directory is touched."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from headway.config import DEEPSPEED, FULLY_SHARDED
from headway.telemetry.hardware import cpu_bf16_speed
from headway.training.optimizer import refuse_offload
from headway.training.precision import refuse_missing
from headway.training.torchao_import import missing_torchao

if TYPE_CHECKING:
    from headway.config import Config


def slow_precision(config: Config, device: torch.device) -> str | None:
    """What this machine can only do slowly, in words; None when there is nothing."""
    if config.train.precision != "bf16" or device.type != "cpu":
        return None
    speed = cpu_bf16_speed()
    if not speed:
        return "this CPU has no bf16 instructions and emulates them, many times slower than fp32; train.precision=fp32"
    if speed < 0.9:
        return f"matrix products in bf16 have {speed:.1f} x the speed of fp32 on this CPU; train.precision=fp32"
    return None


def refuse_unavailable(config: Config, device: torch.device) -> None:
    """Say what this device or installation lacks, while changing the config still costs nothing.

    Raises:
        ConfigError: a precision that the device does not have, moments that are to leave the host for the host, or a
            library that is not installed.
    """
    precision, optimizer = config.train.precision, config.optimizer
    refuse_missing(precision, device, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
    if optimizer.offload and config.parallel.strategy not in (*FULLY_SHARDED, *DEEPSPEED):
        refuse_offload(device)
    if find_spec("torchao") is None:
        if optimizer.name == "adamw8bit":
            raise missing_torchao("optimizer 'adamw8bit'", "optimizer.name", "adamw")
        if precision == "fp8":
            raise missing_torchao("precision 'fp8'", "train.precision", "bf16")
