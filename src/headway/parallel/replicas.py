"""Who has the same part of a parameter as this worker, and computes gradients of it from other tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from headway.core.dtensors import is_dtensor
from headway.parallel.world import World


@dataclass(frozen=True)
class Replicas:
    """Workers whose gradients of a parameter are to be summed; equal ones compare equal."""

    group: dist.ProcessGroup | None
    """None for all workers."""
    rank: int
    """This worker's number among them."""
    size: int

    def global_rank(self, rank: int) -> int:
        """The number that one of them has among all workers."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def replicas_of(p: torch.Tensor, world: World) -> Replicas:
    """Those of one parameter: of experts that are dealt out they are others than of the rest."""
    if is_dealt_out(p, world):
        return Replicas(world.expert_replica_group, world.expert_replica_rank, replica_count(p, world))
    return Replicas(world.replica_group, world.replica_rank, replica_count(p, world))


def replica_count(p: torch.Tensor, world: World) -> int:
    """How many they are."""
    return world.mesh.expert_replicas if is_dealt_out(p, world) else world.mesh.replicas


def is_dealt_out(p: torch.Tensor, world: World) -> bool:
    """Whether a parameter is stacked by expert and this worker has its own run of it (`parallel.experts`)."""
    return is_dtensor(p) and world.experts_axis_name("ep") in (p.device_mesh.mesh_dim_names or ())
