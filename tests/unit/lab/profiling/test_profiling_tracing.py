"""What is read from a trace."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from headway.lab.profiling.tracing import Tracing


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


def _event(name: str, start: int, end: int, device: str = "CPU") -> SimpleNamespace:
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: start,
        end_ns=lambda: end,
        device_type=lambda: f"DeviceType.{device}",
        shapes=lambda: [[4, 8], [8, 2]],
    )


def test_marks_on_the_device_do_not_move_products_to_another_pass() -> None:
    """Kernels run later than they are called: the device's forward mark may cover calls of the backward pass."""
    host = [
        _event("headway.forward", 0, 100),
        _event("headway.backward", 100, 300),
        *(_event("aten::mm", start, start + 10) for start in (50, 150, 200, 250)),
    ]
    device = [_event("headway.forward", 120, 220, "CUDA"), _event("headway.backward", 220, 400, "CUDA")]
    for events in (host, host + device):
        tracing = Tracing(torch.device("cpu"), snapshot=False)
        results = SimpleNamespace(events=lambda events=events: events)
        tracing._profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
        assert tracing.forward_share() == 0.25
