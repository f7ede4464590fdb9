"""One optimizer made of several, for one model."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer


class Combined(Optimizer):
    """Several optimizers of one model behind the interface of one."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        # The groups are the parts' own dictionaries, so a learning rate set here is set there.
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every part."""
        for part in self.parts:
            part.step()
