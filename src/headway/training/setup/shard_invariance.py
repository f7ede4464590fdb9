"""A check whether an optimizer's arithmetic depends on where its parameters are cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.optim import Optimizer

from headway.config.strategies import simplest_strategy
from headway.core.errors import ConfigError

_ROWS = 61
_COLUMNS = 37
_STEPS = 3


def check_shard_invariance(
    build: Callable[[nn.Module, torch.device], Optimizer], device: torch.device, threads: int
) -> None:
    """Check that updates of shards of a matrix have the bits of updates of the whole one.

    Vector kernels treat the last elements of a buffer by other instructions than the rest, and threads cut buffers too.
    Whether that changes bits depends on the kernel, the compiler and the machine. So the check computes updates of
    sizes that do not fill vectors.

    Raises:
        ConfigError: the bits differ.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = _updated(build, device, [(0, _ROWS)])
        cuts = ([0, 31, _ROWS], [0, 16, 32, 48, _ROWS], [0, 1, _ROWS])
        same = all(torch.equal(whole, _updated(build, device, list(pairwise(rows)))) for rows in cuts)
    finally:
        torch.set_num_threads(before)
    if not same:
        whole_updates = simplest_strategy(lambda spec: spec.divides_update)
        raise ConfigError(
            "the optimizer's kernels round differently where a matrix is cut, so sharded weights would not have"
            " the bits of whole ones",
            where="determinism, parallel.strategy",
            fix=f"parallel.strategy={whole_updates}, which updates whole matrices, or determinism=run",
        )


def _updated(
    build: Callable[[nn.Module, torch.device], Optimizer], device: torch.device, rows: list[tuple[int, int]]
) -> torch.Tensor:
    """Return a matrix after a few updates of its parts, together with the state that the optimizer keeps for it."""
    generator = torch.Generator().manual_seed(1)
    weight, *gradients = (torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in range(1 + _STEPS))
    # A list of embeddings: no optimizer takes any of them for an output projection and treats it specially.
    model = nn.ModuleList(nn.Embedding(end - start, _COLUMNS, device=device) for start, end in rows)
    parts = [module.weight for module in model if isinstance(module, nn.Embedding)]
    with torch.no_grad():
        for part, (start, end) in zip(parts, rows, strict=True):
            part.copy_(weight[start:end])
    optimizer = build(model, device)
    for gradient in gradients:
        for part, (start, end) in zip(parts, rows, strict=True):
            part.grad = gradient[start:end].to(device).clone()
        optimizer.step()
    # Do what Muon does to shards. Muon itself takes no embeddings, and its steps would need a group of workers.
    full = gradients[0].to(device)
    half = full.bfloat16()
    for part, (start, end) in zip(parts, rows, strict=True):
        moment = part.detach().clone().lerp_(gradients[0][start:end].to(device), 0.05)
        moment = moment.lerp(part.detach(), 0.95).mul_(0.99)
        # Directions are in bf16 or in fp32.
        moment.add_(half[start:end], alpha=-0.1).add_(full[start:end], alpha=-0.1)
        optimizer.state[part]["orthogonalised"] = moment
    kept = [[part.detach(), *(t for t in optimizer.state[part].values() if t.shape == part.shape)] for part in parts]
    return torch.cat([torch.cat(tensors, dim=1) for tensors in kept])
