"""Bytes that a forward pass of `models/decoder.py` keeps for its backward pass, and what comes and goes meanwhile.

What a layer saves, of N tokens, in the order of the forward pass. E is the size of an element in matrix products, 4 in
fp32 and 2 under bf16 autocast; the residual stream and the norms are in fp32 in either case.

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
| under autocast: bf16 copies of the layer's matrices | parameters | 2 |

With activation checkpointing `full` only the first line is kept, and one layer at a time has everything. The bf16
copies of all matrices live until the forward pass has ended all the same: autocast keeps what it has cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.models.facts import default_chunk_rows
from headway.models.shape import Shape

if TYPE_CHECKING:
    from headway.config import ModelConfig

_FP32, _BF16 = 4, 2


@dataclass(frozen=True)
class Activations:
    """Sizes for one micro-batch on one worker, in bytes."""

    layer_input: int
    """What is kept of a layer whose activations are computed again."""
    layer: int
    """All that one layer saves, its input included, without copies of weights."""
    layer_casts: int
    """bf16 copies of one layer's matrices, as autocast makes them; 0 in fp32."""
    last_norm: int
    """What the norm behind the last layer saves."""
    gradient: int
    """Gradient of the residual stream."""
    layer_backward: int
    """Most that comes and goes while a layer's backward pass is under way, its weights' gradients left out."""
    loss_forward: int
    """Loss: hidden states, chunks of logits, gradients of rows and of the projection, while it is computed."""
    loss_backward: int
    """Loss: the same when the backward pass begins."""

    @classmethod
    def of(
        cls, model: ModelConfig, rows: int, length: int, precision: str, device: str, tensor: int = 1
    ) -> Activations:
        """Sizes of a micro-batch.

        Args:
            model: Complete.
            rows: In the micro-batch.
            length: Tokens of a row that this worker has.
            precision: "fp32" or "bf16".
            device: "cpu" or "cuda".
            tensor: Workers that share every matrix. Activations between products are then cut by position; the inputs
                of products are whole, their outputs cut.
        """
        shape, cpu, element = Shape.of(model), device == "cpu", _FP32 if precision == "fp32" else _BF16
        tokens = rows * length
        stream = tokens * shape.dim // tensor
        queries, keys = (tokens * heads * shape.head_dim // tensor for heads in (shape.heads, shape.kv_heads))
        inner = tokens * shape.ffn_dim // tensor

        norm = stream * _FP32 * (2 if cpu else 1) + tokens * _FP32
        copies = cpu + (element == _BF16)
        head_norm = (queries + keys) * _FP32 * copies + (queries + keys) // shape.head_dim * _FP32
        repeated = 0 if cpu or element == _BF16 or shape.heads == shape.kv_heads else 2 * queries * element
        dropout = stream * (element if cpu else 1) if model.dropout else 0
        attention = (queries + 2 * keys) + (queries + keys) + queries
        layer = (
            2 * (norm + tokens * shape.dim * element + dropout)
            + attention * element
            + (head_norm if model.qk_norm else 0)
            + repeated
            + tokens * shape.heads // tensor * _FP32
            + 4 * inner * element
        )
        matrices = shape.dim * (2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * shape.ffn_dim) // tensor
        loss_forward, loss_backward = _loss(shape, tokens, element, device, tensor)
        return cls(
            layer_input=stream * _FP32,
            layer=layer,
            layer_casts=matrices * _BF16 if element == _BF16 else 0,
            last_norm=norm,
            gradient=stream * _FP32,
            # Gradients of both branches, and of what came out of them, just before the saved ones are let go.
            layer_backward=2 * inner * element + stream * _FP32,
            loss_forward=loss_forward,
            loss_backward=loss_backward,
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
        logits = vocabulary * (_FP32 + _BF16) * chunk
        logits += projection * _BF16 + (projection * _FP32 if device == "cpu" else 0)
        forward = (_FP32 + 2 * _BF16) * rows + (_FP32 + _BF16) * projection + logits + _BF16 * chunk * shape.dim
    return forward, 2 * element * rows + 2 * projection * _FP32
