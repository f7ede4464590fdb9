"""An anomaly of a run: what was seen, the suspected cause, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DATA_WAIT = "data wait"
RESTART = "restart"
UNKNOWN = "unknown"
OTHER_PROCESSES = "other processes"
QUOTA = "processor quota"
VIRTUAL_MACHINES = "other virtual machines"
HEAT = "heat"
ROWS = "rows"
UNSTABLE = "learning rate"
NOT_FINITE = "not finite"
GPU_MEMORY = "gpu memory"
OWN_MEMORY = "own memory"
LOSS_SPIKE = "loss spike"
GRADIENT_SPIKE = "gradient spike"
SKIPPED = "skipped steps"
ROLLBACK = "rollback"
_ADVICE: Mapping[str, str] = {
    DATA_WAIT: "The steps wait for their data; headway profile shows the waits.",
    RESTART: "The attempt has another machine, number of workers or config: headway runs show RUN.",
    OTHER_PROCESSES: "Other processes use the processors of the machine: move them away, or take fewer threads.",
    QUOTA: "The control group allows fewer processors than the run uses: ask for more, or take fewer threads.",
    VIRTUAL_MACHINES: "The hypervisor gives the processors to other virtual machines: take another machine.",
    HEAT: "A GPU is hot and slows itself down: check its cooling.",
    ROWS: "Only the rows of the step had a high loss: look at them with headway data preview.",
    UNSTABLE: "The loss did not come back at once: lower the learning rate, or let health.on_spike skip or roll back.",
    NOT_FINITE: "The loss or the gradient was not finite: see the log, and docs/health.md.",
    GPU_MEMORY: "Tensors are kept from step to step, often by a callback that keeps a loss without detaching it.",
    OWN_MEMORY: "Objects are kept from step to step, often by a callback or a model of your own.",
    UNKNOWN: "headway profile shows where the time of a step goes, headway doctor examines the machine.",
}
#: By kind, where no cause is known.
_FIRST_LOOK: Mapping[str, str] = {
    DATA_WAIT: "Put the token store on a faster disk, or prefetch more; headway profile shows the waits.",
    LOSS_SPIKE: "See how the loss goes on; headway data preview shows the rows of the step.",
    GRADIENT_SPIKE: "See whether the loss rises; if not, one such step needs nothing.",
    SKIPPED: "The log says why each update was skipped; docs/health.md explains it.",
    ROLLBACK: "headway ledger RUN has the reason, and the steps whose rows are skipped.",
}


@dataclass(frozen=True)
class Anomaly:
    """Something about a run that is not as usual."""

    kind: str
    cause: str
    """The suspected cause, one of a few."""
    text: str
    """What was seen, with numbers; part of a sentence."""

    @property
    def label(self) -> str:
        """Kind and cause in a few words."""
        return self.kind if self.cause == UNKNOWN else f"{self.kind}: {self.cause}"

    @property
    def advice(self) -> str:
        """What to do about the cause, or to learn it."""
        if self.cause == UNKNOWN and self.kind in _FIRST_LOOK:
            return _FIRST_LOOK[self.kind]
        return _ADVICE[self.cause]
