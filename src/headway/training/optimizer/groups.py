"""Groups of parameters that a task of the user's own makes: a rate, a decay, a limit of the norm or an optimizer of
their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from headway.config.optimizers import find_optimizer
from headway.core.errors import ConfigError

#: (model) -> groups, as PyTorch's optimizers take them.
MakeGroups = Callable[[nn.Module], Sequence[Mapping[str, Any]]]
_KEYS = ("params", "lr_scale", "weight_decay", "max_grad_norm", "optimizer")


@dataclass(frozen=True)
class OwnGroup:
    """What the parameters of a group have of their own; None is what the config says."""

    number: int
    """From 1; 0 stands for the parameters in no group."""
    lr_scale: float = 1.0
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    """Clips the gradients of the group by their own norm."""
    optimizer: str | None = None


def own_groups(model: nn.Module, make: MakeGroups) -> dict[str, OwnGroup]:
    """Return the groups of a model's trainable parameters, by the names of the parameters.

    Call it before a strategy replaces parameters by shards.

    Raises:
        ConfigError: a group has no parameters of the model, another key, a wrong value, or those of another group.
    """
    names = {p: name for name, p in model.named_parameters()}
    found: dict[str, OwnGroup] = {}
    for number, given in enumerate(make(model), 1):
        unknown = [key for key in given if key not in _KEYS]
        if unknown:
            raise _unfit(number, f"has the key {unknown[0]}", f"keys are {', '.join(_KEYS)}")
        for key in ("lr_scale", "weight_decay", "max_grad_norm"):
            value = given.get(key)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise _unfit(number, f"has {key} {value!r}", "give a number that is not negative")
        if given.get("optimizer") is not None:
            find_optimizer(str(given["optimizer"]))
        group = OwnGroup(
            number, **{key: value for key, value in given.items() if key != "params" and value is not None}
        )
        for p in _parameters(number, given):
            if p not in names:
                raise _unfit(number, "has a parameter that is not the model's", "take them from the model that it gets")
            if names[p] in found:
                other = found[names[p]].number
                raise _unfit(number, f"and group {other} both have {names[p]}", "put a parameter into one group")
            found[names[p]] = group
    return found


def limits_of(groups: Mapping[str, OwnGroup]) -> tuple[float | None, ...]:
    """Return the limits of norms by number of group, the first for parameters in no group; none if none has its own."""
    own = {group.number: group.max_grad_norm for group in groups.values()}
    if all(limit is None for limit in own.values()):
        return ()
    return (None, *(own.get(number) for number in range(1, max(own) + 1)))


def _parameters(number: int, given: Mapping[str, Any]) -> list[nn.Parameter]:
    params = given.get("params")
    chosen = [params] if isinstance(params, nn.Parameter) else list(params or ())
    if not chosen:
        raise _unfit(number, "has no parameters", 'give {"params": module.parameters(), ...}')
    return [p for p in chosen if p.requires_grad]


def _unfit(number: int, what: str, fix: str) -> ConfigError:
    return ConfigError(f"group {number} of parameters {what}", where="task: parameter_groups", fix=fix)
