"""Causal attention on the CPU by matrix products.

For rows of some hundred positions it is several times as fast as PyTorch's kernel; like that kernel it needs memory
linear in the row length.

The scores of one block of queries exist at a time, in fp32, and are recomputed in the backward pass (Dao et al. 2022,
algorithm 4). Keys after a block are skipped.

It is a custom operator, so that compiled code calls it as eager code does, with identical bits.

Tensor-name suffixes: B rows, T positions, K key-value heads, G query heads of each, H width of a head, X = B * K, Q = G
* queries of a block, S keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

#: Queries per block. Half of the scores in the diagonal block are wasted.
_BLOCK = 128
#: Bytes of scores per block: about the size of a core's cache.
_SCORE_BYTES = 2 * 2**20

_library = torch.library.Library("headway", "DEF")
_library.define("causal_attention(Tensor q, Tensor k, Tensor v) -> Tensor")
_library.define("causal_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)")


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute scaled dot-product attention of each position to itself and earlier ones; differentiable once.

    Args:
        q: (B, T, heads, H), on the CPU.
        k, v: (B, T, kv_heads, H), in the dtype of `q`; query head i uses head i // (heads / kv_heads).

    Returns:
        (B, T, heads, H), contiguous.
    """
    y: torch.Tensor = torch.ops.headway.causal_attention(q, k, v)
    return y


class _Block(NamedTuple):
    """Some rows, some of their key-value heads, and some queries with the keys that they see."""

    rows: slice
    heads: slice
    queries: slice
    keys: slice


def _blocks(q: torch.Tensor, kv_heads: int) -> Iterator[_Block]:
    """Yield all blocks; for the same rows and heads, the last queries, which see all keys, come first."""
    rows, length, heads, _ = q.shape
    for end in range(length, 0, -_BLOCK):
        start = max(0, end - _BLOCK)
        fits = max(1, _SCORE_BYTES // (4 * (heads // kv_heads) * (end - start) * end))  # key-value heads
        some_heads = min(fits, kv_heads)
        some_rows = max(1, fits // kv_heads)
        for row in range(0, rows, some_rows):
            for head in range(0, kv_heads, some_heads):
                which = slice(row, row + some_rows), slice(head, head + some_heads)
                yield _Block(*which, slice(start, end), slice(0, end))


def _cut_queries(x: torch.Tensor, block: _Block, kv_heads: int) -> torch.Tensor:
    """View a block of (B, T, heads, H) as (B, K, G, T, H)."""
    x_BTKGH: torch.Tensor = x[block.rows, block.queries].unflatten(2, (kv_heads, -1))[:, :, block.heads]
    return x_BTKGH.permute(0, 2, 3, 1, 4)


def _queries(x: torch.Tensor, block: _Block, kv_heads: int) -> torch.Tensor:
    """Return a block of (B, T, heads, H) as (X, Q, H), in fp32."""
    return _cut_queries(x, block, kv_heads).float().flatten(0, 1).flatten(1, 2)


def _keys(x: torch.Tensor, block: _Block) -> torch.Tensor:
    """Return a block of (B, T, K, H) as (X, S, H), in fp32."""
    return x[block.rows, block.keys, block.heads].transpose(1, 2).float().flatten(0, 1)


def _attended(q_XQH: torch.Tensor, k_XSH: torch.Tensor, block: _Block, hidden_TT: torch.Tensor) -> torch.Tensor:
    """Compute the attention weights of each query over the keys, (X, Q, S), fp32; `q_XQH` is already scaled."""
    s_XQS = torch.bmm(q_XQH, k_XSH.transpose(1, 2))
    size = block.queries.stop - block.queries.start
    s_XQS.unflatten(1, (-1, size))[..., block.queries].add_(hidden_TT[:size, :size])
    torch.softmax(s_XQS, -1, out=s_XQS)
    return s_XQS


def _hidden(q: torch.Tensor) -> torch.Tensor:
    """Return the mask added to scores on the diagonal: zero, or minus infinity for later keys."""
    size = min(_BLOCK, q.shape[1])
    return torch.full((size, size), -torch.inf).triu_(1)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = torch.empty(q.shape, dtype=q.dtype)
    kv_heads = k.shape[2]
    scale = q.shape[3] ** -0.5
    hidden_TT = _hidden(q)
    with torch.autocast("cpu", enabled=False):
        for block in _blocks(q, kv_heads):
            p_XQS = _attended(_queries(q, block, kv_heads) * scale, _keys(k, block), block, hidden_TT)
            y_BKGTH = _cut_queries(y, block, kv_heads)
            y_BKGTH.copy_(torch.bmm(p_XQS, _keys(v, block)).view(y_BKGTH.shape))
    return y


def _backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv_heads = k.shape[2]
    scale = q.shape[3] ** -0.5
    hidden_TT = _hidden(q)
    q_grad = torch.empty(q.shape, dtype=q.dtype)
    # In fp32, since every block of queries adds to them.
    k_grad_BKTH, v_grad_BKTH = (torch.empty(k.transpose(1, 2).shape, dtype=torch.float32) for _ in range(2))
    with torch.autocast("cpu", enabled=False):
        for block in _blocks(q, kv_heads):
            q_XQH = _queries(q, block, kv_heads) * scale
            k_XSH = _keys(k, block)
            grad_XQH = _queries(grad, block, kv_heads)
            p_XQS = _attended(q_XQH, k_XSH, block, hidden_TT)
            v_part = torch.bmm(p_XQS.transpose(1, 2), grad_XQH)
            s_grad_XQS = torch.bmm(grad_XQH, _keys(v, block).transpose(1, 2))
            torch._softmax_backward_data(s_grad_XQS, p_XQS, -1, torch.float32, grad_input=s_grad_XQS)
            del p_XQS
            q_grad_BKGTH = _cut_queries(q_grad, block, kv_heads)
            q_grad_BKGTH.copy_(torch.bmm(s_grad_XQS, k_XSH).mul_(scale).view(q_grad_BKGTH.shape))
            k_part = torch.bmm(s_grad_XQS.transpose(1, 2), q_XQH)
            for total_BKTH, part in ((k_grad_BKTH, k_part), (v_grad_BKTH, v_part)):
                target = total_BKTH[block.rows, block.heads, block.keys]
                part = part.view(target.shape)
                target.copy_(part) if block.queries.stop == q.shape[1] else target.add_(part)
    return q_grad, k_grad_BKTH.transpose(1, 2).to(k.dtype), v_grad_BKTH.transpose(1, 2).to(v.dtype)


_library.impl("causal_attention", _forward, "CPU")
_library.impl("causal_attention_backward", _backward, "CPU")


def _shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape)


def _shapes(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    turned = [x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (k, v)]
    return q.new_empty(q.shape), turned[0], turned[1]


torch.library.register_fake("headway::causal_attention", _shape, lib=_library)
torch.library.register_fake("headway::causal_attention_backward", _shapes, lib=_library)


def _differentiate(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gradients: tuple[torch.Tensor, ...] = torch.ops.headway.causal_attention_backward(grad, *ctx.saved_tensors)  # type: ignore[attr-defined]
    return gradients


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


torch.library.register_autograd("headway::causal_attention", _differentiate, setup_context=_keep, lib=_library)
