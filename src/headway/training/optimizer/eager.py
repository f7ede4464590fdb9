"""PyTorch's optimizers without its compiler.

Every optimizer of PyTorch loads `torch._dynamo` when it is made and when it steps, only to disable the compiler for it.
Where nothing is compiled, that costs over a second of every start in vain.
"""

from __future__ import annotations

import inspect
from typing import TypeVar, cast

import torch
from torch.optim import Optimizer

Kind = TypeVar("Kind", bound=Optimizer)

#: Methods for which PyTorch disables the compiler.
_WITHOUT_COMPILER = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def keep_compiler_out() -> None:
    """Run the methods that all optimizers share without their wrapper for the compiler.

    PyTorch looks for the variant without compiler in this attribute, and makes one if it is absent. If a later PyTorch
    looks elsewhere, it makes one as before.
    """
    for name in _WITHOUT_COMPILER:
        method = inspect.unwrap(getattr(Optimizer, name))
        if not hasattr(method, "__dynamo_disable"):
            setattr(method, "__dynamo_disable", method)


def eager(kind: type[Kind]) -> type[Kind]:
    """Return the optimizer class with a step that loads no compiler; its state and results do not change."""
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return cast("type[Kind]", type(kind.__name__, (kind,), {"step": step, "__doc__": kind.__doc__}))
