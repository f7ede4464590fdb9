"""Fully sharded data parallelism (ZeRO stage 3) through PyTorch's `fully_shard`, in one level or two.

Zhao et al. 2023 ("PyTorch FSDP"), sections 3 and 4. Weights, gradients and moments are sharded along their first
dimension; each unit of the model is gathered for its forward and backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from headway.config import Config
from headway.core.model_protocol import HasOutputProjection, HasProductParameters, Shardable
from headway.parallel.blocks import is_first_of_equals, local_part
from headway.parallel.buffers import BufferWatch
from headway.parallel.collectives import reduce_scatter
from headway.parallel.experts import expert_units
from headway.parallel.replicas import is_expert_shard
from headway.parallel.tree import LaneAccumulator, tree_all_reduce_, tree_reduce_scatter
from headway.parallel.world import World

#: Dtype of matrix products under autocast, by `train.precision`. fp8 layers cast their weights themselves.
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: For these dtypes PyTorch lets the collective, which is replaced here, turn the sum into a mean. It divides gradients
#: of other dtypes itself, before and after.
_DIVIDED_BY_COLLECTIVES = (torch.float32, torch.bfloat16)


class FullyShardedDataParallel:
    """Shards over `dp_shard` workers; these groups hold replicas of each other (`dp_replicate`)."""

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        self._module = module
        self._world = world
        self._elastic = config.determinism == "elastic"
        gradients = sum(local_part(p).nbytes for p in module.parameters() if p.requires_grad)
        self._each_micro_batch = config.parallel.reduces_each_micro_batch(gradients)
        self._last = _LastLane()
        self._buffers = BufferWatch(module)
        self._copies = world.device_mesh["dp_replicate"].get_group() if world.mesh.dp_replicate > 1 else None
        units = wrap_units(module)
        experts = _sharded_experts(module, world)
        self._uncut: list[nn.Parameter] = []
        if experts and world.experts_axis("expert_shard").size() == 1:
            # No other worker has these experts. PyTorch would gather them anyway, and omit the sum.
            self._uncut = [p for unit in experts for p in unit.parameters()]
            experts = []
        for p in module.parameters():
            p.data = p.data.contiguous()  # fully_shard requires it
        half = _HALF.get(config.train.precision)
        reshard = config.parallel.reshard_after_forward
        _shard(
            module,
            world,
            units=units,
            experts=experts,
            uncut=self._uncut,
            offloads=config.optimizer.offload,
            reshard=reshard,
            half=half,
            sums_in_fp32=config.train.weights != "fp32",
        )
        assert isinstance(module, FSDPModule)
        self._root = module
        self._units = [unit for unit in units if isinstance(unit, FSDPModule) and unit is not module]
        self._all = [*(unit for unit in experts if isinstance(unit, FSDPModule)), *self._units, self._root]
        for unit in self._all:
            unit.set_custom_reduce_scatter(_Sum(self._elastic, self._last, self._copies))
            _count_unused_as_zero(unit)
            if any(p.dtype not in _DIVIDED_BY_COLLECTIVES for p in unit.parameters()):
                unit.set_gradient_divide_factor(1.0)
        _prefetch(self._root, self._units, config.parallel.prefetch)
        module.register_forward_hook(self._after_forward)

    def _after_forward(self, *_: Any) -> None:
        # Without a backward pass, units that stay gathered for it would never be resharded.
        if not torch.is_grad_enabled():
            for unit in self._all:
                unit.reshard()

    def owns_for_update(self, p: torch.Tensor) -> bool:
        return True

    def owns_for_norm(self, p: torch.Tensor) -> bool:
        return self._world.mesh.coordinates(self._world.rank)["dp_replicate"] == 0 and is_first_of_equals(
            p, self._world
        )

    def begin(self) -> None:
        self._module.zero_grad(set_to_none=True)
        self._buffers.begin()

    @contextmanager
    def micro_batch(self, last_of_lane: bool, last: bool) -> Iterator[None]:
        self._last.yes = last
        # Between sums whole gradients accumulate locally: no communication, but memory for all gradients.
        sums = last_of_lane if self._elastic else last or self._each_micro_batch
        self._root.set_requires_gradient_sync(sums)
        self._root.set_is_last_backward(sums)  # afterwards the buffer of the last gradients is freed
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


def _sharded_experts(module: nn.Module, world: World) -> list[nn.Module]:
    """Return the modules with experts of which this worker has only its range."""
    units = expert_units(module) or ()
    return [unit for unit in units if any(is_expert_shard(p, world) for p in unit.parameters())]


def _shard(
    module: nn.Module,
    world: World,
    *,
    units: Sequence[nn.Module],
    experts: Sequence[nn.Module],
    uncut: Iterable[nn.Parameter],
    offloads: bool,
    reshard: bool | int,
    half: torch.dtype | None,
    sums_in_fp32: bool,
) -> None:
    """Shard every unit, then the remaining parameters as the root.

    Expert-parallel experts are sharded over the workers that have the same ones; parameters in `uncut` are not sharded.
    The root stays gathered from the beginning of a forward pass to the end of its backward pass: its parameters are the
    first and the last to be used in both. Under autocast, parameters that are declared to be used in matrix products
    only (`HasProductParameters`) travel and are gathered in half precision, as autocast would cast them. All other
    parameters of a unit, mostly norms, are small and join the root in fp32.

    Gradients are summed in the type of their weights, or in fp32 where weights are in 16 bits.
    """
    # With offload, shards, their gradients and moments are in host memory; only gathered units are on the device.
    pinned = world.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if offloads else OffloadPolicy()
    axis = world.weights_axis("dp_shard")
    axes = dict.fromkeys(experts, world.experts_axis("expert_shard") if experts else axis)

    def shard(unit: nn.Module, ignored: Iterable[nn.Parameter] = (), **options: Any) -> None:
        if sums_in_fp32:
            options.setdefault("mp_policy", MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False))
        fully_shard(
            unit,
            mesh=axes.get(unit, axis),
            offload_policy=offload,
            ignored_params={*ignored, *uncut},
            **options,
        )

    if half is None or not isinstance(module, HasProductParameters):
        for unit in (*experts, *units):
            shard(unit, reshard_after_forward=reshard)
        shard(module, reshard_after_forward=False)
        return
    products = set(module.product_parameters())
    shard(module, products, reshard_after_forward=False)
    # Gradients are summed in fp32, also over micro-batches.
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in (*experts, *units):
        others = [p for p in unit.parameters() if p not in products]
        shard(unit, others, reshard_after_forward=reshard, mp_policy=policy)


def _prefetch(root: FSDPModule, units: Sequence[FSDPModule], ahead: int | None) -> None:
    """Start to gather units `ahead` units before they are used.

    None keeps PyTorch's default: one unit, and in the forward pass only where kernels are queued ahead.
    """
    if ahead is None:
        return
    backwards = list(reversed(units))
    root.set_modules_to_forward_prefetch(list(units[:ahead]))
    root.set_modules_to_backward_prefetch(backwards[:ahead])
    for index, (forward, backward) in enumerate(zip(units, backwards, strict=True), start=1):
        forward.set_modules_to_forward_prefetch(list(units[index : index + ahead]))
        backward.set_modules_to_backward_prefetch(backwards[index : index + ahead])


def _count_unused_as_zero(unit: FSDPModule) -> None:
    """Make a unit sum the gradients of all its parameters whenever it sums any.

    PyTorch packs only existing gradients. If workers used different parameters of a unit (experts, for example), the
    sums would not match, and kept lanes would wait for a gradient that never comes. (Its own fix,
    `set_reduce_scatter_unused_params`, comes with torch 2.13.)
    """
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in filter(None, groups):
        group.post_backward = partial(_with_zeros, group, group.post_backward)


def _with_zeros(group: Any, post_backward: Callable[..., None], *arguments: Any) -> None:
    for parameter in group.fsdp_params if group.reduce_grads else ():
        whole = getattr(parameter, "_unsharded_param", None)  # missing before its first use
        if whole is None or not whole.requires_grad:
            continue
        if whole.grad is None and parameter.unsharded_accumulated_grad is None:
            whole.grad = torch.zeros_like(whole)
    post_backward(*arguments)


class _LastLane:
    """Whether the current lane is the last one of the step."""

    yes = False


class _Sum(ReduceScatter):
    """Sums one unit's gradients over workers and leaves each worker its shard.

    In `elastic` runs lanes and workers are summed in the fixed tree. Workers compute neighbouring lanes at the same
    time (`LaneGrid.interleaved`). Their sum is a subtree, whose shards are summed with those of the other subtrees, so
    no sum of lanes is ever whole.
    """

    def __init__(self, elastic: bool, last: _LastLane, copies: dist.ProcessGroup | None) -> None:
        self._lanes = LaneAccumulator() if elastic else None
        self._last = last
        self._copies = copies

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
            reduce_scatter(output_tensor, input_tensor, group=group)
            if self._copies is not None:
                dist.all_reduce(output_tensor, group=self._copies)
            return None
        tree_reduce_scatter(output_tensor, input_tensor, group)
        if self._copies is not None:
            tree_all_reduce_(output_tensor, self._copies)
        self._lanes.add(output_tensor)
        # A shard contributes only once all lanes are summed.
        if self._last.yes:
            output_tensor.copy_(self._lanes.take())
        else:
            output_tensor.zero_()
        return None


def wrap_units(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that are gathered one at a time.

    Where a model does not declare them (`Shardable`), they are the children of its outermost module lists; where those
    hold less than half of the parameters, parts of at most an eighth of them.
    """
    if isinstance(module, Shardable):
        return list(module.wrap_units())
    units = [unit for unit in _listed(module) if _size(unit)]
    whole = _size(module)
    if 2 * sum(map(_size, units)) >= whole:
        return units
    uses = Counter(p for part in module.modules() for p in part.parameters(recurse=False))
    if isinstance(module, HasOutputProjection):
        # The loss may use it outside of its module, when only the root is gathered.
        uses.update(p for p in (module.output_projection(),) if isinstance(p, nn.Parameter))
    return [unit for unit in _parts(module, whole / 8) if all(uses[p] == 1 for p in unit.parameters())]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost module lists."""
    for child in module.children():
        yield from child.children() if isinstance(child, (nn.ModuleList, nn.Sequential)) else _listed(child)


def _parts(module: nn.Module, most: float) -> Iterator[nn.Module]:
    """Yield modules of a model with at most so many parameters, as large as possible, and larger ones without parts."""
    for child in module.children():
        if _size(child) > most and any(map(_size, child.children())):
            yield from _parts(child, most)
        elif _size(child):
            yield child


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
