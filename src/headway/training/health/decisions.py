"""Decisions about a step, made from its loss and its gradient norm before its update.

Both are equal on every worker, and the history that they are compared with is part of the checkpoint
(`TrainState.history`, where a decision may follow from it). So every worker decides alike, and a resumed run decides as
the first one did.

The history is an exponential mean and a mean absolute deviation of accepted steps: of the loss itself, and of the
logarithm of the norm, since norms vary by factors. Values beyond the limit count as the limit, so that one spike does
not make the next one look usual. What counts as a spike was measured (`benchmarks/telemetry/alarms.py`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headway.config.sections.health import HealthConfig
from headway.telemetry.anomalies import is_spike

Action = Literal["warn", "skip", "rollback", "stop"]

#: Standard deviations of a normal distribution in one mean absolute deviation.
_SIGMA = math.sqrt(math.pi / 2)

#: Smaller deviations count as this: 1 % of the loss, and 5 % of the norm.
_LOSS_FLOOR = 0.01
_NORM_FLOOR = 0.05
#: The mean of the loss is over this part of the window: over all of it, the loss of a young run is far below its mean,
#: and what rises stays unseen.
_LOSS_PART = 8


@dataclass(frozen=True)
class Decision:
    """A decision about a step; equal on every worker."""

    step: int
    """Counted from 0."""
    action: Action
    reason: str
    first_step: int
    """The first step whose update, or rows, the decision is about; `step` is the last one."""
    to_step: int | None = None
    """For a rollback: the step of the checkpoint that the run returns to."""
    quiet: bool = False
    """Whether the decision is harmless: it is recorded without a warning."""


@dataclass
class History:
    """Statistics of accepted steps, as integers: each value holds the bits of an fp32 number."""

    steps: int = 0
    """Number of accepted steps, at most the size of the window."""
    loss: int = 0
    loss_deviation: int = 0
    norm: int = 0
    """Mean of the norm's logarithm."""
    norm_deviation: int = 0


@dataclass(frozen=True)
class Judgement:
    """A comparison of a step with the history."""

    kind: Literal["good", "nonfinite", "spike"] = "good"
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


def judge(config: HealthConfig, history: History, loss: float, grad_norm: float) -> Judgement:
    """Compare a step with the history, without changing it."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        what = "loss" if not math.isfinite(loss) else "gradient"
        return Judgement("nonfinite", f"the {what} is not finite")
    if config.on_spike == "off" or history.steps < config.spike_window:
        return Judgement()
    reasons = []
    metrics = {}
    found = list(_deviations(history, loss, grad_norm))
    (_, _, loss_deviations), (_, _, norm_deviations) = found
    spike = is_spike(loss_deviations, norm_deviations, config.spike_deviations)
    for name, value, deviations in found:
        metrics[f"health/{name}_deviations"] = deviations
        if spike and deviations > config.spike_deviations:
            words = name.replace("_", " ")
            reasons.append(f"the {words} of {value:.4g} is {deviations:.1f} standard deviations above the usual")
    return Judgement("spike" if spike else "good", "; ".join(reasons), metrics)


def remember(config: HealthConfig, history: History, loss: float, grad_norm: float) -> None:
    """Add an accepted step to the history."""
    if config.on_spike == "off":
        return
    share = 1.0 / min(history.steps + 1, config.spike_window)
    full = history.steps >= config.spike_window
    loss_share = 1.0 / min(history.steps + 1, max(1, config.spike_window // _LOSS_PART))
    values = (
        ("loss", loss, _LOSS_FLOOR * abs(_float(history.loss)), loss_share),
        ("norm", _log(grad_norm), _NORM_FLOOR, share),
    )
    for name, value, floor, mean_share in values:
        usual = _float(getattr(history, name))
        deviation = _float(getattr(history, f"{name}_deviation"))
        if full:
            limit = config.spike_deviations * _SIGMA * max(deviation, floor)
            value = min(max(value, usual - limit), usual + limit)
        # The first value is its own mean, and deviates from nothing.
        away = abs(value - usual) if history.steps else 0.0
        setattr(history, name, _bits(usual + mean_share * (value - usual)))
        setattr(history, f"{name}_deviation", _bits(deviation + share * (away - deviation)))
    history.steps = min(history.steps + 1, config.spike_window)


def decide(config: HealthConfig, judgement: Judgement, step: int) -> Decision | None:
    """Return what the config wants done about a judged step; None if nothing."""
    if judgement.kind == "good":
        return None
    action = config.on_nonfinite if judgement.kind == "nonfinite" else config.on_spike
    assert action != "off", "no step is judged a spike then"
    first = max(0, step - config.leave_out_steps + 1) if action == "rollback" else step
    return Decision(step, action, judgement.reason, first)


def is_left_out(left_out: Sequence[tuple[int, int]], step: int) -> bool:
    """Return whether a step's rows are left out; a range is its first step and the one after its last."""
    return any(first <= step < last for first, last in left_out)


def _deviations(history: History, loss: float, grad_norm: float) -> Iterator[tuple[str, float, float]]:
    """Yield each name, its value, and the standard deviations by which it exceeds the usual."""
    usual = _float(history.loss)
    spread = _float(history.loss_deviation)
    yield "loss", loss, (loss - usual) / (_SIGMA * max(spread, _LOSS_FLOOR * abs(usual), 1e-12))
    usual = _float(history.norm)
    spread = _float(history.norm_deviation)
    yield "grad_norm", grad_norm, (_log(grad_norm) - usual) / (_SIGMA * max(spread, _NORM_FLOOR))


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", min(max(value, -3e38), 3e38)))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])
