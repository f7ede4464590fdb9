"""ZeRO stages 1 to 3 by DeepSpeed (Rajbhandari et al. 2020), with Headway's loop, data and checkpoints.

DeepSpeed sums gradients, updates weights and, in stage 3, gathers them. Headway still decides the items of a step, the
learning rate, skipped steps, clipping, and the content of checkpoints.

DeepSpeed averages each worker's sum over items across workers. The mean over items and the clipping form one factor,
which is passed to DeepSpeed as a loss scale to be removed. No worker therefore needs to know in advance how many items
the others have.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from headway.config import Config
from headway.config.derived.deepspeed import engine_settings
from headway.config.strategies import simplest_strategy
from headway.core.errors import ConfigError, needing
from headway.core.model_protocol import HasOutputProjection
from headway.core.process.exit import keep_gloo_threads
from headway.core.types import Block
from headway.parallel.buffers import BufferWatch
from headway.parallel.loopback import keep_to_loopback
from headway.parallel.norms import norm_parts_of
from headway.parallel.world import World


class DeepSpeed:
    """A strategy whose update is DeepSpeed's, which makes it an `Engine` too."""

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        self._module = module
        self._world = world
        self.model = module
        own = simplest_strategy(lambda spec: spec.shards_gradients)
        for name, p in module.named_parameters():
            if p.ndim == 0:
                raise ConfigError(
                    "DeepSpeed cannot hold a parameter without dimensions",
                    where=f"parameter '{name}'",
                    fix=f"give it the shape (1,), or use a native strategy: parallel.strategy={own}",
                )
        self._settings = engine_settings(config, world.mesh.data)
        self._stage: int = self._settings["zero_optimization"]["stage"]
        self._offloads = "offload_optimizer" in self._settings["zero_optimization"]
        self._library = _ready_library(world)
        self._buffers = BufferWatch(module)
        self._stale: list[torch.Tensor] = []

    def take_over(self, optimizer: Optimizer) -> None:
        """Start the engine: weights and moments move into DeepSpeed's flat buffers, where the optimizer works."""
        self._optimizer = optimizer
        for p in self._module.parameters():
            # Flat buffers are row-major, and the broadcasts before them need the same order.
            p.data = p.data.contiguous()
        self._engine, *_ = self._library.initialize(
            model=self._module, optimizer=optimizer, config=self._settings, dist_init_required=False
        )
        self.model = self._engine
        self._zero = self._engine.optimizer
        if self._stage == 3 and isinstance(self._module, HasOutputProjection):
            # The loss uses it outside of its module. DeepSpeed notices that by itself only if the weight is neither
            # gathered nor under way at that time, and otherwise hands out an empty one.
            projection = self._module.output_projection()
            if isinstance(projection, nn.Parameter):
                self._library.zero.register_external_parameter(self._module, projection)

    # A strategy

    def owns_for_update(self, p: torch.Tensor) -> bool:
        return True

    def owns_for_norm(self, p: torch.Tensor) -> bool:
        return True

    def begin(self) -> None:
        self._buffers.begin()
        # In stage 3 and in host memory gradient buffers outlive their step. A parameter that this step does not use
        # must have a zero gradient, not that of the last step.
        for gradient in self._stale:
            gradient.zero_()
        # The scale also multiplies the loss in the backward pass, so it must be 1 there.
        self._zero.override_loss_scale(1.0)

    @contextmanager
    def micro_batch(self, last_of_lane: bool, last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def end_lane(self) -> None:
        pass

    def reduce(self) -> None:
        self._buffers.check()

    def after_update(self) -> None:
        pass

    # An engine

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def norm_parts(self) -> list[float]:
        if self._offloads and self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # copies to the host may be in progress
        workers = float(self._world.mesh.data)
        return [part * workers**2 for part in norm_parts_of(self._gradients())]

    def update(self, scale: float) -> bool:
        self._zero.override_loss_scale(1.0 / (scale * self._world.mesh.data))
        return self._step()

    def skip(self) -> None:
        # DeepSpeed skips a step and discards its gradients if its own norm is NaN.
        for gradient in self._gradients():
            gradient.fill_(torch.nan)
        norms: dict[Any, Any] = getattr(self._zero, "norm_for_param_grads", {})
        for key in norms:
            norms[key] = torch.tensor(torch.nan)
        if self._step():
            raise RuntimeError("DeepSpeed applied an update from gradients that are not finite")

    def _step(self) -> bool:
        self._stale = self._gradients() if self._stage == 3 or self._offloads else []
        self._engine.step()
        return bool(self._engine.was_step_applied())

    def _gradients(self) -> list[torch.Tensor]:
        """Return this worker's gradients after the last micro-batch of a step; each element is on one worker only."""
        if self._offloads:
            return [flat.grad for flat in self._flat_parameters() if flat.grad is not None]
        return [part for group in self._zero.averaged_gradients.values() for part in group or ()]

    # What a checkpoint holds

    def part_of(self, p: nn.Parameter) -> Block | None:
        if not p.requires_grad:
            return self._frozen(p)
        place = self._place(p)
        return None if place is None else place.block(place.flat)

    def moments(self, p: nn.Parameter) -> Mapping[str, Block]:
        place = self._place(p) if p.requires_grad else None
        if place is None:
            return {}
        state = self._optimizer.state.get(place.flat, {})
        # State of another shape, such as the number of steps, applies to all weights.
        return {k: place.block(v) if v.shape == place.flat.shape else Block.whole(v) for k, v in state.items()}

    @contextmanager
    def exposed(self) -> Iterator[None]:
        groups = self._optimizer.param_groups
        before = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        groups[0]["params"] = list(self._flat_parameters())
        yield
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters

    @torch.no_grad()
    def loaded(self) -> None:
        if self._stage < 3:
            self._zero.update_lp_params()
            return
        # Release gathered weights first; otherwise small weights that stay gathered would keep their old values.
        self._zero.parameter_offload.partition_all_parameters()
        for p in self._module.parameters():
            place = self._place(p) if p.requires_grad else None
            if place is not None:
                p.ds_tensor.view(-1)[: place.length].copy_(place.of(place.flat))  # type: ignore[attr-defined]
        persistent = self._zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def _flat_parameters(self) -> list[torch.Tensor]:
        flat = "fp32_partitioned_groups_flat" if self._stage == 3 else "single_partition_of_fp32_groups"
        parameters: list[torch.Tensor] = getattr(self._zero, flat)
        return parameters

    def _place(self, p: Any) -> _Place | None:
        """Return the location of this worker's part of a trainable parameter; None if it has none."""
        flat = self._flat_parameters()
        if self._stage < 3:
            found = p._hp_mapping
            if found is None:
                return None
            here = found.hp_fragment_address
            there = found.lp_fragment_address
            return _Place(flat[found.param_group_index], here.start, here.numel, there.start, tuple(p.shape))
        group, start, _ = self._zero.grad_position[self._zero.get_param_id(p)]
        begin, length = self._share(p)
        return _Place(flat[group], start, length, begin, tuple(p.ds_shape))

    def _share(self, p: Any) -> tuple[int, int]:
        """Return where this worker's part of a parameter begins in stage 3, and its length without padding."""
        size = p.partition_numel()
        begin = min(dist.get_rank(p.ds_process_group) * size, p.ds_numel)
        return begin, min(size, p.ds_numel - begin)

    def _frozen(self, p: Any) -> Block:
        """Return this worker's block of a frozen parameter; stage 3 divides those too."""
        if self._stage < 3:
            return Block.whole(p)
        begin, length = self._share(p)
        return Block(p.ds_tensor.detach().view(-1)[:length], (begin,), tuple(p.ds_shape))


class _Place:
    """A contiguous run of a parameter's elements in a flat buffer.

    Args:
        flat: The buffer.
        start: Offset of the run in the buffer.
        length: Number of elements.
        begin: Index of its first element in the parameter.
        shape: Shape of the parameter.
    """

    def __init__(self, flat: torch.Tensor, start: int, length: int, begin: int, shape: tuple[int, ...]) -> None:
        self.flat = flat
        self.start = start
        self.length = length
        self.begin = begin
        self.shape = shape

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the run in a buffer with the same layout."""
        return flat.detach().view(-1)[self.start : self.start + self.length]

    def block(self, flat: torch.Tensor) -> Block:
        """Return the run as a block of the state."""
        return Block(self.of(flat), (self.begin,), self.shape)


def _ready_library(world: World) -> Any:
    """Import and prepare DeepSpeed for the device and the processes of this run.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """
    # DeepSpeed chooses the device type on import; by default it would use any GPU that it finds.
    os.environ["DS_ACCELERATOR"] = world.device.type
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    with needing("deepspeed", "deepspeed", "a strategy of DeepSpeed"):
        import deepspeed
    # Its shared-memory all-reduce is for inference only; compiling it at initialisation would take a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It calls functions by names that PyTorch has deprecated, and PyTorch warns at every call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Reset the groups and settings of an earlier run in this process.
    deepspeed.utils.groups._release_process_group_references()
    deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        keep_gloo_threads()
        keep_to_loopback(1)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    deepspeed.init_distributed(verbose=False)
    return deepspeed
