"""Who updates which parameter, where moments are divided between workers (ZeRO stages 1 and 2).

Rajbhandari et al. 2020, sections 5.1 and 5.2. Whole parameters are dealt out, not equal pieces of one flat buffer: the
bits of an update then do not depend on where a buffer is cut, and an optimizer may look at a whole matrix (Muon). The
price is that shares are only about equal; no worker has more than its fair share and the largest parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from headway.core.errors import ConfigError
from headway.parallel.blocks import local_part
from headway.parallel.buckets import InFlight


class Ownership:
    """The owner of every trainable parameter, a function of the model and the number of workers alone."""

    def __init__(self, module: nn.Module, rank: int, workers: int) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        if len(parameters) < workers:
            raise ConfigError(
                f"a model of {len(parameters)} parameters cannot be divided between {workers} workers",
                where="parallel.strategy, parallel.workers",
                fix="parallel.strategy=ddp, or fewer workers",
            )
        self.rank, self.workers = rank, workers
        self._owner = _dealt(parameters, workers, shared_between_stages(module))

    def owner(self, p: torch.Tensor) -> int:
        """The worker, by its number among those that the parameters are dealt to, that updates a parameter."""
        return self._owner[p]

    def is_mine(self, p: torch.Tensor) -> bool:
        """Whether this worker updates a parameter."""
        return self._owner[p] == self.rank

    @torch.no_grad()
    def share(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, bucket_bytes: int) -> None:
        """Bring every parameter from its owner to all the others, with a few buckets on their way at a time."""
        sent = InFlight()
        for owner, bucket in self._buckets(parameters, bucket_bytes):
            sent.make_room()
            flat = torch.cat([local_part(p.detach()).flatten() for p in bucket])
            source = owner if group is None else dist.get_global_rank(group, owner)
            work = dist.broadcast(flat, src=source, group=group, async_op=True)
            sent.add(work, partial(self._unpack, owner, bucket, flat))
            del flat
        sent.finish()

    def _unpack(self, owner: int, bucket: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
        """Write what has arrived from another worker."""
        if owner != self.rank:
            for p, part in zip(bucket, flat.split([local_part(p).numel() for p in bucket]), strict=True):
                local = local_part(p.detach())
                local.copy_(part.view(local.shape))

    def _buckets(
        self, parameters: Iterable[nn.Parameter], bucket_bytes: int
    ) -> Iterable[tuple[int, Sequence[nn.Parameter]]]:
        """Parameters of one owner and one type, of about `bucket_bytes`, in the same order on every worker."""
        kinds: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        for p in parameters:
            kinds.setdefault((self.owner(p), p.dtype), []).append(p)
        for (owner, _), members in kinds.items():
            bucket: list[nn.Parameter] = []
            for p in members:
                if bucket and sum(local_part(q).nbytes for q in (*bucket, p)) > bucket_bytes:
                    yield owner, bucket
                    bucket = []
                bucket.append(p)
            yield owner, bucket


def shared_between_stages(module: nn.Module) -> list[torch.Tensor]:
    """Parameters that the first and the last pipeline stage both have, in one order; a model names them by a method
    `shared_between_stages`."""
    declared = getattr(module, "shared_between_stages", None)
    return [] if declared is None else list(declared())


def _dealt(
    parameters: Sequence[nn.Parameter], workers: int, shared: Sequence[torch.Tensor] = ()
) -> dict[torch.Tensor, int]:
    """The largest first, each to the worker that has least so far; equal ones in the order of the model.

    What stages share comes before all else: then it has the same owner in both, whatever else they have, and their
    gradients can meet.
    """
    load = [0] * workers
    owner: dict[torch.Tensor, int] = {}
    first = {id(p) for p in shared}
    for p in sorted(parameters, key=lambda p: (id(p) not in first, -local_part(p).numel())):
        least = min(range(workers), key=lambda rank: (load[rank], rank))
        owner[p] = least
        load[least] += local_part(p).numel()
    return owner
