"""Replicas of a parameter: the workers that have the same part of it and compute its gradients from other tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from headway.core.startup.dtensors import is_dtensor
from headway.parallel.world import World


@dataclass(frozen=True)
class Replicas:
    """The workers whose gradients of a parameter are summed; equal groups compare equal."""

    group: dist.ProcessGroup | None
    """None for all workers."""
    rank: int
    """This worker's number in the group."""
    size: int

    def global_rank(self, rank: int) -> int:
        """Return the rank of a replica among all workers."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def replicas_of(p: torch.Tensor, world: World) -> Replicas:
    """Return the replicas of a parameter; those of sharded experts differ from those of other parameters."""
    if is_expert_shard(p, world):
        return Replicas(world.expert_replica_group, world.expert_replica_rank, replica_count(p, world))
    return Replicas(world.replica_group, world.replica_rank, replica_count(p, world))


def replica_count(p: torch.Tensor, world: World) -> int:
    """Return the number of replicas of a parameter."""
    return world.mesh.expert_replicas if is_expert_shard(p, world) else world.mesh.replicas


def is_expert_shard(p: torch.Tensor, world: World) -> bool:
    """Return whether a parameter is stacked by expert and this worker has its range (`parallel.experts`)."""
    return is_dtensor(p) and world.experts_axis_name("ep") in (p.device_mesh.mesh_dim_names or ())
