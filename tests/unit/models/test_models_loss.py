from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from headway.core.types import IGNORE_TARGET
from headway.models import loss as loss_module
from headway.models.loss import default_chunk_rows, linear_cross_entropy


def _inputs(rows: int = 50, dim: int = 16, vocab: int = 37, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, dim, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[::7] = IGNORE_TARGET
    return x, weight, targets


def _full(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum", ignore_index=IGNORE_TARGET)


@pytest.mark.parametrize("chunk_rows", [1, 16, 50, 1000, None])
def test_equals_full_logits(chunk_rows: int | None) -> None:
    x, weight, targets = _inputs()
    expected = _full(x, weight, targets)
    expected_grads = torch.autograd.grad(expected, (x, weight))
    loss = linear_cross_entropy(x, weight, targets, chunk_rows=chunk_rows)
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, weight)), expected_grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk_rows", [16, None])
def test_capped_logits_equal_full_ones(chunk_rows: int | None, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_compiled", lambda function: function)
    x, weight, targets = _inputs()
    capped = 3.0 * torch.tanh(F.linear(x, weight) / 3.0)
    expected = F.cross_entropy(capped, targets, reduction="sum", ignore_index=IGNORE_TARGET)
    expected_grads = torch.autograd.grad(expected, (x, weight))
    loss = linear_cross_entropy(x, weight, targets, chunk_rows=chunk_rows, compiled=compiled, softcap=3.0)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, weight)), expected_grads, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets, softcap=3.0), expected)
    assert (expected - _full(x, weight, targets)).abs() > 1


def test_gradient_is_scaled_and_may_be_taken_twice() -> None:
    x, weight, targets = _inputs()
    loss = linear_cross_entropy(x, weight, targets, chunk_rows=16) * 0.25
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight))
    expected = torch.autograd.grad(_full(x, weight, targets) * 0.25, (x, weight))
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bf16(weights: torch.dtype) -> None:
    """Under autocast with fp32 weights, and with bf16 weights: as close to fp64 as full logits in bf16 are."""
    x, weight, targets = _inputs(200, 64, 101, weights)
    exact = torch.autograd.grad(_full(x.double(), weight.double(), targets), (x, weight))
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        ours = linear_cross_entropy(x, weight, targets, chunk_rows=32)
        full = _full(x, weight, targets)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, full, rtol=2e-3, atol=0)
    full_grads = torch.autograd.grad(full, (x, weight))
    for mine, theirs, right in zip(torch.autograd.grad(ours, (x, weight)), full_grads, exact, strict=True):
        assert mine.dtype == weights
        # A full product adds up all rows before it rounds, so the sum over chunks may be a little farther off.
        assert (mine - right).float().norm() <= 1.5 * (theirs - right).float().norm()


def test_logits_far_apart_stay_finite() -> None:
    x, weight, targets = _inputs()
    with torch.no_grad():
        weight.mul_(1000)
    loss = linear_cross_entropy(x, weight, targets, chunk_rows=16)
    torch.testing.assert_close(loss, _full(x, weight, targets))
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, weight)))


def test_all_targets_ignored() -> None:
    x, weight, targets = _inputs()
    loss = linear_cross_entropy(x, weight, torch.full_like(targets, IGNORE_TARGET), chunk_rows=16)
    assert loss.item() == 0.0
    for gradient in torch.autograd.grad(loss, (x, weight)):
        assert not gradient.any()


def test_never_more_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = loss_module._chunk_loss

    def watched(logits: torch.Tensor, targets: torch.Tensor, part: Any) -> Any:
        seen.append(logits.shape[0])
        return original(logits, targets, part)

    monkeypatch.setattr(loss_module, "_chunk_loss", watched)
    x, weight, targets = _inputs()
    linear_cross_entropy(x, weight, targets, chunk_rows=16).backward()
    assert seen == [16, 16, 16, 2]


def test_largest_tensor_of_a_step_is_a_chunk() -> None:
    """Whatever the implementation calls: no operation gives a result as large as the full logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for item in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(item, torch.Tensor):
                    largest = max(largest, item.numel())
            return result

    x, weight, targets = _inputs(rows=512, dim=4, vocab=64)
    with Watch():
        linear_cross_entropy(x, weight, targets, chunk_rows=64).backward()
    assert largest == 64 * 64


def test_the_gradient_of_the_projection_is_there_once() -> None:
    """It is as large as the weights; scaling it in the backward pass makes no second one."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal made
            before = {a.data_ptr() for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)}
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape == weight.shape:
                made += result.data_ptr() not in before
            return result

    x, weight, targets = _inputs()
    with Watch():
        (linear_cross_entropy(x, weight, targets, chunk_rows=16) * 0.25).backward()
    assert made == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_computes_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As dynamo traces it; what inductor makes of the graph is its own matter, and slow to wait for."""
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.append(graph)
        return graph.forward

    def compiled(function: Any) -> Any:
        return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)

    monkeypatch.setattr(loss_module, "_compiled", functools.cache(compiled))
    monkeypatch.setattr(loss_module, "_CACHED_ROWS", 8)
    x, weight, targets = _inputs()
    results = []
    for each in (False, True):
        loss = linear_cross_entropy(x.to(dtype), weight, targets, chunk_rows=16, compiled=each) * 0.25
        results.append(torch.autograd.grad(loss, (x, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(traced) == 2, "one for 8 rows at a time, one for the rest"


def test_evaluation_does_no_gradient_work() -> None:
    x, weight, targets = _inputs()
    expected = linear_cross_entropy(x, weight, targets, chunk_rows=16).detach()
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets, chunk_rows=16)
    assert not loss.requires_grad
    assert torch.equal(loss, expected)


def test_evaluation_keeps_no_chunk_in_fp32_on_a_cpu() -> None:
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                largest[0] = max(largest[0], result.numel())
            return result

    x, weight, targets = _inputs(300, 32, 500)
    for dtype in (torch.float32, torch.bfloat16):
        expected = _full(x.to(dtype), weight.to(dtype), targets)
        with Watch(), torch.no_grad():
            loss = linear_cross_entropy(x.to(dtype), weight.to(dtype), targets, chunk_rows=128)
        torch.testing.assert_close(loss, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0.0)
    assert largest[0] > 32 * 500, "products in fp32 are as large as chunks"
    largest[0] = 0
    with Watch(), torch.no_grad():
        linear_cross_entropy(x.bfloat16(), weight.bfloat16(), targets, chunk_rows=128)
    assert largest[0] == 32 * 500


def test_same_bits_every_time() -> None:
    x, weight, targets = _inputs(300, 32, 500)
    results = []
    for _ in range(2):
        loss = linear_cross_entropy(x, weight, targets, chunk_rows=64)
        results.append((loss.detach(), *torch.autograd.grad(loss, (x, weight))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_chunks_fit_the_device() -> None:
    assert default_chunk_rows("cpu", 8192) == 512
    assert default_chunk_rows("cpu", 10**6) == 256
    assert default_chunk_rows("cuda", 32768) == 8192


@pytest.mark.parametrize(("vocabulary", "rows"), [(50257, 5120), (100352, 2560), (256000, 1024), (10**7, 256)])
def test_chunks_of_accelerators_fill_tiles(vocabulary: int, rows: int) -> None:
    assert default_chunk_rows("cuda", vocabulary) == rows
    assert rows % 256 == 0 and (rows == 256 or 4 * vocabulary * rows <= 2**30)
