"""What holds several projections, cut apart, and Muon in float64."""

from __future__ import annotations

import torch

from headway.config import ModelConfig
from headway.models.shape import Shape

COEFFICIENTS, ITERATIONS, MOMENTUM = (3.4445, -4.7750, 2.0315), 5, 0.95


def apart(config: ModelConfig, name: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """The matrices of the projections, cut as the forward passes of the layers cut what they compute."""
    shape, columns = Shape.of(config), matrix.shape[1]
    if name.endswith("qkv.weight"):
        groups = matrix.reshape(shape.kv_heads, shape.queries_per_group + 2, shape.head_dim, columns)
        return {
            "q": groups[:, :-2].reshape(-1, columns),
            "k": groups[:, -2].reshape(-1, columns),
            "v": groups[:, -1].reshape(-1, columns),
        }
    if name.endswith("gate_up_groups.weight"):
        groups = matrix.reshape(shape.ffn_groups, 2, -1, columns)
        return {"gate": groups[:, 0].reshape(-1, columns), "up": groups[:, 1].reshape(-1, columns)}
    if name.endswith("shared.gate_up.weight"):
        gate, up = matrix.chunk(2)
        return {"gate": gate, "up": up}
    if name.endswith("mamba.input.weight"):
        sizes = config.mamba
        assert sizes is not None
        gate, mixed, steps = matrix.split([sizes.width, sizes.channels, sizes.heads])
        states = sizes.groups * sizes.state_dim
        inputs, b, c = mixed.split([sizes.width, states, states])
        return {"gate": gate, "inputs": inputs, "b": b, "c": c, "steps": steps}
    return {"": matrix}


def exact(start: torch.Tensor, gradients: torch.Tensor, rate: float, decay: float) -> torch.Tensor:
    """Return the change of a matrix by Muon (Liu et al. 2025), with the coefficients of Jordan et al. 2024."""
    weight, momentum = start.double(), torch.zeros_like(start, dtype=torch.float64)
    for gradient in gradients.double():
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        x = (1 - MOMENTUM) * gradient + MOMENTUM * momentum
        x = x / x.norm()
        a, b, c = COEFFICIENTS
        for _ in range(ITERATIONS):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        weight = weight * (1 - rate * decay) - rate * 0.2 * max(weight.shape) ** 0.5 * x
    return weight - start.double()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())
