"""The first steps of a process that trains: set itself up as its config says, and join the other workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headway.config import Config, MeshShape, find_strategy
from headway.core.machine.allocator import keep_freed_memory
from headway.parallel.world import World, open_world
from headway.run.session.network import apply_nccl_profile, assert_same_profile
from headway.training.setup.available import check_attention, check_available
from headway.training.setup.determinism import apply_determinism


@contextmanager
def join_workers(config: Config, mesh: MeshShape) -> Iterator[World]:
    """Join the workers of a mesh; all of them must call it.

    Raises:
        ConfigError: this machine lacks what the config needs, or another worker's network is set up differently.
    """
    apply_determinism(config.determinism)
    parallel = config.parallel
    profile = apply_nccl_profile(
        parallel.nccl_profile, config.train.device, config.determinism, topology=parallel.nccl_topology
    )
    with open_world(config.train.device, config.parallel.timeout_seconds, mesh) as world:
        keep_freed_memory(of_all_sizes=world.device.type == "cpu")
        assert_same_profile(world, profile)
        check_available(config.train, config.optimizer, find_strategy(config.parallel.strategy), world.device)
        check_attention(config.model.attention, config.train.precision, world.device)
        world.connect_groups()
        yield world
