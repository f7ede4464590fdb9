"""Optimizers: how they are built from a config, and their state as named tensors."""

from headway.training.optimizer.build import build_optimizer, check_offload, hidden_matrices
from headway.training.optimizer.combined import Combined
from headway.training.optimizer.state import (
    materialize,
    optimizer_tensors,
    scales_while_updating,
    set_learning_rate,
    update,
    update_unless,
)

__all__ = [
    "Combined",
    "build_optimizer",
    "hidden_matrices",
    "materialize",
    "optimizer_tensors",
    "check_offload",
    "scales_while_updating",
    "set_learning_rate",
    "update",
    "update_unless",
]
