"""Which part of each tensor of the state this worker holds, and the whole of them on one worker.

Strategies cut the state in ways of their own; here every cut is a box, or a run of elements, at an offset. So whatever
reads or writes a state knows those only, and a checkpoint has no trace of the strategy that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from headway.core.dtensors import is_dtensor
from headway.core.types import Block, StateBlocks, StateTensors, part_of
from headway.parallel.replicas import is_dealt_out
from headway.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def block_of(tensor: torch.Tensor) -> Block:
    """This worker's part of a tensor; of a plain one that is all of it."""
    if not is_dtensor(tensor):
        return Block.whole(tensor)
    offset, size = _box(tensor)
    local = tensor.to_local().detach()
    if tuple(local.shape) != size:
        raise RuntimeError(
            f"a part of shape {tuple(local.shape)} where {tensor.placements} of {tensor.shape} has {size}"
        )
    return Block(local, offset, tuple(tensor.shape))


def _box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and size of this worker's part.

    Where `fully_shard` cuts the dimension that tensor parallelism has cut before, it says so by a placement with a
    `split_factor`, though its mesh dimension comes first: such cuts are made last, inside of the others' parts.
    """
    offset, size = [0] * tensor.ndim, list(tensor.shape)
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    cuts = [(n, placement) for n, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    for n, placement in sorted(cuts, key=lambda cut: hasattr(cut[1], "split_factor")):
        dim, workers = placement.dim, tensor.device_mesh.size(n)  # type: ignore[attr-defined]
        part = -(-size[dim] // workers)
        start = min(place[n] * part, size[dim])
        offset[dim] += start
        size[dim] = min(part, size[dim] - start)
    return tuple(offset), tuple(size)


def is_first_of_equals(tensor: torch.Tensor, world: World) -> bool:
    """Whether, among tensor-parallel workers that have the same part of a tensor, this is the first.

    Those that have the same experts count as replicas instead (`parallel.replicas`)."""
    if is_dealt_out(tensor, world):
        return True
    if world.mesh.tp == 1 or world.mesh.coordinates(world.rank)["tp"] == 0:
        return True
    if not is_dtensor(tensor) or tensor.device_mesh.mesh_dim_names is None:
        return False
    placements = dict(zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True))
    cut = placements.get(world.weights_axis_name("tp"))
    return cut is not None and not cut.is_replicate()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The live elements of a tensor that are here."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def cut_like(tensor: torch.Tensor, local: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """This worker's part of something that is cut as a tensor is: the part itself if that is whole, else a `DTensor`.

    Args:
        tensor: What is cut.
        local: The part.
        shape: Of the whole that it is a part of, in the order of rows; the tensor's own, in its layout, when not given.
    """
    if not is_dtensor(tensor):
        return local
    from torch.distributed.tensor import DTensor

    whole = tensor if shape is None else torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


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
