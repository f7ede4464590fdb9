"""The norm of a gradient whose bits do not depend on who has which rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.parallel.norms import norm_parts_of, total_norm


def gradients() -> list[torch.Tensor]:
    torch.manual_seed(0)
    scales = torch.tensor([1e-20, 1e-3, 1.0, 1e4, 1e-9, 7.0, 0.0, 1.0])
    return [torch.randn(8, 33) * scales[:, None], torch.randn(8), torch.randn(8, 2, 5), torch.randn(())]


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_an_exact_norm_is_the_same_for_every_cut_between_rows(cut: int) -> None:
    *cuttable, scalar = gradients()
    parts = [norm_parts_of([g[:cut] for g in cuttable], exact=True)]
    parts.append(norm_parts_of([*(g[cut:] for g in cuttable), scalar], exact=True))
    whole = total_norm([norm_parts_of(gradients(), exact=True)])
    assert total_norm(parts) == whole
    assert whole == pytest.approx(float(torch.nn.utils.get_total_norm(gradients())), rel=1e-6)
    assert total_norm([norm_parts_of([], exact=True), *parts]) == whole, "a worker may have nothing"


def test_what_is_not_finite_makes_the_norm_nan() -> None:
    for bad in (math.nan, math.inf):
        assert math.isnan(total_norm([norm_parts_of([torch.tensor([1.0, bad])], exact=True)]))


def test_an_exact_norm_waits_for_the_device_once_however_many_gradients_there_are() -> None:
    class Waits(TorchDispatchMode):
        """What copies numbers to the host, or would wait for them on a GPU."""

        seen = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += operator.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.frexp)
            return operator(*args, **(kwargs or {}))

    waits = []
    for copies in (1, 20):
        with Waits() as mode:  # type: ignore[no-untyped-call]
            norm_parts_of(gradients() * copies, exact=True)
        waits.append(mode.seen)
    assert waits[0] == waits[1] > 0
