"""The part of each state tensor that this worker holds, and gathering whole tensors on one worker.

Every strategy shards the state differently, but every shard is a box, or a run of elements, at an offset. Code that
reads or writes a state handles only these, and a checkpoint does not depend on the strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from headway.core.startup.dtensors import is_dtensor
from headway.core.types import Block, StateBlocks, StateTensors, part_of
from headway.parallel.replicas import is_expert_shard
from headway.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def block_of(tensor: torch.Tensor) -> Block:
    """Return this worker's part of a tensor; a plain tensor is one whole part."""
    if not is_dtensor(tensor):
        return Block.whole(tensor)
    offset, size = _box(tensor)
    local = tensor.to_local().detach()
    if tuple(local.shape) != size:
        raise RuntimeError(
            f"the local part has shape {tuple(local.shape)}; {tensor.placements} of {tensor.shape} gives {size}"
        )
    return Block(local, offset, tuple(tensor.shape))


def _box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Compute offset and size of this worker's part.

    If `fully_shard` cuts a dimension that tensor parallelism has cut before, it marks its placement with a
    `split_factor`, although its mesh dimension comes first. Such cuts are applied last, within the parts of the other
    cuts.
    """
    offset = [0] * tensor.ndim
    size = list(tensor.shape)
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
    """Return whether this is the first of the tensor-parallel workers with the same part of a tensor.

    Workers that have the same experts count as replicas instead (`parallel.replicas`).
    """
    if is_expert_shard(tensor, world):
        return True
    if world.mesh.tp == 1 or world.mesh.coordinates(world.rank)["tp"] == 0:
        return True
    if not is_dtensor(tensor) or tensor.device_mesh.mesh_dim_names is None:
        return False
    placements = dict(zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True))
    cut = placements.get(world.weights_axis_name("tp"))
    return cut is not None and not cut.is_replicate()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local live elements of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def cut_like(tensor: torch.Tensor, local: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Wrap a local part as a `DTensor` that is sharded like `tensor`; return it unchanged if `tensor` is plain.

    Args:
        tensor: Tensor whose sharding to use.
        local: The local part.
        shape: Shape of the whole, in row-major order; the shape and layout of `tensor` by default.
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
    """Gather the whole tensors on the first worker; the others get an empty mapping. All workers must call it.

    A tensor that the first worker has whole is returned live. The others are assembled in host memory, part by part;
    the first worker that holds a part sends it.
    """
    if world.size == 1:
        return {name: block.local for name, block in blocks.items()}
    described = {name: _description(block) for name, block in blocks.items()}
    everyone = world.gather_json(described)
    whole: StateTensors = {}
    for name in sorted({name for worker in everyone for name in worker}):
        senders = _senders(name, everyone)
        if world.is_first:
            whole[name] = _assemble(name, blocks.get(name), senders, everyone)
        elif world.rank in senders:
            dist.send(blocks[name].local.detach().cpu().contiguous().flatten().view(torch.uint8), 0)
    return whole


def _description(block: Block) -> dict[str, Any]:
    dtype = str(block.local.dtype).removeprefix("torch.")
    return {"offset": block.offset, "size": tuple(block.local.shape), "shape": block.shape, "dtype": dtype}


def _senders(name: str, everyone: list[dict[str, Any]]) -> list[int]:
    """Return the first worker of each distinct non-empty part; a single worker if it has the whole tensor."""
    for rank, worker in enumerate(everyone):
        if name in worker and worker[name]["size"] == worker[name]["shape"]:
            return [rank]
    seen: dict[tuple[int, ...], int] = {}
    for rank, worker in enumerate(everyone):
        if name in worker and (0 not in worker[name]["size"]):
            seen.setdefault(tuple(worker[name]["offset"]), rank)
    return sorted(seen.values())


def _assemble(name: str, mine: Block | None, senders: list[int], everyone: list[dict[str, Any]]) -> torch.Tensor:
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
