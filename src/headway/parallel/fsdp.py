"""Fully sharded data parallelism (ZeRO stage 3) through PyTorch's `fully_shard`, in one level or two.

Zhao et al. 2023 ("PyTorch FSDP"), sections 3 and 4. Weights, gradients and moments are cut along their first dimension;
each unit of the model is brought together for its forward and backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from headway.parallel.blocks import is_first_of_equals, local_part
from headway.parallel.buffers import BufferWatch
from headway.parallel.experts import expert_units
from headway.parallel.replicas import is_dealt_out
from headway.parallel.tree import LaneAccumulator, tree_all_reduce_, tree_reduce_scatter
from headway.parallel.world import World

if TYPE_CHECKING:
    from headway.config import Config


class FullyShardedDataParallel:
    """Shards within `dp_shard` workers, whose groups (`dp_replicate`) hold copies of each other."""

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        self._module, self._world = module, world
        self._elastic = config.determinism == "elastic"
        self._last = _LastLane()
        self._buffers = BufferWatch(module)
        shards = world.weights_axis("dp_shard")
        copies = world.device_mesh["dp_replicate"] if world.mesh.dp_replicate > 1 else None
        dealt_out = [
            unit for unit in expert_units(module) or () if any(is_dealt_out(p, world) for p in unit.parameters())
        ]
        self._uncut: list[nn.Parameter] = []
        # Shards, their gradients and moments in host memory: on the device is what is whole at the moment.
        pinned = world.device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pinned) if config.optimizer.offload else OffloadPolicy()
        reshard = config.parallel.reshard_after_forward
        self._copies = copies.get_group() if copies else None
        if dealt_out and world.experts_axis("expert_shard").size() == 1:
            # Nobody shares these experts. PyTorch would bring them together all the same, and leave out the sum.
            self._uncut = [p for unit in dealt_out for p in unit.parameters()]
            dealt_out = []
        units = [*dealt_out, *wrap_units(module), module]
        for unit in units:
            axis = world.experts_axis("expert_shard") if unit in dealt_out else shards
            fully_shard(
                unit,
                mesh=axis,
                reshard_after_forward=reshard,
                offload_policy=offload,
                ignored_params=set(self._uncut),
            )
        self._units = [unit for unit in units if isinstance(unit, FSDPModule)]
        for unit in self._units:
            unit.set_custom_reduce_scatter(_Sum(self._elastic, self._last, self._copies))
        assert isinstance(module, FSDPModule)
        self._root = module

    def updates(self, p: torch.Tensor) -> bool:
        return True

    def counts(self, p: torch.Tensor) -> bool:
        return self._world.mesh.coordinates(self._world.rank)["dp_replicate"] == 0 and is_first_of_equals(
            p, self._world
        )

    def begin(self) -> None:
        self._module.zero_grad(set_to_none=True)
        self._buffers.begin()

    @contextmanager
    def micro_batch(self, last_of_lane: bool, last: bool) -> Iterator[None]:
        self._last.yes = last
        # In between gradients add up where they are, whole: no communication, for the memory of all of them.
        self._root.set_requires_gradient_sync(last or (last_of_lane and self._elastic))
        self._root.set_is_last_backward(last)
        yield

    def end_lane(self) -> None:
        pass

    def reduce(self) -> None:
        self._buffers.check()
        for p in self._module.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        if self._copies is not None:
            for p in self._uncut:
                assert p.grad is not None
                dist.all_reduce(local_part(p.grad), group=self._copies)

    def after_update(self) -> None:
        pass


class _LastLane:
    """Whether the lane under way is the last one of the step."""

    yes = False


class _Sum(ReduceScatter):
    """Sums one unit's gradients over workers and leaves each its shard.

    Of `elastic` runs, lanes and workers are summed in the fixed tree. A lane that is not the last is kept, whole, and
    adds nothing to the shard yet.
    """

    def __init__(self, elastic: bool, last: _LastLane, copies: dist.ProcessGroup | None) -> None:
        self._lanes = LaneAccumulator() if elastic else None
        self._last, self._copies = last, copies

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._lanes is None:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group)
            if self._copies is not None:
                dist.all_reduce(output_tensor, group=self._copies)
            return None
        self._lanes.add(input_tensor)
        if not self._last.yes:
            output_tensor.zero_()
            return None
        tree_reduce_scatter(output_tensor, self._lanes.take(), group)
        if self._copies is not None:
            tree_all_reduce_(output_tensor, self._copies)
        return None


def wrap_units(module: nn.Module) -> list[nn.Module]:
    """The parts of a model that are brought together one at a time.

    A model names them by a method `wrap_units`; without one they are the children of its lists of modules that no other
    list contains.
    """
    declared = getattr(module, "wrap_units", None)
    if declared is not None:
        return list(declared())
    units: list[nn.Module] = []
    for child in module.children():
        units += list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else wrap_units(child)
    return [unit for unit in units if any(p.requires_grad for p in unit.parameters())]
