"""Mixtures of experts between matrices that tensor-parallel workers share.

Between layers each of these workers has some positions of the residual stream, and here it stays so: it routes its own
tokens, and routed and shared experts compute them with whole matrices. Cutting those too would leave each worker slices
of few columns, and bring all positions together first. What a worker saves by cutting it saves by having fewer experts
instead (`headway.parallel.experts`).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from headway.models.moe import MixtureOfExperts


class OwnPositions(ParallelStyle):
    """Gives a mixture this worker's tokens; what it returns are again those of one worker, as the residual stream is.

    Routed experts are left alone: they may have been dealt out before.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MixtureOfExperts)
        # The router's weight is used without its module.
        weight = DTensor.from_local(module.router.weight.detach(), device_mesh, [Replicate()], run_check=False)
        module.router.weight = nn.Parameter(weight, requires_grad=module.router.weight.requires_grad)
        if module.shared is not None:
            SequenceParallel(sequence_dim=0)._apply(module.shared.gate_up, device_mesh)
            SequenceParallel(sequence_dim=0, use_local_output=True)._apply(module.shared.down, device_mesh)

        def own(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            x_BTD, *rest = given
            rank, workers = device_mesh.get_local_rank(), device_mesh.size()
            return x_BTD.to_local(), *(t if t is None else t.chunk(workers, dim=1)[rank] for t in rest)

        module.register_forward_pre_hook(own)
        return module
