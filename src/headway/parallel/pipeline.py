"""Pipeline parallelism: workers have consecutive layers and exchange activations and their gradients.

The order of the micro-batches comes from `torch.distributed.pipelining`: GPipe (Huang et al. 2019), 1F1B (Narayanan et
al. 2019) and interleaved 1F1B (Narayanan et al. 2021, section 2.2). Only the residual stream travels between stages:
every worker of a pipeline has the micro-batches, with their targets and document masks. If workers share its positions
(context and tensor parallelism), each exchanges with the workers that have the same positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway.config.derived.pipeline import stages_per_worker
from headway.config.sections.parallel import ParallelConfig
from headway.core.coordination.heartbeat import exchanging
from headway.core.random import derive_seed
from headway.core.types import MicroBatch
from headway.parallel.blocks import local_part
from headway.parallel.ownership import shared_between_stages
from headway.parallel.stages import stages_of_worker
from headway.parallel.world import World

#: (micro-batch, output of the previous stage or None, layers) -> input of the next stage, or the summed loss.
StageForward = Callable[[MicroBatch, torch.Tensor | None, range], torch.Tensor]
#: Micro-batch -> a meta tensor like the output of any stage but the last.
StageOutput = Callable[[MicroBatch], torch.Tensor]
#: Whether it is a stage's last backward pass of the lane -> context of that pass.
AroundBackward = Callable[[bool], AbstractContextManager[None]]


class Pipeline:
    """One worker's stages and their connections to the other workers."""

    def __init__(
        self,
        parallel: ParallelConfig,
        model: nn.Module,
        world: World,
        *,
        stages: Sequence[range],
        forward: StageForward,
        output: StageOutput,
    ) -> None:
        """Connect the workers of a pipeline; all workers must call this together.

        Args:
            model: Has only this worker's layers.
            stages: The layers of every stage (`parallel.stages.plan_stages`).
        """
        self._schedule_name = parallel.pipeline_schedule
        self._world = world
        self._ranks = world.mesh.ranks_along(world.rank, "pp")
        self._place = self._ranks.index(world.rank)
        self._group = world.device_mesh["pp"].get_group()
        self._stages = stages
        self._forward = forward
        self._output = output
        assert len(stages) == len(self._ranks) * stages_per_worker(parallel)
        self._mine = stages_of_worker(self._place, len(self._ranks), len(stages))
        self._lane = _Lane()
        self._schedule: tuple[tuple[int, torch.Size], Any] | None = None
        self._shared = shared_between_stages(model)
        self._is_copy = {id(p) for p in self._shared} if self._place else set()
        # A group's first exchange in NCCL must include all its workers; that of shared parameters involves only two.
        dist.all_reduce(torch.zeros(1, device=world.device), group=self._group)

    def train(
        self, batches: Sequence[MicroBatch], seeds: Sequence[int], around_backward: AroundBackward
    ) -> torch.Tensor:
        """Run forward and backward passes of one lane; add to the existing gradients.

        Args:
            batches: The micro-batches of the lane, of one shape and on the device.
            seeds: Seed of each micro-batch; every stage derives its own.

        Returns:
            The loss summed over the lane; zero unless the last stage is local.
        """
        like = self._output(batches[0])
        for batch in batches:
            assert self._output(batch).shape == like.shape, "the micro-batches of a lane have one shape"
        self._lane.begin(batches, seeds, around_backward)
        schedule = self._schedule_for(len(batches), like)
        # The schedule carries only the number of the micro-batch.
        numbers = torch.arange(len(batches))
        losses: list[torch.Tensor] = []
        first = 0 in self._mine
        last = len(self._stages) - 1 in self._mine
        schedule.step(*((numbers,) if first else ()), target=numbers if last else None, losses=losses, number=numbers)
        self._lane.end()
        total = torch.zeros((), device=self._world.device)
        for loss in losses:
            total += loss.detach().squeeze(0)
        return total

    @torch.no_grad()
    def loss(self, batch: MicroBatch) -> torch.Tensor:
        """Compute the summed loss of one micro-batch without a backward pass; zero unless the last stage is local."""
        for number in self._mine:
            x = None
            if number > 0:
                like = self._output(batch)
                x = torch.empty(like.shape, dtype=like.dtype, device=self._world.device)
                dist.recv(x, self._rank_of(number - 1), group=self._group)
            y = self._forward(batch, x, self._stages[number])
            if number == len(self._stages) - 1:
                return y
            dist.send(y.contiguous(), self._rank_of(number + 1), group=self._group)
        return torch.zeros((), device=self._world.device)

    def reduce_shared(self) -> None:
        """Sum the gradients that the first and the last stage share, after each was summed over its replicas.

        Addition of two numbers is commutative, so both stages compute the same bits and stay equal.
        """
        peer = self._ranks[-1 if self._place == 0 else 0]
        for p in self._shared:
            if p.grad is None:  # another replica owns it, here and at the peer
                continue
            mine = local_part(p.grad)
            if not mine.numel():  # the shard is empty at the peer too
                continue
            sent = mine.contiguous()
            received = torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)
            exchange = [
                dist.P2POp(dist.isend, sent, peer, self._group),
                dist.P2POp(dist.irecv, received, peer, self._group),
            ]
            works = dist.batch_isend_irecv(exchange)
            with exchanging("sum of gradients that stages share"):
                for work in works:
                    work.wait()
            mine.add_(received)

    def owns_for_norm(self, p: torch.Tensor) -> bool:
        """Return whether this stage's gradient of a parameter enters norms.

        Of two stages that share a parameter, the first one's does.
        """
        return id(p) not in self._is_copy

    def _rank_of(self, stage: int) -> int:
        return self._ranks[stage % len(self._ranks)]

    def _schedule_for(self, micro_batches: int, like: torch.Tensor) -> Any:
        """Return the schedule for lanes of this many micro-batches of one shape.

        It holds buffers for all of them, so it is replaced when the row length changes (`data.mixture.stages`), which
        happens on all workers in the same step.
        """
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

        key = micro_batches, like.shape
        if self._schedule is None or self._schedule[0] != key:
            stages = [_make_stage(self._part(number), like, self._world.device, self._group) for number in self._mine]
            # Losses and gradients are sums over items: do not divide them by the number of micro-batches.
            options: dict[str, Any] = {"loss_fn": lambda loss, _: loss.squeeze(0), "scale_grads": False}
            if self._schedule_name == "interleaved":
                schedule: Any = ScheduleInterleaved1F1B(stages, micro_batches, **options)
            else:
                kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[self._schedule_name]
                schedule = kind(stages[0], micro_batches, **options)
            self._schedule = key, schedule
        return self._schedule[1]

    def _part(self, number: int) -> _Part:
        return _Part(self._forward, self._lane, number, self._stages, self._world.seed)


class _Lane:
    """The current lane, which a schedule does not carry."""

    def begin(self, batches: Sequence[MicroBatch], seeds: Sequence[int], around_backward: AroundBackward) -> None:
        self.batches = batches
        self.seeds = seeds
        self.around_backward = around_backward
        self._backward_passes: dict[int, int] = {}

    def is_last_backward(self, stage: int) -> bool:
        """Count one more backward pass of a stage; a stage has as many as there are micro-batches."""
        self._backward_passes[stage] = self._backward_passes.get(stage, 0) + 1
        return self._backward_passes[stage] == len(self.batches)

    def end(self) -> None:
        """Check that every stage ran every micro-batch: a schedule that skipped one would silently lose data."""
        if any(passes != len(self.batches) for passes in self._backward_passes.values()):
            raise RuntimeError(f"a pipeline stage did not run all of its {len(self.batches)} micro-batches")
        self.batches = []


class _Part(nn.Module):
    """One stage as a schedule sees it; the parameters remain the model's, which strategies treat as a whole."""

    def __init__(
        self, forward: StageForward, lane: _Lane, number: int, stages: Sequence[range], seed: Callable[[int], object]
    ) -> None:
        super().__init__()
        self._seed = seed
        self._run, self.lane, self.number, self.of = forward, lane, number, len(stages)
        self._layers = stages[number]

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Run micro-batch `number`, (1,), on the previous stage's output; the first stage gets the number instead."""
        index = int(number)
        self._seed(derive_seed(self.lane.seeds[index], "stage", self.number))
        y = self._run(self.lane.batches[index], x if self.number else None, self._layers)
        return y.unsqueeze(0) if self.number == self.of - 1 else y


class ReceiveBuffers:
    """Allocates the buffers of PyTorch's records of what a stage receives, and frees them.

    Args:
        records: Records by micro-batch, for each direction, with a buffer each.
    """

    def __init__(self, records: Sequence[Mapping[int, Sequence[Any]]], device: torch.device) -> None:
        self._device = device
        self._like: dict[int, torch.Tensor] = {}
        for by_micro_batch in records:
            for infos in by_micro_batch.values():
                for info in infos:
                    buffer = getattr(info, "buffer", None)
                    if buffer is not None:
                        self._like[id(info)] = torch.empty_like(
                            buffer, device="meta", requires_grad=buffer.requires_grad
                        )
                self.free(infos)

    def allocate(self, infos: Sequence[Any]) -> None:
        """Give each record of a micro-batch a buffer."""
        for info in infos:
            like = self._like.get(id(info))
            if like is not None:
                # What a stage receives from the one before is a leaf whose gradient goes back to it.
                info.buffer = torch.empty_like(like, device=self._device, requires_grad=like.requires_grad)

    def free(self, infos: Sequence[Any]) -> None:
        """Take the buffers of a micro-batch that has gone back."""
        for info in infos:
            if id(info) in self._like:
                info.buffer = None


def _make_stage(part: _Part, like: torch.Tensor, device: torch.device, group: dist.ProcessGroup | None) -> Any:
    """Create a stage with known shapes; inferring them would run the model once and send them pickled."""
    from torch.distributed.pipelining import PipelineStage

    class Stage(PipelineStage):
        """A stage that has buffers to receive into only for micro-batches that are under way.

        PyTorch's stages keep those of every micro-batch of the lane for as long as the schedule lives.
        """

        _received: ReceiveBuffers | None = None

        def _buffers(self) -> ReceiveBuffers:
            if self._received is None:
                self._received = ReceiveBuffers([self.args_recv_info, self.grad_recv_info], device)
            return self._received

        def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
            self._buffers().allocate(self.args_recv_info[fwd_chunk_id])
            return super().get_fwd_recv_ops(fwd_chunk_id)

        def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
            self._buffers().allocate(self.grad_recv_info[bwd_chunk_id])
            return super().get_bwd_recv_ops(bwd_chunk_id)

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
            with part.lane.around_backward(part.lane.is_last_backward(part.number)):
                result = super().backward_one_chunk(bwd_chunk_id, *args, **options)
            for records in (self.args_recv_info, self.grad_recv_info):
                self._buffers().free(records.get(bwd_chunk_id, ()))
            return result

    is_first = part.number == 0
    is_last = part.number == part.of - 1
    passed = torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=True)
    number = torch.empty(1, dtype=torch.int64, device="meta")
    loss = torch.empty(1, device="meta", requires_grad=True)
    inputs = number if is_first else passed
    outputs = loss if is_last else passed
    return Stage(part, part.number, part.of, device, input_args=inputs, output_args=outputs, group=group)
