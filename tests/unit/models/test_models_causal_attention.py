"""Causal attention by products: what it computes, with which bits, and where it is used."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from headway.models.layers import attention
from headway.models.layers import causal_attention as module
from headway.models.layers.attention import Positions, attend, has_causal_products
from headway.models.layers.causal_attention import causal_attention

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(length: int, heads: int = 4, kv_heads: int = 2, rows: int = 3, width: int = 16, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, length, n, width, generator=generator) for n in (heads, kv_heads, kv_heads))  # type: ignore[return-value]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    turned = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True).transpose(1, 2)


def with_gradients(attend: Any, given: Inputs, dtype: torch.dtype) -> list[torch.Tensor]:
    """What it gives, and the gradients of a weighted sum of that; fp64."""
    q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in given)
    y = attend(q, k, v)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9))
    y.backward(weights.to(dtype))
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [x.detach().double() for x in (y, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 5, 127, 128, 129, 300])
def test_it_is_causal_attention(length: int, heads: int, kv_heads: int) -> None:
    given = inputs(length, heads, kv_heads)
    for mine, right in zip(
        with_gradients(causal_attention, given, torch.float32),
        with_gradients(reference, given, torch.float64),
        strict=True,
    ):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=2e-5)


def test_in_bf16_it_is_as_exact_as_pytorchs_kernel() -> None:
    given = tuple(x.bfloat16().float() for x in inputs(200))
    right = with_gradients(reference, given, torch.float64)  # type: ignore[arg-type]

    def errors(attend: Any) -> list[float]:
        found = with_gradients(attend, given, torch.bfloat16)  # type: ignore[arg-type]
        return [float((mine - exact).abs().mean()) for mine, exact in zip(found, right, strict=True)]

    assert all(ours < 1.1 * theirs for ours, theirs in zip(errors(causal_attention), errors(reference), strict=True))


@pytest.mark.parametrize("score_bytes", [1, 4 * 128 * 200, 2**14, 2**30])
def test_blocks_of_rows_and_heads_change_nothing_but_memory(score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(200, heads=6, kv_heads=3)
    usual = with_gradients(causal_attention, given, torch.float32)
    monkeypatch.setattr(module, "_SCORE_BYTES", score_bytes)
    for mine, right in zip(with_gradients(causal_attention, given, torch.float32), usual, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_what_comes_later_changes_no_bit() -> None:
    q, k, v = inputs(150)
    before = causal_attention(q, k, v)
    q[:, 140:], k[:, 140:], v[:, 140:] = 7.0, 8.0, 9.0
    after = causal_attention(q, k, v)
    assert torch.equal(before[:, :140], after[:, :140]) and not torch.equal(before[:, 140:], after[:, 140:])


def test_inputs_may_be_views() -> None:
    q, k, v = inputs(40)
    whole = torch.cat((q, k, v), dim=2)
    parts = whole.split([4, 2, 2], dim=2)
    assert torch.equal(causal_attention(*parts), causal_attention(q, k, v))
    turned = torch.randn(3, 4, 40, 16).transpose(1, 2)
    assert torch.equal(causal_attention(turned, k, v), causal_attention(turned.contiguous(), k, v))


def test_autocast_around_it_changes_nothing() -> None:
    given = inputs(40)
    with torch.autocast("cpu", torch.bfloat16):
        y = causal_attention(*given)
    assert y.dtype == torch.float32 and torch.equal(y, causal_attention(*given))


def test_compiled_code_has_the_same_bits() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: causal_attention(q, k, v) * 1, backend="aot_eager", fullgraph=True)
    given = inputs(140)
    for mine, right in zip(
        with_gradients(compiled, given, torch.float32),
        with_gradients(causal_attention, given, torch.float32),
        strict=True,
    ):
        assert torch.equal(mine, right)


def test_it_is_an_operator_as_pytorch_wants_them() -> None:
    given = tuple(x.requires_grad_() for x in inputs(20))
    for name in ("causal_attention", "causal_attention_backward"):
        arguments = given if name == "causal_attention" else (torch.ones_like(given[0]), *(x.detach() for x in given))
        torch.library.opcheck(getattr(torch.ops.headway, name).default, arguments)


def test_the_compiler_is_not_loaded_for_it() -> None:
    """It takes a second, and eager runs do without."""
    program = (
        "import sys, torch\n"
        "from headway.models.layers.causal_attention import causal_attention\n"
        "x = torch.randn(1, 20, 2, 8, requires_grad=True)\n"
        "causal_attention(x, x, x).sum().backward()\n"
        "assert x.grad is not None and 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def seen(*given: torch.Tensor) -> torch.Tensor:
        used.append(1)
        return causal_attention(*given)

    monkeypatch.setattr(attention, "causal_attention", seen)
    tables = torch.zeros(32, 1, 1, 16), torch.zeros(32, 1, 1, 16)

    def uses(length: int = 32, dtype: torch.dtype = torch.float32, keys: int | None = None, **how: Any) -> bool:
        used.clear()
        q, k, v = (x.to(dtype) for x in inputs(length))
        more = 0 if keys is None else keys - length
        k, v = (torch.cat((x, x[:, :more]), dim=1) for x in (k, v))
        attend(q, k, v, Positions(*tables, **({"is_causal": True} | how)))
        return bool(used)

    monkeypatch.setattr(attention, "_by_products", False)
    assert not uses() and not uses(dtype=torch.bfloat16), "PyTorch's kernel is faster there"
    monkeypatch.setattr(attention, "_by_products", True)
    assert uses() and uses(dtype=torch.bfloat16)
    assert not uses(dtype=torch.float16) and not uses(length=15), "no faster there"
    assert not uses(mask=torch.ones(32, 32, dtype=torch.bool).tril(), is_causal=False)
    assert not uses(keys=40, is_causal=False), "some are in a cache"
    q, k, _ = inputs(32)
    assert has_causal_products(q, k) and not has_causal_products(q.to("meta"), k.to("meta"))
