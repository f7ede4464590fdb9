"""All subjects of an examination, in order of display."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.core.console import notice
from headway.core.errors import ConfigError
from headway.core.machine.cores import read_cores
from headway.core.machine.system import Machine
from headway.lab.doctor.clock import examine_clock
from headway.lab.doctor.environment import examine_environment
from headway.lab.doctor.findings import Examined, Finding, worst
from headway.lab.doctor.gpus import examine_gpus, examine_processes
from headway.lab.doctor.lifecycle import examine_lifecycle
from headway.lab.doctor.limits import examine_limits
from headway.lab.doctor.memory import examine_memory
from headway.lab.doctor.network import examine_network
from headway.lab.doctor.processor import examine_processor
from headway.lab.doctor.software import Software, examine_cuda, examine_versions, read_software
from headway.lab.doctor.storage import examine_storage
from headway.parallel.interconnect import Interconnect, read_interconnect
from headway.parallel.nccl import Profile, choose_profile, with_topology
from headway.telemetry.arithmetic import cpu_bf16_speed
from headway.telemetry.gpus import Driver, read_driver
from headway.telemetry.host_updates import measure_host_updates


@dataclass
class Examination:
    """The examination of `headway doctor`; each part is read once, on first use."""

    machine: Machine = field(default_factory=Machine)
    folders: Mapping[str, Path] = field(default_factory=lambda: {"here": Path()})
    """Folders by purpose: runs and token stores are written there."""
    wanted_profile: str = "auto"
    determinism: str = "run"
    """Level of determinism of the planned runs."""
    write_test: bool = False
    arithmetic: bool = False
    """Measure matrix products and updates in host memory, which imports PyTorch."""
    config: Config | None = None
    """Config of a run whose remote tier is examined too."""
    software: Software | None = None
    """Installed software; looked up by default."""

    @cached_property
    def driver(self) -> Driver:
        """GPUs as the driver reports them."""
        if self.machine.exists("/proc/driver/nvidia"):
            notice("asking the driver about its GPUs")
        return read_driver(self.machine)

    @cached_property
    def interconnect(self) -> Interconnect:
        """Links of the GPUs to each other and to other machines."""
        return read_interconnect(self.machine, with_gpus=bool(self.driver.gpus))

    @cached_property
    def _installed(self) -> Software:
        if self.software is not None:
            return self.software
        if self.driver.gpus:
            notice("asking PyTorch about the GPUs")
        return read_software(ask_torch=bool(self.driver.gpus))

    @cached_property
    def profile(self) -> Profile:
        """The NCCL profile of this machine.

        Raises:
            ConfigError: the wanted profile does not fit.
        """
        profile = choose_profile(self.wanted_profile, self.interconnect, self.determinism)
        file = None if self.config is None else self.config.parallel.nccl_topology
        return with_topology(profile, file, file is not None and self.machine.exists(file))

    def examine(self) -> list[Examined]:
        """Examine all subjects; an exception in one becomes a finding, and the others continue."""
        machine = self.machine
        subjects: dict[str, Callable[[], Iterable[Finding]]] = {
            "GPUs": lambda: examine_gpus(self.driver, self.interconnect),
            "GPU processes": lambda: examine_processes(self.driver),
            "CUDA": lambda: examine_cuda(self._installed, self.driver, self.interconnect),
            "Versions": lambda: examine_versions(self._installed),
            "Network": lambda: examine_network(self.interconnect),
            "NCCL profile": lambda: [self._profile_finding()],
            "Processor": lambda: examine_processor(machine, cpu_bf16_speed if self.arithmetic else None),
            "Memory": lambda: examine_memory(machine, measure_host_updates if self.arithmetic else None),
            "Storage": lambda: examine_storage(machine, self.folders, write=self.write_test),
            "Remote tier": lambda: examine_lifecycle(self.config) if self.config is not None else (),
            "Clock": lambda: examine_clock(machine),
            "Limits": lambda: examine_limits(machine),
            "Environment": lambda: examine_environment(machine, read_cores(machine), self.interconnect),
        }
        examined = [Examined(name, _findings(look)) for name, look in subjects.items()]
        return [subject for subject in examined if subject.findings]

    def _profile_finding(self) -> Finding:
        where = "parallel.nccl_profile"
        try:
            profile = self.profile
        except ConfigError as error:
            return Finding("error", error.what, where, error.fix)
        shown = ", ".join(f"{setting.name}={setting.value}" for setting in profile.settings)
        return Finding("ok", f"{profile.name}: {profile.reason}{f' ({shown})' if shown else ''}", where)


def _findings(look: Callable[[], Iterable[Finding]]) -> tuple[Finding, ...]:
    try:
        return tuple(look())
    except Exception as error:  # machines report unexpected values; keep the other subjects
        what = f"could not be examined: {type(error).__name__}: {error}"
        return (Finding("warning", what, None, "please report it with the output of headway doctor --json"),)


def as_json(examined: list[Examined], profile: Profile | None) -> dict[str, Any]:
    """Return the result for JSON."""
    return {
        "worst": worst(examined),
        "findings": [
            {"subject": subject.subject, **vars(finding)} for subject in examined for finding in subject.findings
        ],
        "nccl_profile": None if profile is None else profile_as_json(profile),
    }


def profile_as_json(profile: Profile) -> dict[str, Any]:
    """Return a profile for JSON."""
    return {
        "name": profile.name,
        "reason": profile.reason,
        "settings": [vars(setting) for setting in profile.settings],
        "left_open": list(profile.left_open),
    }
