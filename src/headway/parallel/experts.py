"""Expert parallelism: the experts of a mixture are dealt out to workers, to which tokens travel and come back.

Lepikhin et al. 2020 ("GShard"), section 3.2. The workers that share experts are neighbours which have tokens of their
own anyway: they share the data, or the positions of rows (by context parallelism, or between the matrices that tensor
parallelism cuts). Matrices of experts stay whole. So the gradient of an expert is complete for the tokens of all those
workers where the expert is, and is summed over the workers that have the same experts; of all other weights nothing
changes. A model declares which of its parameters are stacked by expert; this only applies it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from headway.core.errors import ConfigError
from headway.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def shard_experts(module: nn.Module, world: World) -> None:
    """Leave each worker its run of the experts, cut from all of them, which every worker has.

    Args:
        module: Declares by `expert_units()` the modules whose parameters are all stacked by expert, along the first
            dimension (none if only other pipeline stages have any, None if the whole model has none), and takes by
            `share_experts(workers, row_sharers)` the group that shares them and the group that shares rows, each None
            where there is nobody to share with.

    Raises:
        ConfigError: the module declares no experts, or not as many as could be dealt out evenly.
    """
    mesh = world.mesh
    if mesh.ep == mesh.cp == mesh.tp == 1:
        return
    units = expert_units(module)
    if units is None:
        if mesh.ep > 1:
            raise ConfigError(
                f"{type(module).__name__} declares no experts that workers could share",
                where="parallel.expert",
                fix="parallel.expert=1, or give the module methods expert_units and share_experts",
            )
        return
    # Where tensor parallelism cuts the rest, experts are of another kind than that also if every worker has them all.
    axis = world.experts_axis("ep") if mesh.ep > 1 or mesh.tp > 1 else None
    # Groups are made by all workers together, also by those of a stage that has no experts to use them for.
    workers, row_sharers, _ = axis and axis.get_group(), world.row_group, axis and world.expert_replica_group
    module.share_experts(workers if mesh.ep > 1 else None, row_sharers)  # type: ignore[operator]
    if axis is not None:
        for unit in units:
            _keep_own(unit, axis)


def expert_units(module: nn.Module) -> list[nn.Module] | None:
    """The modules whose parameters are all stacked by expert; None if the model has no experts, or does not say."""
    declared = getattr(module, "expert_units", None)
    units: list[nn.Module] | None = None if declared is None else declared()
    return units


def _keep_own(unit: nn.Module, axis: DeviceMesh) -> None:
    for child in unit.modules():
        for name, p in list(child.named_parameters(recurse=False)):
            setattr(child, name, nn.Parameter(_part(p.detach(), axis), requires_grad=p.requires_grad))


def _part(whole: torch.Tensor, axis: DeviceMesh) -> DTensor:
    experts, workers = whole.shape[0], axis.size()
    if experts % workers:
        raise ConfigError(
            f"{experts} experts cannot be shared evenly by {workers} workers",
            where="parallel.expert",
            fix="parallel.expert=1, or a number that divides theirs",
        )
    from torch.distributed.tensor import DTensor, Shard

    mine = whole.chunk(workers)[axis.get_local_rank()].clone()
    return DTensor.from_local(mine, axis, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
