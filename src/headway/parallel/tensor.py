"""Tensor parallelism: every matrix is cut between neighbours, and so are the positions of activations between layers.

Shoeybi et al. 2019 ("Megatron-LM"), section 3, for the matrices; Korthikanti et al. 2022, section 4.2.2, for the
positions (sequence parallelism). A model declares how it may be cut; this only applies it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from headway.core.dtensors import is_dtensor
from headway.core.errors import ConfigError
from headway.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def cut_matrices(module: nn.Module, world: World) -> None:
    """Replace every parameter by this worker's part of it, cut from the whole one that every worker has.

    Args:
        module: Declares by `tensor_plan(workers)` a style for each of its parts (`parallelize_module`); together they
            have all parameters. The method raises `ConfigError` where the parts would not be equal.

    Raises:
        ConfigError: the module does not declare how it may be cut, or not for so many workers.
    """
    declared = getattr(module, "tensor_plan", None)
    if declared is None:
        raise ConfigError(
            f"{type(module).__name__} does not say how its matrices may be cut between workers",
            where="parallel.tensor",
            fix="parallel.tensor=1, or give the module a method tensor_plan",
        )
    from torch.distributed.tensor.parallel import parallelize_module

    # Cut from this worker's own copy: no worker draws first weights of its own for a part.
    parallelize_module(module, world.weights_axis("tp"), declared(world.mesh.tp), src_data_rank=None)
    for name, p in module.named_parameters():
        if not is_dtensor(p):
            raise ConfigError(
                f"tensor_plan of {type(module).__name__} leaves out '{name}'; a gradient norm over parts and wholes"
                " would count it more than once",
                where="parallel.tensor",
                fix="give it a style, SequenceParallel() where it is to stay whole",
            )
        if p.requires_grad:
            p.register_hook(partial(_as_cut, p))


def _as_cut(p: DTensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient cut as its parameter is: of one that each worker has whole, each has summed its own positions."""
    assert is_dtensor(gradient)
    return gradient if gradient.placements == p.placements else gradient.redistribute(placements=p.placements)
