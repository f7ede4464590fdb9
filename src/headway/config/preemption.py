"""The section `preemption`: who is asked whether this machine will be taken away, and what is done then."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headway.config.base import Section

NoticeSource = Literal["aws", "gcp", "azure", "slurm"]


class PreemptionConfig(Section):
    """What is done when a machine is to be taken away ([preemption.md](preemption.md)). SIGTERM and SIGUSR1, as sent by
    Kubernetes, Slurm and a shutdown, are always heeded."""

    watch: Literal["auto", "none"] | list[NoticeSource] = "auto"
    """Whose notices are listened for, e.g. `[aws]`. `auto`: those of the cloud that this machine's firmware names, and
    of Slurm inside one of its jobs."""
    grace_seconds: Annotated[float, Field(gt=0.0)] = 120.0
    """How long before an announced end training saves and stops; what ends sooner stops it at once."""
    on_rebalance: Literal["save", "stop", "ignore"] = "save"
    """What AWS's rebalance recommendation alone does: it says that an interruption has become likely."""
    acknowledge: bool = True
    """Tell Azure, when everything is saved, that its event may begin; else the machine idles until the announced
    time."""
    endpoints: dict[NoticeSource, str] = {}
    """Addresses of metadata services in place of the clouds' own, e.g. `{aws: http://127.0.0.1:1338}`."""
