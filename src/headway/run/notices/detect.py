"""Detection of a machine's notice sources from its firmware and environment, without network access."""

from __future__ import annotations

from collections.abc import Iterator

from headway.config import PreemptionConfig
from headway.config.sections.preemption import NoticeSource
from headway.core.machine.system import Machine
from headway.run.notices.aws import AWS, Aws
from headway.run.notices.azure import AZURE, Azure
from headway.run.notices.gcp import GCP, VALUES, Gcp
from headway.run.notices.slurm import Slurm
from headway.run.notices.source import Source

_DMI = "/sys/class/dmi/id"

#: The asset tag of every Azure machine; the vendor alone would be any Hyper-V.
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def detected(machine: Machine) -> list[NoticeSource]:
    """Return the names of the detected sources, as in `preemption.watch`."""
    return [name for name, found in _detect(machine) if found]


def _detect(machine: Machine) -> Iterator[tuple[NoticeSource, bool]]:
    vendor, product = (machine.text(f"{_DMI}/{name}") or "" for name in ("sys_vendor", "product_name"))
    xen = (machine.text("/sys/hypervisor/uuid") or "").startswith("ec2")
    yield "aws", vendor == "Amazon EC2" or xen or (machine.text(f"{_DMI}/bios_version") or "").endswith(".amazon")
    yield "gcp", product == "Google Compute Engine"
    yield "azure", machine.text(f"{_DMI}/chassis_asset_tag") == _AZURE_TAG
    yield "slurm", "SLURM_JOB_ID" in machine.environment


def make_sources(config: PreemptionConfig, machine: Machine) -> list[Source]:
    """Make the sources that a config selects."""
    names = detected(machine) if config.watch == "auto" else config.watch
    sources: list[Source] = []
    for name in dict.fromkeys(names if names != "none" else ()):
        if name == "aws":
            sources.append(Aws(config.endpoints.get(name, AWS), config.on_rebalance))
        elif name == "gcp":
            sources += [Gcp(value, config.endpoints.get(name, GCP)) for value in VALUES]
        elif name == "azure":
            sources.append(Azure(config.endpoints.get(name, AZURE), config.acknowledge))
        else:
            sources.append(Slurm(machine, config.grace_seconds))
    return sources
