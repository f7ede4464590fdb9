"""Bytes that a forward pass of `models/decoder.py` keeps for its backward pass, and what comes and goes meanwhile.

What a layer saves, of N tokens, in the order of the forward pass. E is the size of an element in matrix products, 4 in
fp32 (tf32) and 2 under autocast in bf16 or fp16; the residual stream and the norms are in fp32 in either case.

| tensor | elements | bytes each |
|---|---|---|
| input of the layer, which the attention norm saves | N dim | 4 |
| root mean squares | N | 4 |
| normalised, before the gain (CPU: the norm is made of parts; CUDA has one kernel that computes it again) | N dim | 4 |
| normalised, which the qkv product saves | N dim | E |
| output of the qkv product: the values are a view into it | N (heads + 2 kv_heads) head_dim | E |
| rotated queries and keys | N (heads + kv_heads) head_dim | E |
| with qk_norm also: normalised queries and keys (CPU), fp32 copies (bf16) | N (heads + kv_heads) head_dim | 4 |
| and their root mean squares | N (heads + kv_heads) | 4 |
| keys and values for every query head, where the kernel cannot share them (CUDA in fp32) | 2 N heads head_dim | E |
| output of attention, which the output product saves | N heads head_dim | E |
| logarithms of the sums of exponentials | N heads | 4 |
| with dropout: mask, twice | N dim | CPU: E, CUDA: 1 |
| sum with the residual stream, which the feed-forward norm saves; the rest as for the attention norm | | |
| gate and linear branch | 2 N ffn_dim | E |
| silu(gate), and the product with the linear branch | 2 N ffn_dim | E |
| under autocast: half-precision copies of the layer's matrices | parameters | 2 |

With experts, of N tokens with K experts each, in place of the last two lines:

| tensor | elements | bytes each |
|---|---|---|
| normalised, which the router saves in fp32; shared experts save it in E besides | N dim | 4 |
| logits and scores of the router | 2 N experts | 4 |
| tokens in the order of their experts, and what those made of them | 2 N K dim | E |
| gate and linear branch, silu(gate), product | 4 N K expert_ffn_dim | E |
| the same of shared experts | 4 N shared_ffn_dim | E |

With activation checkpointing `full` only the first line is kept, and one layer at a time has everything; with
`selective` also the outputs of attention and of the first and third product (`models/recompute.py`). Copies of weights
go with what they were made for. Where weights are cut between workers there are none: what products save is then the
weight that was brought together, which is let go of with all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.models.facts import default_chunk_rows
from headway.models.shape import Shape

if TYPE_CHECKING:
    from headway.config import ModelConfig

_FP32, _HALF = 4, 2


def element_bytes(precision: str) -> int:
    """Of a number in matrix products."""
    return _FP32 if precision in ("fp32", "tf32") else _HALF


@dataclass(frozen=True)
class LayerSizes:
    """Of one layer and one micro-batch, in bytes."""

    saved: int
    """All that the layer saves, its input included, without copies of weights."""
    selected: int
    """What `selective` checkpointing keeps of it, its input included."""
    casts: int
    """Copies of its matrices in half precision, as autocast makes them; 0 in fp32."""
    backward: int
    """Most that comes and goes while its backward pass is under way, its weights' gradients left out."""


@dataclass(frozen=True)
class Activations:
    """Sizes for one micro-batch on one worker, in bytes."""

    layer_input: int
    """What is kept of a layer whose activations are computed again."""
    dense: LayerSizes
    """A layer without experts."""
    mixture: LayerSizes
    """A layer with experts; the same as `dense` in a model without."""
    last_norm: int
    """What the norm behind the last layer saves."""
    gradient: int
    """Gradient of the residual stream."""
    loss_forward: int
    """Loss: hidden states, a chunk of logits, gradients of rows and of the projection, while it is computed."""
    loss_backward: int
    """Loss: the same when the backward pass begins."""

    @classmethod
    def of(
        cls, model: ModelConfig, rows: int, length: int, precision: str, device: str, tensor: int = 1, expert: int = 1
    ) -> Activations:
        """Sizes of a micro-batch.

        Args:
            model: Complete.
            rows: In the micro-batch.
            length: Tokens of a row that this worker has.
            precision: As `train.precision`, but not "fp8".
            device: "cpu" or "cuda".
            tensor: Workers that share every matrix. Activations between products are then cut by position; the inputs
                of products are whole, their outputs cut.
            expert: Workers that share the experts. As many tokens reach this one's as its own tokens have experts.
        """
        shape, cpu, element = Shape.of(model), device == "cpu", element_bytes(precision)
        tokens = rows * length
        stream = tokens * shape.dim // tensor
        queries, keys = (tokens * heads * shape.head_dim // tensor for heads in (shape.heads, shape.kv_heads))
        inner = tokens * shape.ffn_dim // tensor

        norm = stream * _FP32 * (2 if cpu else 1) + tokens * _FP32
        copies = cpu + (element == _HALF)
        head_norm = (queries + keys) * _FP32 * copies + (queries + keys) // shape.head_dim * _FP32
        repeated = 0 if cpu or element == _HALF or shape.heads == shape.kv_heads else 2 * queries * element
        dropout = stream * (element if cpu else 1) if model.dropout else 0
        sums = tokens * shape.heads // tensor * _FP32
        attention = (
            2 * (norm + dropout)
            + tokens * shape.dim * element
            + ((queries + 2 * keys) + (queries + keys) + queries) * element
            + (head_norm if model.qk_norm else 0)
            + repeated
            + sums
        )
        matrices = 2 * shape.dim * (shape.heads + shape.kv_heads) * shape.head_dim // tensor
        kept = stream * _FP32 + ((queries + 2 * keys) + queries) * element + sums
        half = _HALF if element == _HALF else 0
        dense = LayerSizes(
            saved=attention + (tokens * shape.dim + 4 * inner) * element,
            selected=kept + 2 * inner * element,
            casts=(matrices + 3 * shape.dim * shape.ffn_dim // tensor) * half,
            # Gradients of both branches, and of what came out of them, just before the saved ones are let go.
            backward=2 * inner * element + stream * _FP32,
        )
        loss_forward, loss_backward = _loss(shape, tokens, element, device, tensor)
        return cls(
            layer_input=stream * _FP32,
            dense=dense,
            mixture=_mixture(shape, tokens, element, expert, attention, matrices) if shape.experts else dense,
            last_norm=norm,
            gradient=stream * _FP32,
            loss_forward=loss_forward,
            loss_backward=loss_backward,
        )


def _mixture(shape: Shape, tokens: int, element: int, expert: int, attention: int, matrices: int) -> LayerSizes:
    """A layer with experts (`models/moe.py`, `models/experts.py`), given what its attention saves, and its matrices."""
    half, shared = element == _HALF, tokens * shape.shared_ffn_dim
    pairs = tokens * shape.experts_per_token
    stream, inner = pairs * shape.dim, pairs * shape.expert_ffn_dim
    # Logits and scores; weights before and after they add up to 1; sums of scores, and of exponentials twice.
    router = tokens * (shape.dim + 2 * shape.experts + 2 * shape.experts_per_token + 4) * _FP32
    router += tokens * shape.dim * element if half and shared else 0
    own = 3 * shape.dim * (shape.experts // expert * shape.expert_ffn_dim + shape.shared_ffn_dim)
    return LayerSizes(
        saved=attention + router + (2 * stream + 4 * inner + 4 * shared) * element,
        selected=0,  # which products are kept depends on the kernel that computes experts; refused
        casts=(matrices + own) * _HALF if half else 0,
        backward=(2 * inner + stream) * element + tokens * shape.dim * _FP32,
    )


def _loss(shape: Shape, tokens: int, element: int, device: str, tensor: int) -> tuple[int, int]:
    """What `models/loss.py` has at a time, forward and backward; the projection's gradient is in fp32."""
    vocabulary = shape.vocab_size // tensor
    rows, projection = tokens * shape.dim, vocabulary * shape.dim
    chunk = min(tokens, default_chunk_rows(device, vocabulary))
    # Hidden states and their gradients; a chunk's logits, and two products as large as its rows.
    if element == _FP32:
        logits = vocabulary * _FP32 * chunk
        forward = _FP32 * (2 * rows + projection) + logits + 2 * _FP32 * chunk * shape.dim
    else:
        # bf16 logits and their fp32 copy, later the exponentials and the bf16 gradient; then a chunk's part of the
        # projection's gradient, which kernels of the CPU turn into fp32 to add it.
        logits = vocabulary * (_FP32 + _HALF) * chunk
        logits += projection * _HALF + (projection * _FP32 if device == "cpu" else 0)
        forward = (_FP32 + 2 * _HALF) * rows + (_FP32 + _HALF) * projection + logits + _HALF * chunk * shape.dim
    return forward, 2 * element * rows + 2 * projection * _FP32
