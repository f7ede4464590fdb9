"""Computing a step's gradients twice, to find hardware that now and then computes or stores wrongly.

Same data, same seeds, same weights: in a run that is deterministic the second gradient has the bits of the first. Each
worker compares what its own backward passes gave before anything is exchanged, so the one that differs is known by
name; what came out of the exchange is compared too. Gradients are compared by a sum of their words, each times an odd
number that depends on its place: one changed word always changes the sum, whatever the bit.

Hochschild et al. 2021, "Cores that don't count", has what such hardware does. A core that is wrong in the same way each
time is not found by doing the same again.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headway.core.errors import CorruptionError
from headway.core.faults import fault_point
from headway.parallel.blocks import local_part
from headway.training.state import kept_buffers

if TYPE_CHECKING:
    from headway.parallel.world import World
    from headway.training.state import TrainState

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Odd, with bits all over (the golden ratio's first 64).
_FACTOR = 0x9E3779B97F4A7C15 - 2**64

#: Words of a checksum that are looked at together: in 64 bits all of them would take several times what a tensor does.
_TOGETHER = 2**22

#: (loss sums of this worker's lanes, number of items)
Sums = tuple[list[float], int]


def replay_is_due(every: int, step: int) -> bool:
    """Whether a step (counted from 0) is computed twice."""
    return every > 0 and (step + 1) % every == 0


def replayed(compute: Callable[[], Sums], take_counts: Callable[[], object], state: TrainState, world: World) -> Sums:
    """Compute a step's gradients twice, and leave what one time leaves.

    Args:
        compute: Forward, backward and exchange of the step under way; clears gradients first.
        take_counts: Takes away what the model has counted in its passes.

    Returns:
        What `compute` gave.

    Raises:
        CorruptionError: the two differ, or workers that have the same weights do not; on every worker alike.
    """
    step, model = state.cursor.step + 1, state.model
    _flip_a_weight(state, world, step)
    _compare_replicas(state, world, step)
    flips = [fault_point(f"replay.{world.rank}", step) == "flip"]
    with kept_buffers(model), _listening(model, flips) as first:
        sums, items = compute()
    if flips[0]:  # nothing was heard of this worker's own gradients
        _flip_a_bit(next(_gradients(model))[1])
    reduced = _checksums(_gradients(model))
    take_counts()
    with _listening(model, [False]) as second:
        again, _ = compute()
    one, two = _read(first), _read(second)
    own = [name for name in one if one[name] != two.get(name)]
    exchanged = [name for name, value in _checksums(_gradients(model)).items() if value != reduced.get(name)]
    differs = {"loss": list(map(repr, sums)) != list(map(repr, again)), "own": own, "exchanged": exchanged}
    _refuse(world.gather_json({**differs, "host": socket.gethostname()}), step)
    return again, items


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number that one changed word of a tensor changes for sure, as an int64 scalar where the tensor is."""
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _TOGETHER):
        some = words[start : start + _TOGETHER]
        places = torch.arange(start, start + len(some), device=words.device)
        total += places.mul_(_FACTOR).mul_(2).add_(1).mul_(some).sum()
    return total


@contextmanager
def _listening(model: nn.Module, flips: list[bool]) -> Iterator[dict[str, torch.Tensor]]:
    """The checksum of every parameter's own gradients, one micro-batch after the other, while a block runs.

    Where `fully_shard` puts whole weights in the place of parameters, these have none; see `_refuse`.

    Args:
        flips: Whether a bit of the first gradient is to be flipped, for a test; false once that is done.
    """
    heard: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def came(gradient: torch.Tensor) -> torch.Tensor | None:
            changed = None
            if flips[0]:
                flips[0], changed = False, gradient.clone()
                _flip_a_bit(local_part(changed))
            value = checksum(local_part(gradient if changed is None else changed))
            heard[name] = value if name not in heard else heard[name] * 1_000_003 + value
            return changed

        return came

    handles = [p.register_hook(hook(name)) for name, p in model.named_parameters() if p.requires_grad]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, local_part(p.grad)) for name, p in model.named_parameters() if p.grad is not None)


def _checksums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return _read({name: checksum(tensor) for name, tensor in tensors})


def _read(sums: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Brought from a GPU at once, and not one after the other."""
    device = next(iter(sums.values())).device if sums else None
    values = torch.stack([value.to(device) for value in sums.values()]).tolist() if sums else []
    return dict(zip(sums, values, strict=True))


def _refuse(everyone: list[dict[str, Any]], step: int) -> None:
    """Name the workers whose own passes differ; where none of them does, those that got something else."""
    wrong = {rank: worker for rank, worker in enumerate(everyone) if worker["loss"] or worker["own"]}
    if wrong:
        names = _named({rank: worker["host"] for rank, worker in wrong.items()})
        first = next(iter(wrong.values()))
        what = f"the gradient of {first['own'][0]}" if first["own"] else "the loss"
        raise CorruptionError(
            f"step {step:,} was computed twice, and {what} differs on {names}",
            where=names,
            fix="take that machine out (headway doctor looks at its memory and GPUs); the last checkpoint is untouched",
        )
    other = {rank: worker for rank, worker in enumerate(everyone) if worker["exchanged"]}
    if other:
        names = _named({rank: worker["host"] for rank, worker in other.items()})
        raise CorruptionError(
            f"step {step:,} was computed twice, and the sum over workers differs on {names}; which worker's part of it"
            " did is not known",
            where=names,
            fix="look at these machines and the network between them; the last checkpoint is untouched",
        )


def _compare_replicas(state: TrainState, world: World, step: int) -> None:
    """Compare what several workers have of the same weights and moments."""
    if world.size == 1:
        return
    blocks = state.blocks()
    sums = _checksums((name, block.local) for name, block in blocks.items() if block.local.numel())
    # Tensor-parallel workers compute different things; what they have in common is compared among their replicas.
    place = world.mesh.coordinates(world.rank)["tp"]
    mine = {
        f"{name} {list(blocks[name].offset)} {list(blocks[name].local.shape)} {place}": value
        for name, value in sums.items()
    }
    everyone = world.gather_json({"host": socket.gethostname(), "sums": mine})
    for key in mine.keys() | {key for worker in everyone for key in worker["sums"]}:
        by_rank = {rank: worker["sums"][key] for rank, worker in enumerate(everyone) if key in worker["sums"]}
        wrong = outliers(by_rank)
        if wrong:
            names = _named({rank: everyone[rank]["host"] for rank in wrong})
            raise CorruptionError(
                f"before step {step:,}, {key.split()[0]} is not what it is on other workers: {names}",
                where=names,
                fix="take that machine out; go on from the newest checkpoint, or an older one if it was made since",
            )


def outliers(values: Mapping[int, int]) -> list[int]:
    """Who differs from most others; all of them where there is no majority."""
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return []
    usual = counts[0][0] if counts[0][1] > counts[1][1] else None
    return sorted(rank for rank, value in values.items() if value != usual)


def _named(hosts: Mapping[int, str]) -> str:
    return ", ".join(f"worker {rank} ({host})" for rank, host in hosts.items())


@torch.no_grad()
def _flip_a_weight(state: TrainState, world: World, step: int) -> None:
    if fault_point(f"weights.{world.rank}", step) == "flip":
        _flip_a_bit(local_part(next(state.model.parameters())))


@torch.no_grad()
def _flip_a_bit(tensor: torch.Tensor) -> None:
    """The lowest bit of the last element: the least that can go wrong."""
    words = tensor.view(_WORDS[tensor.element_size()])
    words[(-1,) * words.ndim] ^= 1
