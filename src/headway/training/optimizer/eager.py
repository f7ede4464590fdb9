"""PyTorch's optimizers without its compiler.

Every optimizer of PyTorch loads `torch._dynamo` when it is made and when it steps, only to tell the compiler to keep
away. Where nothing is compiled, that is over a second of every start for nothing.
"""

from __future__ import annotations

import inspect
from typing import TypeVar, cast

import torch
from torch.optim import Optimizer

Kind = TypeVar("Kind", bound=Optimizer)

#: Methods that PyTorch keeps the compiler away from.
_KEPT_AWAY = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def keep_compiler_out() -> None:
    """Have the methods that all optimizers share run as they are.

    PyTorch looks for the variant that the compiler keeps away from in this attribute, and makes one if it is not there;
    should a later PyTorch look elsewhere, it makes one as ever.
    """
    for name in _KEPT_AWAY:
        method = inspect.unwrap(getattr(Optimizer, name))
        if not hasattr(method, "__dynamo_disable"):
            setattr(method, "__dynamo_disable", method)


def eager(kind: type[Kind]) -> type[Kind]:
    """The same optimizer, with a step that loads no compiler; its state and results are the same."""
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return cast("type[Kind]", type(kind.__name__, (kind,), {"step": step, "__doc__": kind.__doc__}))
