"""Ownership of parameters where moments are divided between workers (ZeRO stages 1 and 2).

Rajbhandari et al. 2020, sections 5.1 and 5.2. Workers own whole parameters rather than equal pieces of one flat buffer.
The bits of an update then do not depend on buffer boundaries, and an optimizer can use whole matrices (Muon). The
price: shares are only about equal. No worker has more than its fair share plus the largest parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from headway.config.strategies import FOR_COPIES
from headway.core.errors import ConfigError
from headway.core.model_protocol import Pipelineable
from headway.parallel.blocks import local_part
from headway.parallel.buckets import InFlight
from headway.parallel.replicas import Replicas


class Ownership:
    """The owner of every trainable parameter, a function of only the model and the arrangement of the workers.

    Args:
        replicas_of: Returns the workers that have the same part of a parameter; one of them owns it.
    """

    def __init__(self, module: nn.Module, replicas_of: Callable[[torch.Tensor], Replicas]) -> None:
        self.replicas_of = replicas_of
        kinds: dict[Replicas, list[nn.Parameter]] = {}
        for p in module.parameters():
            if p.requires_grad:
                kinds.setdefault(replicas_of(p), []).append(p)
        if all(len(members) < kind.size for kind, members in kinds.items()):
            parameters = sum(map(len, kinds.values()))
            workers = max((kind.size for kind in kinds), default=1)
            raise ConfigError(
                f"a model of {parameters} parameters cannot be divided between {workers} workers",
                where="parallel.strategy, parallel.workers",
                fix=f"parallel.strategy={FOR_COPIES}, or fewer workers",
            )
        self._owner: dict[torch.Tensor, int] = {}
        for kind, members in kinds.items():
            self._owner |= _assign_owners(members, kind.size, shared_between_stages(module))

    def owner(self, p: torch.Tensor) -> int:
        """Return the worker that updates the parameter, by its number among the parameter's replicas."""
        return self._owner[p]

    def is_mine(self, p: torch.Tensor) -> bool:
        """Return whether this worker updates the parameter."""
        return self._owner[p] == self.replicas_of(p).rank

    @torch.no_grad()
    def share(self, parameters: Iterable[nn.Parameter], bucket_bytes: int) -> None:
        """Send every parameter from its owner to all replicas, with a few buckets in flight at a time."""
        sent = InFlight()
        for replicas, owner, bucket in self._buckets(parameters, bucket_bytes):
            if replicas.size == 1:
                continue
            sent.wait_for_capacity()
            flat = self._pack(bucket)
            work = dist.broadcast(flat, src=replicas.global_rank(owner), group=replicas.group, async_op=True)
            sent.add(work, partial(self._unpack, bucket, flat))
            del flat
        sent.finish()

    def _pack(self, bucket: Sequence[nn.Parameter]) -> torch.Tensor:
        """Concatenate what the owner sends; on other workers allocate the buffer to receive it."""
        parts = [local_part(p.detach()) for p in bucket]
        if self.is_mine(bucket[0]):
            return torch.cat([part.flatten() for part in parts])
        return torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)

    def _unpack(self, bucket: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
        """Copy received values into the parameters."""
        if not self.is_mine(bucket[0]):
            for p, part in zip(bucket, flat.split([local_part(p).numel() for p in bucket]), strict=True):
                local = local_part(p.detach())
                local.copy_(part.view(local.shape))

    def _buckets(
        self, parameters: Iterable[nn.Parameter], bucket_bytes: int
    ) -> Iterable[tuple[Replicas, int, Sequence[nn.Parameter]]]:
        """Yield buckets of one owner and dtype, of about `bucket_bytes`, in the same order on every worker."""
        kinds: dict[tuple[Replicas, int, torch.dtype], list[nn.Parameter]] = {}
        for p in parameters:
            kinds.setdefault((self.replicas_of(p), self.owner(p), p.dtype), []).append(p)
        for (replicas, owner, _), members in kinds.items():
            bucket: list[nn.Parameter] = []
            for p in members:
                if bucket and sum(local_part(q).nbytes for q in (*bucket, p)) > bucket_bytes:
                    yield replicas, owner, bucket
                    bucket = []
                bucket.append(p)
            yield replicas, owner, bucket


def shared_between_stages(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters that both the first and the last pipeline stage hold, in a fixed order."""
    return list(module.shared_between_stages()) if isinstance(module, Pipelineable) else []


def _assign_owners(
    parameters: Sequence[nn.Parameter], workers: int, shared: Sequence[torch.Tensor] = ()
) -> dict[torch.Tensor, int]:
    """Assign the largest parameters first, each to the worker with the least load; ties follow the model's order.

    Parameters shared by stages come before all others. They then have the same owner in both stages, whatever else the
    stages hold, and their gradients can be summed between these owners.
    """
    load = [0] * workers
    owner: dict[torch.Tensor, int] = {}
    first = {id(p) for p in shared}
    for p in sorted(parameters, key=lambda p: (id(p) not in first, -local_part(p).numel())):
        least = min(range(workers), key=lambda rank: (load[rank], rank))
        owner[p] = least
        load[least] += local_part(p).numel()
    return owner
