"""Replay of a step's gradients, to find hardware that occasionally computes or stores wrongly.

With equal data, seeds and weights, the second gradient of a deterministic run has the bits of the first. Each worker
compares the results of its own backward passes before anything is exchanged, which identifies the faulty worker; the
results of the exchange are compared, too. Gradients are compared by a sum of their words, each times an odd number that
depends on its position: one changed word always changes the sum, whatever the bit.

Hochschild et al. 2021, "Cores that don't count", describes such hardware. A replay cannot find a core that is wrong in
the same way each time.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headway.core.errors import CorruptionError
from headway.core.process.faults import fault_point
from headway.parallel.blocks import local_part
from headway.parallel.world import World
from headway.training.state import TrainState, kept_buffers

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: An odd number with bits spread over its length (the golden ratio's first 64).
_FACTOR = 0x9E3779B97F4A7C15 - 2**64

#: Words per chunk of a checksum: 64-bit copies of all words at once would take several times the tensor's memory.
_TOGETHER = 2**22

#: (loss sums of this worker's lanes, number of items)
Sums = tuple[list[float], int]


def replay_is_due(every: int, step: int) -> bool:
    """Return whether a step (counted from 0) is computed twice."""
    return every > 0 and (step + 1) % every == 0


def replayed(compute: Callable[[], Sums], take_counts: Callable[[], object], state: TrainState, world: World) -> Sums:
    """Compute a step's gradients twice, and leave the effects of one computation.

    Args:
        compute: Forward, backward and exchange of the current step; clears gradients first.
        take_counts: Takes what the model has counted in its passes.

    Returns:
        The result of `compute`.

    Raises:
        CorruptionError: the results differ, or workers that share weights have different ones; on every worker alike.
    """
    step = state.cursor.step + 1
    model = state.model
    if fault_point(f"weights.{world.rank}", step) == "flip":
        _flip_a_bit(local_part(next(state.model.parameters())))
    _compare_replicas(state, world, step)
    flips = [fault_point(f"replay.{world.rank}", step) == "flip"]
    with kept_buffers(model), _own_checksums(model, flips) as first:
        sums, items = compute()
    if flips[0]:  # no hook ran for this worker's own gradients
        _flip_a_bit(next(_gradients(model))[1])
    reduced = _checksums(_gradients(model))
    take_counts()
    with _own_checksums(model, [False]) as second:
        again, _ = compute()
    one = _read(first)
    two = _read(second)
    own = [name for name in one if one[name] != two.get(name)]
    exchanged = [name for name, value in _checksums(_gradients(model)).items() if value != reduced.get(name)]
    differs = {"loss": list(map(repr, sums)) != list(map(repr, again)), "own": own, "exchanged": exchanged}
    _check_passes_agree(world.gather_json({**differs, "host": socket.gethostname()}), step)
    return again, items


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that changes if one word of a tensor changes, as an int64 scalar on the tensor's device."""
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _TOGETHER):
        some = words[start : start + _TOGETHER]
        places = torch.arange(start, start + len(some), device=words.device)
        total += places.mul_(_FACTOR).mul_(2).add_(1).mul_(some).sum()
    return total


@contextmanager
def _own_checksums(model: nn.Module, flips: list[bool]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield checksums of every parameter's own gradients, accumulated over micro-batches within the block.

    Where `fully_shard` replaces parameters by whole weights, these have none; see `_check_passes_agree`.

    Args:
        flips: Whether to flip a bit of the first gradient, for a test; false once that is done.
    """
    sums: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def add_checksum(gradient: torch.Tensor) -> torch.Tensor | None:
            changed = None
            if flips[0]:
                flips[0], changed = False, gradient.clone()
                _flip_a_bit(local_part(changed))
            value = checksum(local_part(gradient if changed is None else changed))
            sums[name] = value if name not in sums else sums[name] * 1_000_003 + value
            return changed

        return add_checksum

    handles = [p.register_hook(hook(name)) for name, p in model.named_parameters() if p.requires_grad]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


def own_gradients(model: nn.Module) -> dict[str, int]:
    """Return a checksum of this worker's part of every gradient, by the parameter's name."""
    return _checksums(_gradients(model))


def _gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, local_part(p.grad)) for name, p in model.named_parameters() if p.grad is not None)


def _checksums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return _read({name: checksum(tensor) for name, tensor in tensors})


def _read(sums: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Read checksums, all in one transfer from a GPU."""
    device = next(iter(sums.values())).device if sums else None
    values = torch.stack([value.to(device) for value in sums.values()]).tolist() if sums else []
    return dict(zip(sums, values, strict=True))


def _check_passes_agree(everyone: list[dict[str, Any]], step: int) -> None:
    """Raise an error that names the workers whose own passes differ, or else those whose exchanged sums differ.

    Raises:
        CorruptionError: any pass differs.
    """
    wrong = {rank: worker for rank, worker in enumerate(everyone) if worker["loss"] or worker["own"]}
    if wrong:
        names = _worker_names({rank: worker["host"] for rank, worker in wrong.items()})
        first = next(iter(wrong.values()))
        what = f"the gradient of {first['own'][0]}" if first["own"] else "the loss"
        raise CorruptionError(
            f"step {step:,} was computed twice, and {what} differs on {names}",
            where=names,
            fix="take that machine out (headway doctor checks its memory and GPUs); the last checkpoint is untouched",
        )
    other = {rank: worker for rank, worker in enumerate(everyone) if worker["exchanged"]}
    if other:
        names = _worker_names({rank: worker["host"] for rank, worker in other.items()})
        raise CorruptionError(
            f"step {step:,} was computed twice, and the sum over workers differs on {names}; which worker's part of it"
            " did is not known",
            where=names,
            fix="look at these machines and the network between them; the last checkpoint is untouched",
        )


def _compare_replicas(state: TrainState, world: World, step: int) -> None:
    """Compare the weights and moments that several workers share.

    Raises:
        CorruptionError: they differ.
    """
    if world.size == 1:
        return
    blocks = state.blocks()
    sums = _checksums((name, block.local) for name, block in blocks.items() if block.local.numel())
    # Tensor-parallel workers compute different things; their common tensors are compared among their replicas.
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
            names = _worker_names({rank: everyone[rank]["host"] for rank in wrong})
            raise CorruptionError(
                f"before step {step:,}, {key.split()[0]} is not what it is on other workers: {names}",
                where=names,
                fix="take that machine out; resume from the newest checkpoint, or an older one if it was made since",
            )


def outliers(values: Mapping[int, int]) -> list[int]:
    """Return the ranks whose value differs from most others; all of them if there is no majority."""
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return []
    usual = counts[0][0] if counts[0][1] > counts[1][1] else None
    return sorted(rank for rank, value in values.items() if value != usual)


def _worker_names(hosts: Mapping[int, str]) -> str:
    return ", ".join(f"worker {rank} ({host})" for rank, host in hosts.items())


@torch.no_grad()
def _flip_a_bit(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the last element: the smallest possible error."""
    words = tensor.view(_WORDS[tensor.element_size()])
    words[(-1,) * words.ndim] ^= 1
