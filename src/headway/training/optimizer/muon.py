"""Muon by projection, for matrices that are cut between workers, and for matrix products in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from headway.core.startup.dtensors import is_dtensor
from headway.core.types import Fusion
from headway.parallel.blocks import block_of, cut_like, local_part


class ProjectionMuon(torch.optim.Muon):
    """`torch.optim.Muon` by projection, on shards and on whole matrices (Liu et al. 2025, algorithm 1).

    A matrix that holds those of several projections is updated as they would be apart: each has a direction and a step
    size of its own. Any other matrix has the bits of PyTorch's. Unlike that, it can compute in fp32.

    The momentum stays cut and is updated in place. A direction needs the whole matrix. So as many matrices as there are
    workers are gathered at a time, each worker orthogonalises one of them and sends the result to the others, which
    takes half as many bytes in bf16. On a mesh of several dimensions every worker orthogonalises all of them.

    Args:
        options: As for `torch.optim.Muon`.
        products: The type in which matrices are orthogonalised.
        fusions: The matrices that hold those of several projections.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
        products: torch.dtype = torch.bfloat16,
        fusions: Mapping[nn.Parameter, Fusion] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self._products = products
        self._fusions = fusions or {}

    def projection_shapes(self, p: nn.Parameter) -> list[tuple[int, int]]:
        """Return the sizes of the matrices that are orthogonalised for a parameter."""
        fusion = self._fusions.get(p)
        if fusion is None:
            return [(p.shape[0], p.shape[1])]
        others = p.shape[0] if fusion.by_columns else p.shape[1]
        return [(fusion.groups * size, others) for size in fusion.sizes]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the matrices; all workers that share them must call it."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            together = max((p.device_mesh.size() for p in parameters if is_dtensor(p)), default=1)
            for first in range(0, len(parameters), together):
                self._update(parameters[first : first + together], group)

    def _update(self, parameters: Sequence[Any], group: dict[str, Any]) -> None:
        directions: list[torch.Tensor | None] = []
        for turn, p in enumerate(parameters):
            whole = _whole(self._momentum(p, group))
            directions.append(whole if _is_owner(p, turn) else None)
            del whole
        # Each worker orthogonalises its own matrix here, all of them at once.
        for turn, update in enumerate(directions):
            if update is not None:
                directions[turn] = self._direction(update, parameters[turn], group)
        del update
        rate = float(group["lr"])
        decay = group["weight_decay"]
        for turn, p in enumerate(parameters):
            direction = self._shared(directions[turn], p, turn)
            weight = local_part(p)
            weight.mul_(1 - rate * decay)
            steps = [_adjust_lr(rate, group["adjust_lr_fn"], torch.Size(size)) for size in self.projection_shapes(p)]
            if len(set(steps)) > 1:
                direction = _scaled(direction, self._fusions[p], [step / steps[0] for step in steps])
            weight.add_(block_of(p).of(direction).to(weight.device), alpha=-steps[0])

    def _direction(self, whole: torch.Tensor, p: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """Orthogonalise a whole matrix, projection by projection."""
        fusion = self._fusions.get(p)
        if fusion is None:
            return orthogonalized(whole, group, self._products)
        direction = torch.empty_like(whole, dtype=self._products if self._products == torch.bfloat16 else whole.dtype)
        for mine, theirs in zip(_projections(direction, fusion), _projections(whole, fusion), strict=True):
            mine.copy_(orthogonalized(theirs.flatten(0, 1), group, self._products).view_as(mine))
        return direction

    def _momentum(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        """Return the momentum to orthogonalise, cut as the matrix is (Nesterov's form if the group says so)."""
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
        momentum = local_part(self.state[p]["momentum_buffer"])
        gradient = local_part(p.grad)
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return cut_like(p, update)

    def _shared(self, direction: torch.Tensor | None, p: Any, turn: int) -> torch.Tensor:
        """Return the owner's result on every worker."""
        if not is_dtensor(p) or p.device_mesh.ndim > 1:
            assert direction is not None
            return direction
        if direction is None:
            # Not on the part's device: that may be the host, and the owner's result is on the mesh's device.
            direction = torch.empty(p.shape, dtype=self._products, device=p.device_mesh.device_type)
        direction = direction.contiguous()
        mesh = p.device_mesh
        group = mesh.get_group()
        dist.broadcast(direction, src=dist.get_global_rank(group, turn % mesh.size()), group=group)
        return direction


def orthogonalized(matrix: torch.Tensor, group: dict[str, Any], products: torch.dtype) -> torch.Tensor:
    """Return a matrix with about the same singular vectors, and singular values near 1.

    Newton-Schulz (Jordan et al. 2024). In bf16 this is PyTorch's function. In fp32 it is computed in the matrix's own
    type and through plain products, so that a CPU without bf16 instructions need not emulate them.
    """
    coefficients = group["ns_coefficients"]
    steps = group["ns_steps"]
    eps = group["eps"]
    if products == torch.bfloat16:
        return _zeropower_via_newtonschulz(matrix, coefficients, steps, eps)
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / x.norm().clamp(min=eps)  # no singular value above 1
    a, b, c = coefficients
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def _projections(matrix: torch.Tensor, fusion: Fusion) -> Sequence[torch.Tensor]:
    """Return a view of each projection's matrix, (groups, rows of a group, columns)."""
    rows = matrix.T if fusion.by_columns else matrix
    return torch.split(rows.unflatten(0, (fusion.groups, -1)), list(fusion.sizes), dim=1)


def _scaled(direction: torch.Tensor, fusion: Fusion, factors: Sequence[float]) -> torch.Tensor:
    """Return a matrix whose projections are multiplied by a factor each, in fp32."""
    scaled = direction.float() if direction.dtype == torch.bfloat16 else direction.clone()
    for part, factor in zip(_projections(scaled, fusion), factors, strict=True):
        part.mul_(factor)
    return scaled


def _whole(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.full_tensor() if is_dtensor(matrix) else matrix


def _is_owner(p: Any, turn: int) -> bool:
    """Return whether this worker orthogonalises the matrix."""
    if not is_dtensor(p):
        return True
    mesh = p.device_mesh
    return bool(mesh.ndim > 1 or mesh.get_local_rank() == turn % mesh.size())
