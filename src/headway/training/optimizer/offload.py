"""An optimizer whose moments and updates are in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer


class HostOffload(Optimizer):
    """Runs an optimizer on copies of the weights in host memory (Ren et al. 2021, "ZeRO-Offload", section 4.1).

    Per parameter and step, the gradient travels to the host and the weight back. The device keeps weights and
    gradients; the host keeps another copy of the weights, and the moments, which are the saved state.

    Args:
        parameters: Parameters on the device.
        build: Makes the optimizer for the copies, which have the same order.
        host: The device of the copies.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        build: Callable[[Sequence[nn.Parameter]], Optimizer],
        host: torch.device,
    ) -> None:
        pinned = host.type == "cpu" and any(p.is_cuda for p in parameters)
        self._host = {p: nn.Parameter(_empty_on(host, p, pinned)) for p in parameters}
        device_side: dict[torch.Tensor, nn.Parameter] = {copy: p for p, copy in self._host.items()}
        self._inner = build(list(self._host.values()))
        self._versions: dict[nn.Parameter, int] = {}
        groups = [
            {**group, "params": [device_side[copy] for copy in group["params"]]} for group in self._inner.param_groups
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in mine.items() if key != "params"})
        with_gradient = [p for p in self._host if p.grad is not None]
        for p in with_gradient:
            self._fetch(p)
        _finish(with_gradient)
        # The state of this object is saved, loaded and cleared; the inner optimizer works on the same tensors.
        self._inner.state.clear()
        self._inner.state.update({copy: self.state[p] for p, copy in self._host.items() if p in self.state})
        self._inner.step()
        for p in with_gradient:
            self.state[p] = self._inner.state[self._host[p]]
            p.copy_(self._host[p], non_blocking=True)
            self._versions[p] = p._version
        _finish(with_gradient)

    def _fetch(self, p: nn.Parameter) -> None:
        """Copy what the update needs: the gradient, and the weight if something else has changed it."""
        copy = self._host[p]
        assert p.grad is not None
        if self._versions.get(p) != p._version:
            copy.copy_(p, non_blocking=True)
        if copy.grad is None:
            copy.grad = _empty_on(copy.device, p.grad, copy.is_pinned() if copy.device.type == "cpu" else False)
        copy.grad.copy_(p.grad, non_blocking=True)


def _empty_on(device: torch.device, like: torch.Tensor, pinned: bool) -> torch.Tensor:
    return torch.empty_like(like, device=device, requires_grad=False, pin_memory=pinned)


def _finish(parameters: Sequence[torch.Tensor]) -> None:
    """Wait for the copies, since the host reads its side at once."""
    for device in {p.device for p in parameters if p.is_cuda}:
        torch.cuda.synchronize(device)
