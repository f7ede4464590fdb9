"""Which part of each tensor of the state this worker holds, and the whole of them on one worker.

Strategies cut the state in ways of their own; here every cut is a box, or a run of elements, at an offset. So whatever
reads or writes a state knows those only, and a checkpoint has no trace of the strategy that made it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headway.core.types import Block, StateBlocks, StateTensors, part_of
from headway.parallel.world import World


def block_of(tensor: torch.Tensor) -> Block:
    """This worker's part of a tensor; of a plain one that is all of it."""
    if not isinstance(tensor, DTensor):
        return Block.whole(tensor)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Block(tensor.to_local().detach(), tuple(offset), tuple(tensor.shape))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The live elements of a tensor that are here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_whole(blocks: StateBlocks, world: World) -> StateTensors:
    """The whole tensors on the first worker, an empty mapping on the others; all workers must call it.

    Where the first worker has a tensor whole, it is the live one. The rest is put together in host memory, one part
    after the other; parts that several workers hold are sent by the first of them.
    """
    if world.size == 1:
        return {name: block.local for name, block in blocks.items()}
    described = {name: _description(block) for name, block in blocks.items()}
    everyone = world.gather_json(described)
    whole: StateTensors = {}
    for name in sorted({name for worker in everyone for name in worker}):
        senders = _senders(name, everyone)
        if world.is_first:
            whole[name] = _put_together(name, blocks.get(name), senders, everyone)
        elif world.rank in senders:
            dist.send(blocks[name].local.detach().cpu().contiguous().flatten().view(torch.uint8), 0)
    return whole


def _description(block: Block) -> dict[str, Any]:
    dtype = str(block.local.dtype).removeprefix("torch.")
    return {"offset": block.offset, "size": tuple(block.local.shape), "shape": block.shape, "dtype": dtype}


def _senders(name: str, everyone: list[dict[str, Any]]) -> list[int]:
    """For each different part that is not empty, the first worker that has it; one worker alone if it has all."""
    for rank, worker in enumerate(everyone):
        if name in worker and worker[name]["size"] == worker[name]["shape"]:
            return [rank]
    seen: dict[tuple[int, ...], int] = {}
    for rank, worker in enumerate(everyone):
        if name in worker and (0 not in worker[name]["size"]):
            seen.setdefault(tuple(worker[name]["offset"]), rank)
    return sorted(seen.values())


def _put_together(name: str, mine: Block | None, senders: list[int], everyone: list[dict[str, Any]]) -> torch.Tensor:
    if mine is not None and mine.is_whole:
        return mine.local
    first = next(worker[name] for worker in everyone if name in worker)
    dtype: torch.dtype = getattr(torch, first["dtype"])
    whole = torch.empty(first["shape"], dtype=dtype)
    for rank in senders:
        box = everyone[rank][name]
        part = part_of(whole, box["offset"], box["size"])
        if rank == 0:
            assert mine is not None
            part.copy_(mine.local)
            continue
        received = torch.empty(box["size"], dtype=dtype)
        dist.recv(received.flatten().view(torch.uint8), rank)
        part.copy_(received)
    return whole
