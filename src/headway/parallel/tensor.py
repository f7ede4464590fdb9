"""Tensor parallelism: neighbours share every matrix, and the positions of activations between layers.

Shoeybi et al. 2019 ("Megatron-LM"), section 3, for the matrices; Korthikanti et al. 2022, section 4.2.2, for the
positions (sequence parallelism). A model declares how it may be sharded; this module applies the declaration.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from headway.core.errors import ConfigError
from headway.core.model_protocol import TensorParallelizable
from headway.core.startup.dtensors import is_dtensor
from headway.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ParallelStyle


def cut_matrices(module: nn.Module, world: World) -> None:
    """Replace every parameter by this worker's shard of the whole parameter, which every worker has.

    Args:
        module: It declares its cuts as a `TensorParallelizable`.

    Raises:
        ConfigError: the module does not declare how it may be sharded, or not for this number of workers.
    """
    plan = plan_of(module, world.mesh.tp)
    from torch.distributed.tensor.parallel import parallelize_module

    # Shard this worker's own copy instead of broadcasting rank 0's.
    parallelize_module(module, world.weights_axis("tp"), plan, src_data_rank=None)
    for name, p in module.named_parameters():
        if not is_dtensor(p):
            raise ConfigError(
                f"tensor_plan of {type(module).__name__} leaves out '{name}'; the gradient norm would count it more"
                " than once",
                where="parallel.tensor",
                fix="give it a style; SequenceParallel() keeps it whole",
            )
        if p.requires_grad:
            p.register_hook(partial(_as_cut, p))


def plan_of(module: nn.Module, workers: int) -> dict[str, ParallelStyle]:
    """Return how a module says that workers share its matrices.

    Raises:
        ConfigError: the module does not declare how it may be sharded, or not for this number of workers.
    """
    if isinstance(module, TensorParallelizable):
        return module.tensor_plan(workers)
    named = type(getattr(module, "causal", module)).__name__
    raise ConfigError(
        f"{named} does not declare how workers may share its matrices",
        where="parallel.tensor",
        fix="parallel.tensor=1, or give the module a method tensor_plan",
    )


def _as_cut(p: DTensor, gradient: torch.Tensor) -> torch.Tensor:
    """Shard a gradient like its parameter.

    The gradient of a replicated parameter is a partial sum over each worker's own positions.
    """
    assert is_dtensor(gradient)
    return gradient if gradient.placements == p.placements else gradient.redistribute(placements=p.placements)
