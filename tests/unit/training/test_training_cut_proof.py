"""Whether an optimizer's bits depend on cuts is tried, not believed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from headway.config import Config
from headway.core.errors import ConfigError
from headway.training.cut_proof import refuse_cuts_that_show
from headway.training.optimizer import build_optimizer

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 2])
def test_adamw_of_elastic_runs_passes(threads: int) -> None:
    before = torch.get_num_threads()
    refuse_cuts_that_show(partial(build_optimizer, Config.model_validate({}).optimizer, elastic=True), CPU, threads)
    assert torch.get_num_threads() == before


class TailSensitive(torch.optim.SGD):
    """Rounds the last elements of a buffer otherwise, as a kernel without a vector for them might."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    tail = p.view(-1)[p.numel() // 8 * 8 :]
                    tail.copy_(torch.nextafter(tail, torch.full_like(tail, 9.0)))


def test_an_optimizer_whose_bits_depend_on_cuts_is_refused() -> None:
    def build(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
        return TailSensitive(model.parameters(), lr=0.1)

    with pytest.raises(ConfigError, match="where a matrix is cut") as error:
        refuse_cuts_that_show(build, CPU, 1)
    assert "zero1" in error.value.fix
