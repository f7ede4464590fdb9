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

#: Matrices with more rows are no faster in a batch: one product is work enough.
_BATCH_ROWS = 256
#: Of matrices that are updated together, whose momentum is copied: 16 MB.
_BATCH_ELEMENTS = 4_000_000


class ProjectionMuon(torch.optim.Muon):
    """`torch.optim.Muon` by projection, on shards and on whole matrices (Liu et al. 2025, algorithm 1).

    A matrix that holds those of several projections is updated as they would be apart: each has a direction and a step
    size of its own. Any other matrix has the bits of PyTorch's. Unlike that, it can compute in fp32.

    The momentum stays cut and is updated in place. A direction needs the whole matrix. So as many matrices as there are
    workers are gathered at a time, each worker orthogonalises one of them and sends the result to the others, which
    takes half as many bytes in bf16. On a mesh of several dimensions every worker orthogonalises all of them.

    In bf16 on a CPU, small matrices of one shape are orthogonalised in one batch, which takes half to three quarters of
    the time.

    Args:
        options: As for `torch.optim.Muon`.
        products: The type in which matrices are orthogonalised.
        fusions: The matrices that hold those of several projections.
        batches: Matrices may share products; then the bits of one may depend on which others are updated with it.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
        products: torch.dtype = torch.bfloat16,
        fusions: Mapping[nn.Parameter, Fusion] | None = None,
        *,
        batches: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self._products = products
        self._fusions = fusions or {}
        self.shares_products = batches and products == torch.bfloat16

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
            for parameters in self._updated_together([p for p in group["params"] if p.grad is not None]):
                self._update(parameters, group)

    def _updated_together(self, parameters: Sequence[Any]) -> list[list[Any]]:
        """Return the matrices in lists: one per worker where they are cut, or as many as a batch may take."""
        workers = max((p.device_mesh.size() for p in parameters if is_dtensor(p)), default=1)
        if any(map(is_dtensor, parameters)) or not self.shares_products:
            return [list(parameters[first : first + workers]) for first in range(0, len(parameters), workers)]
        found: list[list[Any]] = [[]]
        for p in parameters:
            if found[-1] and sum(q.numel() for q in found[-1]) + p.numel() > _BATCH_ELEMENTS:
                found.append([])
            found[-1].append(p)
        return found

    def _update(self, parameters: Sequence[Any], group: dict[str, Any]) -> None:
        directions: list[torch.Tensor | None] = []
        for turn, p in enumerate(parameters):
            whole = _whole(self._momentum(p, group))
            directions.append(whole if _is_owner(p, turn) else None)
            del whole
        # Each worker orthogonalises its own matrix here, all of them at once.
        if self.shares_products and len(parameters) > 1 and not any(map(is_dtensor, parameters)):
            self._share_products(directions, parameters, group)
        else:
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

    def _share_products(self, wholes: list[Any], parameters: Sequence[Any], group: dict[str, Any]) -> None:
        """Replace whole matrices by their directions, projections of one shape in one batch."""
        alike: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for turn, whole in enumerate(wholes):
            fusion = self._fusions.get(parameters[turn]) or Fusion((whole.shape[0],), 1)
            direction = torch.empty_like(whole, dtype=self._products)
            for mine, theirs in zip(_projections(direction, fusion), _projections(whole, fusion), strict=True):
                matrix = theirs.flatten(0, 1)
                alike.setdefault((matrix.shape[0], matrix.shape[1]), []).append((mine, matrix))
            wholes[turn] = direction
        for shape, pairs in alike.items():
            matrices = [matrix for _, matrix in pairs]
            in_batch = len(pairs) > 1 and min(shape) <= _BATCH_ROWS and matrices[0].device.type == "cpu"
            results = (
                orthogonalized_batch(torch.stack(matrices), group).unbind()
                if in_batch
                else [orthogonalized(matrix, group, self._products) for matrix in matrices]
            )
            for (mine, _), result in zip(pairs, results, strict=True):
                mine.copy_(result.view_as(mine))

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


def orthogonalized_batch(matrices_NRC: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return N matrices of one shape, (N, R, C), orthogonalised in bf16 by the steps of PyTorch's function for one."""
    wide = matrices_NRC.shape[1] <= matrices_NRC.shape[2]
    x_NRC = (matrices_NRC if wide else matrices_NRC.mT).bfloat16()
    x_NRC = x_NRC / x_NRC.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        square_NRR = torch.bmm(x_NRC, x_NRC.mT)
        factor_NRR = torch.baddbmm(square_NRR, square_NRR, square_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, factor_NRR, x_NRC, beta=a)
    return x_NRC if wide else x_NRC.mT


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
