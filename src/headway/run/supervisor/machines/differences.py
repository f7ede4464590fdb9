"""Whether the machines of a run are alike in what decides speed and bits: config, libraries, processors and GPUs."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headway.config.derived.identity import changed_values
from headway.core.machine.processor import cpu_kind
from headway.core.machine.system import Machine

_GPUS = "/proc/driver/nvidia/gpus"
_TEXT = 200
#: Most differences of a config that are named.
_NAMED = 8


@dataclass(frozen=True)
class _Fact:
    """Something that machines may have differently."""

    words: str
    fix: str
    is_bits: bool
    """Whether results differ in their last bits where it differs."""


_FACTS = {
    "torch": _Fact("PyTorch", "install one version on all machines", True),
    "gpus": _Fact("GPUs of model", "use machines with the same GPUs", True),
    "gpu_count": _Fact("GPUs", "", False),
    "processor": _Fact("the processor", "", False),
    "python": _Fact("Python", "", False),
}


def describe_machine(machine: Machine | None = None) -> dict[str, str]:
    """Return what a machine has, without loading PyTorch; unknown facts are absent.

    Args:
        machine: Examined instead of this one.
    """
    machine = machine or Machine()
    found = {"python": platform.python_version(), "processor": cpu_kind()}
    with suppress(PackageNotFoundError):
        found["torch"] = version("torch")
    models = [_model(machine.text(f"{_GPUS}/{name}/information") or "") for name in machine.names(_GPUS)]
    if models:
        found |= {"gpus": ", ".join(sorted(set(models))), "gpu_count": str(len(models))}
    return found


def _model(information: str) -> str:
    """Return the model in the driver's description of a GPU."""
    lines = (line.partition(":") for line in information.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "Model"), "unknown")


@dataclass(frozen=True)
class Differences:
    """How a machine differs from the lead's."""

    refused: str | None
    """The difference because of which the run's promise cannot be kept; None without one."""
    fix: str
    others: tuple[str, ...]
    """Differences that only cost speed, or that the run does not promise anything about."""


def compare_machines(lead: Mapping[str, str], other: Mapping[str, str], determinism: str, device: str) -> Differences:
    """Compare a machine with the lead's. What is unknown of either is no difference.

    Args:
        lead: From `describe_machine`.
        other: The same of the other machine, as it says itself.
        determinism: What the run promises.
        device: `train.device`. On CPUs, GPUs do not count.
    """
    refused = None
    fix = ""
    others = []
    for name, fact in _FACTS.items():
        here = lead.get(name, "")[:_TEXT]
        there = other.get(name, "")[:_TEXT]
        if not here or not there or here == there or (device == "cpu" and name.startswith("gpu")):
            continue
        words = f"{fact.words} {there}, and the lead {here}"
        if fact.is_bits and determinism != "off" and refused is None:
            refused = f"{words}: equal bits (determinism={determinism}) need the same"
            fix = fact.fix
        else:
            others.append(words)
    return Differences(refused, f"{fix}, or set determinism=off" if fix else "", tuple(others))


def name_differences(lead: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Name the keys by which a machine's config computes something else than the lead's; empty where none is known.

    Args:
        lead: What the lead's config says about the mathematics of the run.
        other: The same of the other machine, as it says itself.
    """
    if not other:
        return ""
    found = changed_values(lead, other, "{key} is {after}, and the lead's is {before}")
    named = [text[:_TEXT] for text in found[:_NAMED]]
    more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return "; ".join([*named, *more])
