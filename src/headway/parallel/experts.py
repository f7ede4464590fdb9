"""Expert parallelism: workers share the experts of a mixture, and tokens travel to the experts and back.

Lepikhin et al. 2020 ("GShard"), section 3.2. The workers that share experts are neighbours with different tokens: they
are data-parallel, or they share rows (context parallelism, or tensor parallelism between the matrices that it cuts).
Expert matrices stay whole. The gradient of an expert is therefore complete for the tokens of all those workers, and is
summed over the workers that have the same experts. All other weights are unaffected. A model declares which of its
parameters are stacked by expert; this module applies the declaration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from headway.core.errors import ConfigError
from headway.core.model_protocol import HasExperts
from headway.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def shard_experts(module: nn.Module, world: World) -> None:
    """Reduce each worker to its range of the experts; every worker begins with all of them.

    Args:
        module: A model with experts declares `HasExperts`.

    Raises:
        ConfigError: the module declares no experts, or they cannot be divided evenly.
    """
    mesh = world.mesh
    if mesh.ep == mesh.cp == mesh.tp == 1:
        return
    units = expert_units(module)
    if units is None or not isinstance(module, HasExperts):
        if mesh.ep > 1:
            raise ConfigError(
                f"{type(module).__name__} declares no experts that workers could share",
                where="parallel.expert",
                fix="parallel.expert=1, or give the module methods expert_units and share_experts",
            )
        return
    # Under tensor parallelism experts need a mesh of their own even if every worker has all of them.
    axis = world.experts_axis("ep") if mesh.ep > 1 or mesh.tp > 1 else None
    # All workers create groups together, including those of a stage without experts.
    workers = None if axis is None else axis.get_group()
    row_sharers = world.row_group
    _ = axis and world.expert_replica_group
    module.share_experts(workers if mesh.ep > 1 else None, row_sharers)
    if axis is not None:
        for unit in units:
            for child in unit.modules():
                for name, p in list(child.named_parameters(recurse=False)):
                    setattr(child, name, nn.Parameter(_part(p.detach(), axis), requires_grad=p.requires_grad))


def expert_units(module: nn.Module) -> Sequence[nn.Module] | None:
    """Return the modules whose parameters are all stacked by expert; None if the model declares none."""
    return module.expert_units() if isinstance(module, HasExperts) else None


def _part(whole: torch.Tensor, axis: DeviceMesh) -> DTensor:
    experts = whole.shape[0]
    workers = axis.size()
    if experts % workers:
        raise ConfigError(
            f"{experts} experts cannot be shared evenly by {workers} workers",
            where="parallel.expert",
            fix="parallel.expert=1, or a divisor of the number of experts",
        )
    from torch.distributed.tensor import DTensor, Shard

    mine = whole.chunk(workers)[axis.get_local_rank()].clone()
    return DTensor.from_local(mine, axis, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
