"""What is read from a trace."""

from __future__ import annotations

import torch

from headway.profiling.tracing import Tracing


def test_products_are_found_whatever_they_are_called_with() -> None:
    a, b, bias, out = torch.ones(32, 16), torch.ones(16, 8), torch.ones(32, 8), torch.empty(32, 8)
    tracing = Tracing(torch.device("cpu"), snapshot=False)
    tracing.start()
    torch.mm(a, b)
    torch.mm(a, b, out=out)  # as compiled code does
    torch.addmm(bias, a, b)
    torch.addmm(bias, a, b, out=out)
    out.addmm_(a, b)
    torch.bmm(a[None], b[None])
    tracing.stop()
    products = tracing.products(1)
    assert sum(product.calls for product in products) == 6
    assert {product.shape for product in products} == {"32 x 16 x 8"}
    assert {product.flops for product in products} == {2.0 * 32 * 16 * 8}
