"""Attention masks, token positions, and the kernels that compute attention.

Tensor-name suffixes: B rows, T positions, S positions including the cached ones, N = B * T, H width of a head.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from headway.core.machine.cores import has_bf16_tiles
from headway.core.startup.dtensors import is_dtensor
from headway.models.layers.causal_attention import causal_attention
from headway.models.sharding.context import SharedPositions

# Before torch 2.12 `varlen_attn` needs one key-value head per query head.
_VARLEN_SHARES_HEADS = TorchVersion(torch.__version__) >= "2.12"
_VARLEN_MAX_HEAD_DIM = 256
# For fewer positions the call overhead of `causal_attention` exceeds its computation.
_PRODUCT_LENGTH = 16
# Evaluated at import: torch.compile cannot trace this call.
_by_products = not has_bf16_tiles()


class PackedDocuments(NamedTuple):
    """The document of each token in packed rows; attention does not cross document boundaries."""

    numbers_BT: torch.Tensor
    """Integers, (B, T); a document is a run of equal numbers within a row. Padding counts as a document."""
    positions_BT: torch.Tensor
    """int64, (B, T): the position of each token in its document, from 0."""
    bounds: torch.Tensor
    """int32, (segments + 1,): document starts in the flattened (N) tokens, then the end, which may be repeated."""

    @classmethod
    def of(cls, numbers_BT: torch.Tensor) -> PackedDocuments:
        """Derive every field from the document numbers; on an accelerator this waits for the device."""
        first_BT = torch.ones_like(numbers_BT, dtype=torch.bool)
        first_BT[:, 1:] = numbers_BT[:, 1:] != numbers_BT[:, :-1]
        place_T = torch.arange(numbers_BT.shape[1], device=numbers_BT.device)
        positions_BT = place_T - torch.where(first_BT, place_T, 0).cummax(dim=1).values
        starts = first_BT.flatten().nonzero().flatten()
        bounds = torch.cat((starts, starts.new_full((1,), first_BT.numel()))).to(torch.int32)
        return cls(numbers_BT, positions_BT, bounds)


class Span(NamedTuple):
    """A run of queries in a row that workers share, and the keys that those queries see."""

    length: int
    """Number of queries; spans are contiguous in the worker's tensors."""
    end: int
    """First key that the queries do not see, counted in the whole row."""
    mask: torch.Tensor | None
    """As in `Positions`, for keys 0 to `end`."""
    is_causal: bool


class Positions(NamedTuple):
    """The positions of the tokens of a forward pass and the keys that each sees; every layer uses the same ones."""

    cos: torch.Tensor
    """(T, 1, 1, R) or (B, T, 1, 1, R), from `headway.models.layers.rope.rotary_tables`."""
    sin: torch.Tensor
    mask: torch.Tensor | None = None
    """True where a query sees a key, (T, S) or (B, 1, T, T)."""
    is_causal: bool = False
    """Attention is plain causal; kernels are faster with this flag than with a mask."""
    window: int | None = None
    """Sliding window, used with `bounds` and `segments`."""
    bounds: torch.Tensor | None = None
    """`PackedDocuments.bounds` for the variable-length kernel, instead of a mask."""
    segments: list[tuple[int, int]] | None = None
    """Documents in the flattened tokens, computed one by one, instead of a mask."""
    counted: torch.Tensor | None = None
    """True for tokens that enter the loss, (B, T); used by expert routers, not by attention."""
    documents: torch.Tensor | None = None
    """Number of each token's document, (B, T), of packed rows whose layers carry a state."""
    shared: SharedPositions | None = None
    """Set if workers share the positions of a row; `spans` then holds what this worker's queries see."""
    spans: list[Span] | None = None
    rows: list[Positions] | None = None
    """Set if each row continues a sequence of its own length (`cache.RowCaches`)."""


def attention_mask(
    start: int, length: int, window: int | None, device: torch.device
) -> tuple[torch.Tensor | None, bool]:
    """Return the mask for queries at positions `start` to `start + length` and keys from position 0 on.

    Returns:
        A mask (length, start + length), True where a query sees a key, or None if none is needed; and whether
        attention is plain causal, which kernels compute faster than a mask.
    """
    end = start + length
    windowed = window is not None and end > window
    if start == 0 and not windowed:
        return None, True
    if length == 1 and not windowed:
        return None, False
    query_T1 = torch.arange(start, end, device=device)[:, None]
    key_S = torch.arange(end, device=device)
    mask_TS = key_S <= query_T1
    if window is not None:
        mask_TS &= key_S > query_T1 - window
    return mask_TS, False


def document_mask(numbers_BT: torch.Tensor, window: int | None, start: int = 0) -> torch.Tensor:
    """Return the mask that is True where a query sees a key, (B, 1, T - start, T).

    A query sees the keys up to itself, within the window and within its document.

    Args:
        numbers_BT: As in `PackedDocuments`.
        window: Sliding window, if any.
        start: The first position that is a query.
    """
    key_T = torch.arange(numbers_BT.shape[1], device=numbers_BT.device)
    query_T1 = key_T[start:, None]
    mask_BTT = (numbers_BT[:, start:, None] == numbers_BT[:, None, :]) & (key_T <= query_T1)
    if window is not None:
        mask_BTT &= key_T > query_T1 - window
    return mask_BTT.unsqueeze(1)


def document_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, compiled: bool = False, capped: bool = False
) -> Literal["varlen", "segments", "mask"]:
    """Choose how attention is kept inside documents.

    `varlen`: flash attention of variable length, for half precision on CUDA; it computes no masked pair. `segments`:
    one call per document, on the CPU, where a call is cheap; it computes no masked pair either. `mask`: all pairs under
    a mask, for all other cases (`capped` scores among them), and for compiled code on the CPU, whose graph must not
    depend on document boundaries.
    """
    if device.type == "cpu":
        return "mask" if compiled else "segments"
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= _VARLEN_MAX_HEAD_DIM
    return "varlen" if fits and not capped and _has_flash(device) else "mask"


def _has_flash(device: torch.device) -> bool:
    """Return whether flash attention runs on the device: NVIDIA GPUs from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major >= 8


def packed_positions(
    cos: torch.Tensor, sin: torch.Tensor, documents: PackedDocuments, window: int | None, kernel: str
) -> Positions:
    """Build positions that restart with each document, and attention that stays inside it.

    Args:
        cos, sin: `headway.models.layers.rope.rotary_tables`, for at least T positions.
        documents: The documents of the rows.
        window: Sliding window, if any.
        kernel: From `document_kernel`.
    """
    cos = cos[documents.positions_BT]
    sin = sin[documents.positions_BT]
    if kernel == "varlen":
        return Positions(cos, sin, window=window, bounds=documents.bounds)
    if kernel == "segments":
        ends = documents.bounds.tolist()
        segments = [(start, end) for start, end in pairwise(ends) if end > start]
        return Positions(cos, sin, window=window, segments=segments)
    return Positions(cos, sin, mask=document_mask(documents.numbers_BT, window))


def shared_positions(
    cos: torch.Tensor,
    sin: torch.Tensor,
    length: int,
    shared: SharedPositions,
    *,
    documents: PackedDocuments | None,
    window: int | None,
) -> Positions:
    """Build this worker's positions of rows that it shares with others.

    Args:
        cos, sin: `headway.models.layers.rope.rotary_tables`, for at least `length` positions.
        length: Positions of the whole row.
        shared: How workers split the positions.
        documents: The documents of the whole rows, if attention stays inside documents.
        window: Sliding window, if any.
    """
    if documents is None:
        cos = shared.cut(cos[:length], 0)
        sin = shared.cut(sin[:length], 0)
    else:
        places_BT = shared.cut(documents.positions_BT, 1)
        cos = cos[places_BT]
        sin = sin[places_BT]
    spans = []
    for start, end in shared.spans(length):
        if documents is None:
            mask, is_causal = attention_mask(start, end - start, window, cos.device)
        else:
            mask = document_mask(documents.numbers_BT[:, :end], window, start)
            is_causal = False
        spans.append(Span(end - start, end, mask, is_causal))
    return Positions(cos, sin, shared=shared, spans=spans)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: Positions, softcap: float | None = None
) -> torch.Tensor:
    """Compute scaled dot-product attention under the constraints of `positions`.

    Args:
        q: (B, T, heads, H).
        k, v: (B, S, kv_heads, H); query head i uses head i // (heads / kv_heads). If workers share rows, S counts
            only this worker's positions.
        positions: Positions of the queries, and the keys that they see.
        softcap: Scores s become c tanh(s / c), with this c.

    Returns:
        (B, T, heads, H).
    """
    if positions.bounds is not None:
        return _attend_varlen(q, k, v, positions.bounds, positions.window)
    if positions.segments is not None:
        return _attend_segments(q, k, v, positions.segments, positions.window, softcap=softcap)
    if positions.spans is not None and positions.shared is not None:
        k, v = positions.shared.gather(k, v)
        return _attend_spans(q, k, v, positions.spans, softcap)
    return _attend_all(q, k, v, positions.mask, positions.is_causal, softcap=softcap)


def _attend_all(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    *,
    softcap: float | None,
) -> torch.Tensor:
    if softcap is not None:
        return _attend_capped(q, k, v, _causal_mask(q) if is_causal else mask, softcap)
    if is_causal and has_causal_products(q, k):
        return causal_attention(q, k, v)
    shared = q.shape[2] != k.shape[2]
    if shared and not kernels_share_heads(q.device, q.dtype, mask is not None):
        k = _repeated(k, q)
        v = _repeated(v, q)
        shared = False
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=shared,
    )
    return y.transpose(1, 2)


def _attend_capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, softcap: float
) -> torch.Tensor:
    """Compute attention with capped scores, which no kernel of PyTorch does: all scores of a layer exist, in fp32."""
    k = _repeated(k, q)
    v = _repeated(v, q)
    scale = q.shape[3] ** -0.5
    scores = torch.matmul(q.transpose(1, 2) * scale, k.permute(0, 2, 3, 1)).float()
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.matmul(scores.softmax(-1).to(v.dtype), v.transpose(1, 2)).transpose(1, 2)


def _causal_mask(q: torch.Tensor) -> torch.Tensor:
    """Return the mask of as many keys as queries, (T, T), True where a query sees a key."""
    return torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()


def attends_by_products() -> bool:
    """Return whether this process computes causal attention on the CPU by products.

    At first it does not on processors that multiply bf16 in tiles: PyTorch's kernel is mostly faster there.
    """
    return _by_products


def choose_products(by_products: bool) -> None:
    """Choose how this process computes causal attention on the CPU from now on; the bits depend on it."""
    global _by_products
    _by_products = by_products


def has_causal_products(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether `causal_attention` computes causal attention of (B, T, heads, H) to (B, S, kv_heads, H)."""
    if q.device.type != "cpu" or is_dtensor(q) or not _by_products:
        return False
    return q.dtype in (torch.float32, torch.bfloat16) and _PRODUCT_LENGTH <= q.shape[1] == k.shape[1]


def _attend_spans(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: list[Span], softcap: float | None
) -> torch.Tensor:
    """Compute each run of queries against the keys of the whole row up to the end of the run."""
    parts = []
    for queries, span in zip(q.split([span.length for span in spans], dim=1), spans, strict=True):
        keys = k[:, : span.end]
        values = v[:, : span.end]
        parts.append(_attend_all(queries, keys, values, span.mask, span.is_causal, softcap=softcap))
    return torch.cat(parts, dim=1)


def _attend_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: list[tuple[int, int]],
    window: int | None,
    *,
    softcap: float | None,
) -> torch.Tensor:
    """Compute each document on its own. No document crosses the end of a row, so the rows are flattened into one."""
    q_1N, k_1N, v_1N = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
    parts = []
    for start, end in segments:
        mask, is_causal = attention_mask(0, end - start, window, q.device)
        one = slice(start, end)
        parts.append(_attend_all(q_1N[:, one], k_1N[:, one], v_1N[:, one], mask, is_causal, softcap=softcap))
    return torch.cat(parts, dim=1).view(q.shape)


def _attend_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Compute all documents in one call of the flash kernel; an empty segment costs one block that ends at once."""
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler, which takes a second

    if not _VARLEN_SHARES_HEADS and q.shape[2] != k.shape[2]:
        k = _repeated(k, q)
        v = _repeated(v, q)
    shared: dict[str, Any] = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
    # The longest document is known only on the device; the row length is an upper bound known on the host.
    longest = q.shape[1]
    y_NKH = varlen_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        bounds,
        bounds,
        longest,
        longest,
        # Number of keys to the left and to the right of the query's own position.
        window_size=(-1 if window is None else window - 1, 0),
        **shared,
    )
    assert isinstance(y_NKH, torch.Tensor)
    return y_NKH.view(q.shape)


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Repeat each key-value head for the query heads that share it."""
    return x.unsqueeze(3).expand(-1, -1, -1, q.shape[2] // x.shape[2], -1).flatten(2, 3)


def kernels_share_heads(device: torch.device, dtype: torch.dtype, masked: bool) -> bool:
    """Return whether a fast attention kernel accepts fewer key-value heads than query heads.

    On CUDA only flash attention does, and it supports neither fp32 nor masks nor GPUs before Ampere. With shared heads
    PyTorch would then fall back to the kernel that writes out all scores; repeating the heads is far cheaper.
    """
    if device.type == "cpu":
        return True
    return dtype != torch.float32 and not masked and (device.type != "cuda" or _has_flash(device))
