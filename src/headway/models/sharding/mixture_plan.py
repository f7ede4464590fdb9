"""Mixtures of experts under tensor parallelism.

Between layers each tensor-parallel worker has some positions of the residual stream. A mixture keeps that layout: the
worker routes its own tokens, and routed and shared experts compute them with whole matrices. Cutting those matrices too
would leave each worker narrow slices and gather all positions first. Expert parallelism saves the memory instead
(`headway.parallel.experts`).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from headway.models.layers.moe import MixtureOfExperts


class OwnPositions(ParallelStyle):
    """Runs a mixture on this worker's tokens and returns them in the layout of the residual stream.

    Leaves routed experts alone: expert parallelism may have sharded them before.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MixtureOfExperts)
        # The mixture uses the router's weight directly, not through the module.
        weight = DTensor.from_local(module.router.weight.detach(), device_mesh, [Replicate()], run_check=False)
        module.router.weight = nn.Parameter(weight, requires_grad=module.router.weight.requires_grad)
        if module.shared is not None:
            SequenceParallel(sequence_dim=0)._apply(module.shared.gate_up, device_mesh)
            SequenceParallel(sequence_dim=0, use_local_output=True)._apply(module.shared.down, device_mesh)

        def own(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            x_BTD, *rest = given
            rank = device_mesh.get_local_rank()
            workers = device_mesh.size()
            return x_BTD.to_local(), *(t if t is None else t.chunk(workers, dim=1)[rank] for t in rest)

        module.register_forward_pre_hook(own)
        return module
