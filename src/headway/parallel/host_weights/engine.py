"""Strategies that keep bf16 weights on the device, and masters, moments and summed gradients in host memory.

Mixed precision with fp32 masters is that of Micikevicius et al. 2018, section 3.1; what is on which side is that of
ZeRO-Offload (Ren et al. 2021). A gradient leaves the device when the backward pass has computed it, and is added on
the host in the order of lanes and micro-batches. The device never has more gradients than those under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from headway.config import Config
from headway.config.derived.host_weights import host_types
from headway.core.types import Block
from headway.parallel.blocks import block_of, local_part
from headway.parallel.fsdp import FullyShardedDataParallel
from headway.parallel.host_weights.memory import open_host_memory
from headway.parallel.host_weights.overlap import OverlappedUpdate
from headway.parallel.host_weights.transfers import Transfers, pieces
from headway.parallel.host_weights.update import HostAdamW, HostPart
from headway.parallel.strategy import Single, Strategy
from headway.parallel.world import World
from headway.parallel.zero import Zero2


class _HostEngine:
    """The `Engine` of these strategies; the classes below say how gradients get here."""

    model: nn.Module

    def _keep_on_host(self, module: nn.Module, world: World, config: Config) -> None:
        self.model = module
        optimizer = config.optimizer
        types = host_types(config)
        self._adamw = HostAdamW(
            optimizer.betas, optimizer.eps, _DTYPES[types.masters], _DTYPES[types.moments], config.seed
        )
        self._transfers = Transfers(world.device)
        self._owns = cast("Strategy", self).owns_for_update
        mine = sum(local_part(p).numel() for p in module.parameters() if p.requires_grad and self._owns(p))
        self._memory = open_host_memory(config.run_directory, types, world, mine)
        self._parts: dict[torch.Tensor, HostPart] = {}
        self._values: dict[torch.Tensor, torch.Tensor] = {}
        self._before_change: Callable[[], None] = lambda: None

    def keep_first_value(self, p: nn.Parameter, value: torch.Tensor) -> None:
        """Take the first value of the master of a parameter that this worker updates.

        Args:
            value: This worker's part of it, fp32; it becomes the master itself if it is a tensor of its own in memory.
        """
        if p.requires_grad and p not in self._values and self._owns(p):
            self._values[p] = self._memory.hold(value.to(self._adamw.masters))

    @property
    def kept_in(self) -> Path | None:
        return self._memory.folder

    def before_change(self, wait: Callable[[], None]) -> None:
        self._before_change = wait

    def take_over(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        for name, p in self.model.named_parameters():
            if p not in group_of:
                continue
            here = block_of(p)
            master = self._values.pop(p, None)
            if master is None:
                master = self._memory.empty(here.local.shape, self._adamw.masters)
            total = torch.empty(master.shape)
            self._parts[p] = HostPart(here.local, master, total, group_of[p], name, here.offset, here.shape)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def norm_parts(self) -> list[float]:
        self._finish_update()
        self._transfers.finish_sums()
        return [sum(map(_square, (part.total for part in self._parts.values() if part.has_gradient)))]

    def update(self, scale: float) -> bool:
        self._change()
        divisor = torch.full((), 1 / scale, dtype=torch.float32)
        self._transfers.begin_weights()
        for part in self._parts.values():
            if not part.has_gradient:  # it counts as zero
                part.total.zero_()
        self._run(
            (p, partial(self._adamw.update, part, self._optimizer.state[p], divisor, self._transfers))
            for p, part in self._parts.items()
        )
        return True

    def skip(self) -> None:
        self._forget()

    def part_of(self, p: nn.Parameter) -> Block | None:
        self._finish_update()
        if not p.requires_grad:
            return block_of(p)
        part = self._parts.get(p)
        return None if part is None else Block(part.master, part.offset, part.shape, movable=True)

    def moments(self, p: nn.Parameter) -> Mapping[str, Block]:
        self._finish_update()
        part = self._parts.get(p)
        if part is None or not part.master.numel() or p not in self._optimizer.state:
            return {}
        state = self._optimizer.state[p]
        return {
            key: Block(moment, part.offset, part.shape, movable=True) if moment.ndim else Block.whole(moment)
            for key, moment in state.items()
        }

    @contextmanager
    def exposed(self) -> Iterator[None]:
        self._change()
        yield

    def loaded(self) -> None:
        self._transfers.begin_weights()
        for part in self._parts.values():
            master = part.master.view(-1)
            weight = part.weight.view(-1)
            for piece in pieces(master.numel()):
                self._transfers.send(weight[piece], master[piece])
        self._transfers.finish_weights()
        self._share()

    def _change(self) -> None:
        """Wait until masters and moments may change, and make moments if there are none."""
        self._finish_update()
        self._before_change()
        for p, part in self._parts.items():
            if p not in self._optimizer.state:
                self._optimizer.state[p] = self._adamw.first_moments(part, self._memory)

    def _run(self, updates: Iterable[tuple[torch.Tensor, Callable[[], None]]]) -> None:
        """Carry out the updates of parameters, so that the next forward pass has the new weights."""
        for _, update in updates:
            update()
        self._transfers.finish_weights()
        self._share()

    def _finish_update(self) -> None:
        """Wait for what `_run` has left to do in the background."""

    def _share(self) -> None:
        """Send updated weights to other workers that have them."""

    def _forget(self) -> None:
        """Discard the gradients of a step."""
        self._transfers.finish_sums()
        for part in self._parts.values():
            part.has_gradient = False

    def _take(self, p: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a gradient on the device to the sum in host memory."""
        part = self._parts[p]
        self._transfers.add(part.total, gradient, is_first=not part.has_gradient)
        part.has_gradient = True


class HostWeights(_HostEngine, Single):
    """One worker. On a GPU layers are updated while the next forward pass computes those before them.

    Callbacks of the user may read weights between steps: then the update is over before they are called.
    """

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        super().__init__(module, world, config)
        self._keep_on_host(module, world, config)
        self._leaving = _Leaving(self._take)
        overlaps = world.device.type == "cuda" and not config.callbacks
        self._overlapped = OverlappedUpdate(module, self._transfers) if overlaps else None

    def take_over(self, optimizer: Optimizer) -> None:
        super().take_over(optimizer)
        self._leaving.watch(self._parts)

    def begin(self) -> None:
        super().begin()
        self._forget()

    @contextmanager
    def micro_batch(self, last_of_lane: bool, last: bool) -> Iterator[None]:
        with self._leaving:
            yield

    def _run(self, updates: Iterable[tuple[torch.Tensor, Callable[[], None]]]) -> None:
        if self._overlapped is None:
            super()._run(updates)
        else:
            self._overlapped.start(updates)

    def _take(self, p: torch.Tensor, gradient: torch.Tensor) -> None:
        self._finish_update()  # of layers that the forward pass has left out
        super()._take(p, gradient)

    def _finish_update(self) -> None:
        if self._overlapped is not None:
            self._overlapped.finish()

    def reduce(self) -> None:
        pass


class HostWeightsByOwner(_HostEngine, Zero2):
    """ZeRO stage 2: each micro-batch's gradients are summed over workers in fp32, and only their owner keeps them."""

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        super().__init__(module, world, config)
        self._keep_on_host(module, world, config)

    def begin(self) -> None:
        super().begin()
        self._forget()

    def reduce(self) -> None:
        self._buffers.check()

    def _pack(self, bucket: Sequence[nn.Parameter]) -> torch.Tensor:
        return super()._pack(bucket).float()

    def _keep(self, p: nn.Parameter, gradient: torch.Tensor) -> None:
        self._take(p, gradient)

    def _share(self) -> None:
        Zero2.after_update(self)


class HostWeightsInShards(_HostEngine, FullyShardedDataParallel):
    """ZeRO stage 3: each micro-batch's gradients are summed over workers in fp32, and every worker keeps its shards."""

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        each_micro_batch = {"parallel": config.parallel.model_copy(update={"reduce_every": "micro_batch"})}
        super().__init__(module, world, config.model_copy(update=each_micro_batch))
        self._keep_on_host(module, world, config)
        self._leaving = _Leaving(self._take)

    def take_over(self, optimizer: Optimizer) -> None:
        super().take_over(optimizer)
        self._leaving.watch(self._parts)

    def begin(self) -> None:
        super().begin()
        self._forget()

    @contextmanager
    def micro_batch(self, last_of_lane: bool, last: bool) -> Iterator[None]:
        with super().micro_batch(last_of_lane, last), self._leaving:
            yield

    def reduce(self) -> None:
        self._buffers.check()


class _Leaving:
    """Hooks by which each gradient leaves the device as soon as a backward pass within the block has computed it.

    Args:
        take: (parameter, local gradient) -> None; afterwards the parameter has no gradient.
    """

    def __init__(self, take: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._take = take
        self._is_open = False  # the hooks outlive the strategy: another run may train the parameters later

    def watch(self, parameters: Mapping[torch.Tensor, Any]) -> None:
        """Add the hooks."""
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._computed)

    def __enter__(self) -> None:
        self._is_open = True

    def __exit__(self, *_: object) -> None:
        self._is_open = False

    def _computed(self, p: torch.Tensor) -> None:
        if self._is_open and p.grad is not None:
            self._take(p, local_part(p.grad))
            p.grad = None


#: Types by their names in the config.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _square(total: torch.Tensor) -> float:
    """Return the sum of squares: of each piece in fp32, of the pieces in fp64."""
    flat = total.view(-1)
    return sum(float(torch.linalg.vector_norm(flat[piece])) ** 2 for piece in pieces(flat.numel()))
