"""The section `preemption`: sources of preemption notices, and the reaction to them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headway.config.base import Section

NoticeSource = Literal["aws", "gcp", "azure", "slurm"]


class PreemptionConfig(Section):
    """The reaction to a notice that a machine will be taken away ([preemption.md](preemption.md)). SIGTERM and SIGUSR1,
    as sent by Kubernetes, Slurm and a shutdown, are always handled."""

    watch: Literal["auto", "none"] | list[NoticeSource] = "auto"
    """Sources of notices to watch, e.g. `[aws]`. `auto`: the cloud that this machine's firmware names, and Slurm inside
    a Slurm job."""
    grace_seconds: Annotated[float, Field(gt=0.0)] = 120.0
    """Training saves and stops this long before an announced end, or at once if the end is sooner."""
    on_rebalance: Literal["save", "stop", "ignore"] = "save"
    """Reaction to AWS's rebalance recommendation, which only says that an interruption has become likely."""
    acknowledge: bool = True
    """Approve Azure's event once everything is saved; otherwise the machine idles until the announced time."""
    endpoints: dict[NoticeSource, str] = {}
    """Addresses that replace the metadata services of the clouds, e.g. `{aws: http://127.0.0.1:1338}`."""
