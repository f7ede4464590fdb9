"""NCCL's settings for the workers of a run, chosen per machine before process groups exist."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

import torch

from headway.core.console import notice
from headway.core.coordination.launched import place_from_environment, world_size_from_environment
from headway.core.errors import ConfigError
from headway.core.machine.system import Machine
from headway.parallel.interconnect import read_interconnect
from headway.parallel.loopback import keep_to_loopback
from headway.parallel.nccl import PROFILES, Profile, choose_profile, with_topology
from headway.parallel.world import World, pick_device


def apply_nccl_profile(
    wanted: str,
    device: str,
    determinism: str,
    machine: Machine | None = None,
    environment: MutableMapping[str, str] | None = None,
    *,
    topology: str | None = None,
) -> Profile:
    """Set NCCL's variables where NCCL will be used: by several workers on GPUs.

    NCCL reads its variables when the first communicator is made. Variables that are already set do not change.

    Args:
        wanted: `parallel.nccl_profile`.
        device: `train.device`.
        determinism: The level that the run promises.
        machine: Examined instead of this one.
        environment: Changed instead of this process's.
        topology: `parallel.nccl_topology`.

    Raises:
        ConfigError: the requested profile does not fit the machine, or it has no such file.
    """
    environment = os.environ if environment is None else environment
    size = world_size_from_environment() or 1
    if size == 1:
        return Profile("none", "one worker")
    if pick_device(device, place_from_environment(size)[1]).type != "cuda":
        return Profile("none", "NCCL is for GPUs")
    keep_to_loopback(size, environment)  # the profile's interface serves other machines
    found = read_interconnect(machine or Machine())
    if not found.gpus:  # CUDA works without nvidia-smi, too
        found = replace(found, gpus=torch.cuda.device_count())
    profile = choose_profile(wanted, found, determinism)
    profile = with_topology(profile, topology, topology is not None and Path(topology).is_file())
    added = profile.environment(environment)
    environment.update(added)
    shown = " ".join(f"{name}={value}" for name, value in added.items())
    notice(f"NCCL profile {profile.name} ({profile.reason}){': ' + shown if shown else ''}")
    return profile


def assert_same_profile(world: World, profile: Profile) -> None:
    """Check that all machines use one profile: workers on different networks would wait for each other forever.

    Raises:
        ConfigError: the profiles differ.
    """
    names = [PROFILES[int(worker[0])] for worker in world.gather([float(PROFILES.index(profile.name))])]
    if len(set(names)) > 1:
        first = {name: names.index(name) for name in dict.fromkeys(names)}
        raise ConfigError(
            "machines of this run have different networks: "
            + ", ".join(f"worker {rank} has '{name}'" for name, rank in first.items()),
            where="parallel.nccl_profile",
            fix="name the one that all have, for example parallel.nccl_profile=ethernet; headway doctor shows each",
        )
