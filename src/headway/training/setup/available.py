"""Checks of what a config needs from the machine and the installation, before a run directory is touched."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from headway.config import OptimizerConfig, StrategySpec, TrainConfig
from headway.core.errors import ConfigError
from headway.core.format import counted
from headway.core.machine.system import Machine
from headway.telemetry.arithmetic import cpu_bf16_speed
from headway.telemetry.gpus import nvidia_devices
from headway.training.optimizer import check_offload
from headway.training.setup.precision import check_present

#: Attention of transformers that needs a package: its module and its name. Not what transformers would fetch from the
#: Hub instead, which is code of others.
FLASH = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
}


def slow_precision(train: TrainConfig, device: torch.device) -> str | None:
    """Describe a precision that this machine computes slowly; None if it does not."""
    if train.precision != "bf16" or device.type != "cpu":
        return None
    speed = cpu_bf16_speed()
    if not speed:
        return "this CPU has no bf16 instructions and emulates them, many times slower than fp32; train.precision=fp32"
    if speed < 0.9:
        return f"matrix products in bf16 have {speed:.1f} x the speed of fp32 on this CPU; train.precision=fp32"
    return None


def unused_gpus(train: TrainConfig, device: torch.device, machine: Machine | None = None) -> str | None:
    """Describe the GPUs that `train.device: auto` cannot use; None if there are none, or they are hidden on purpose."""
    machine = machine or Machine()
    hidden = machine.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if train.device != "auto" or device.type == "cuda" or hidden:
        return None
    count = nvidia_devices(machine)
    if not count:
        return None
    return (
        f"this run is on {device.type}, since PyTorch cannot use the {counted(count, 'NVIDIA GPU')} of this machine:"
        f" headway doctor says why; set train.device={device.type} if that is intended"
    )


def shortfalls(train: TrainConfig, device: torch.device) -> list[str]:
    """Describe what a run leaves unused or does slowly on this machine; nothing that would be an error."""
    found = slow_precision(train, device), unused_gpus(train, device)
    return [text for text in found if text is not None]


def check_available(
    train: TrainConfig, optimizer: OptimizerConfig, strategy: StrategySpec, device: torch.device
) -> None:
    """Check what this device or machine lacks, while changing the config still costs nothing.

    Raises:
        ConfigError: the device lacks the precision, moments are to be offloaded although they are on the host, or a
            compiler is not installed.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    check_present(train.precision, device, capability)
    if optimizer.offload and not strategy.offloads_itself:
        check_offload(device)
    if train.compiles and device.type == "cuda":
        # Check that Triton can build the small C programs that start compiled code on a GPU. Slim containers cannot.
        # With `train.compile: auto` the trial fails, reports that, and the run is not compiled.
        lacking = []
        if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
            lacking.append("a C compiler")
        if not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists():
            lacking.append("Python's header files")
        if lacking:
            raise ConfigError(
                f"torch.compile for GPUs needs {' and '.join(lacking)}, which this machine does not have",
                where="train.compile",
                fix="install gcc and the headers (Debian: apt install gcc python3-dev), or train.compile=false",
            )


def check_attention(attention: str, precision: str, device: torch.device) -> None:
    """Check that a device computes an attention (`model.attention`), forward and backward.

    Raises:
        ConfigError: it does not, or not in this precision.
    """
    lacks = None
    if attention in FLASH and device.type != "cuda":
        lacks = f"needs a GPU, and the device is {device.type}"
    elif attention in FLASH and precision not in ("bf16", "fp16"):
        lacks = f"computes in bf16 or fp16, and train.precision is {precision}"
    elif attention == "flex" and device.type == "cpu":
        lacks = "has no backward pass on a CPU"
    if lacks is not None:
        raise ConfigError(
            f"attention '{attention}' {lacks}", where="model.attention, train.device", fix="model.attention=sdpa"
        )
