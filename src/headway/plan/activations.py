"""Bytes that a forward pass of `models/decoder.py` keeps for its backward pass, and what comes and goes meanwhile.

What a layer saves, of N tokens, in the order of the forward pass. E is the size of an element in matrix products, 4 in
fp32 (tf32) and 2 under autocast in bf16 or fp16; the residual stream and the norms are in fp32 in either case.

| tensor | elements | bytes each |
|---|---|---|
| input of the layer, which the attention norm saves | N dim | 4 |
| root mean squares | N | 4 |
| normalised, before the gain (CPU: the norm is made of parts; CUDA has one kernel that computes it again) | N dim | 4 |
| normalised, which the qkv product saves | N dim | E |
| values; with qk_norm in fp32 the whole output of the qkv product, which the norms save | N kv_heads head_dim | E |
| rotated queries and keys | N (heads + kv_heads) head_dim | E |
| with qk_norm also: normalised queries and keys (CPU), fp32 copies (bf16) | N (heads + kv_heads) head_dim | 4 |
| and their root mean squares | N (heads + kv_heads) | 4 |
| keys and values for every query head, where the kernel cannot share them (CUDA in fp32) | 2 N heads head_dim | E |
| output of attention, which the output product saves | N heads head_dim | E |
| logarithms of the sums of exponentials; not on a CPU without a mask (16 bits: `models/attention.py`) | N heads | 4 |
| with a mask (sliding window): the mask in that dtype; on CUDA keys and values for every head too | pairs | E |
| with dropout: mask, twice | N dim | CPU: E, CUDA: 1 |
| sum with the residual stream, which the feed-forward norm saves; the rest as for the attention norm | | |
| gate and linear branch | 2 N ffn_dim | E |
| silu(gate), and the product with the linear branch | 2 N ffn_dim | E |
| under autocast: half-precision copies of the layer's matrices | parameters | 2 |

Where workers share a row (`parallel.context`, C of them; N counts this worker's tokens), each attends in two runs of
queries, in place of the lines from the values to the output of attention:

| tensor | elements | bytes each |
|---|---|---|
| output of the qkv product, only with qk_norm in fp32: the norms save it | N (heads + 2 kv_heads) head_dim | E |
| rotated queries | N heads head_dim | E |
| keys and values of the whole row, gathered in every layer | 2 C N kv_heads head_dim | E |
| or for every query head, where kernels cannot share them: each run's, up to its end | (2 C + 1) N heads head_dim | E |
| output of attention, of each run, and both in one tensor | 2 N heads head_dim | E |
| the masks of both runs, in that dtype: all but the row's very first run need one | pairs | E |

With experts, of N tokens with K experts each, in place of the last two lines:

| tensor | elements | bytes each |
|---|---|---|
| normalised, which the router saves in fp32; shared experts save it in E besides | N dim | 4 |
| logits and scores of the router | 2 N experts | 4 |
| tokens in the order of their experts, and what those made of them | 2 N K dim | E |
| gate and linear branch, silu(gate), product | 4 N K expert_ffn_dim | E |
| the same of shared experts | 4 N shared_ffn_dim | E |

With activation checkpointing `full` only the first line is kept, and one layer at a time has everything; with
`selective` also the outputs of attention and of every second product, the first of them included
(`models/recompute.py`). In a layer without experts those are queries, keys and values, and the gate with the linear
branch. In one with experts the third product is the router's, in fp32, and which come after it depends on the kernel:
where each expert has products of its own, those of every second expert are kept, all having equally many tokens; the
kernel that computes all experts at once (`has_grouped_kernel`) is no product to `models/recompute.py`, so that nothing
of them is. Of shared experts the second product is kept.

Copies of weights go with what they were made for. Where weights are cut between workers there are none: what products
save is then the weight that was brought together, which is let go of with all others.

With fp8 everything is as with bf16, except for linear layers whose sides fill tiles (`training/precision.py`,
`convert_to_fp8`). torchao 0.18.0, `float8/float8_linear.py`, `matmul_with_hp_or_float8_args`: those save their input in
bf16 and the fp32 weight itself, no copy of it, and round both again in the backward pass. Rounding takes, without
`torch.compile`, the scaled operand in fp32 twice (`float8_training_tensor.py`, `_ToFloat8ConstrFunc`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.core.cores import has_bf16_tiles
from headway.models.facts import ADDED_ROWS, PRODUCT_ROWS, default_chunk_rows
from headway.models.shape import Shape

if TYPE_CHECKING:
    from headway.config import Config, ModelConfig
    from headway.plan.layout import Layout

_FP32, _HALF = 4, 2
#: Sides of matrices whose products are in 8 bits are multiples of this (`training/precision.py`).
FP8_TILE = 16


def element_bytes(precision: str) -> int:
    """Of a number in matrix products."""
    return _FP32 if precision in ("fp32", "tf32") else _HALF


def masked_pairs(config: Config, model: ModelConfig, workers: int, rows: int = 1) -> int:
    """Pairs of a query and a key in the mask that attention takes; 0 where it needs none (`models/attention.py`).

    Workers that share rows need one also without a window: each has two runs of queries, and the kernels' own causal
    mask is only for queries that begin with the first key. Counted is the worker that has most, which is any but the
    first: each of its runs against all keys up to the run's end.

    Args:
        workers: That share a row.
        rows: In the micro-batch; each has a mask of its own where shared rows are of several documents.
    """
    length, window, documents = config.train.sequence_length, model.sliding_window, config.data.document_mask
    if workers > 1:
        part = length // (2 * workers)  # one run ends as many parts from the front as the other one begins from the end
        return part * part * (2 * workers + 1) * (rows if documents else 1)
    needed = window is not None and length > window and not documents
    return length * length if needed else 0


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
    rounding: int = 0
    """Most that comes and goes besides while operands of a product are rounded to 8 bits."""


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
    def of_layout(cls, config: Config, model: ModelConfig, layout: Layout, device: str) -> Activations:
        """Sizes of a micro-batch of a layout on one worker.

        Args:
            config: Of the run.
            model: Complete.
            layout: How workers share it.
            device: "cpu" or "cuda".
        """
        mesh = layout.mesh
        return cls.of(
            model,
            layout.micro_batch,
            config.train.sequence_length // mesh.cp,
            config.train.precision,
            device,
            tensor=mesh.tp,
            expert=mesh.ep,
            masked_pairs=masked_pairs(config, model, mesh.cp, layout.micro_batch),
            context=mesh.cp,
        )

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        rows: int,
        length: int,
        precision: str,
        device: str,
        tensor: int = 1,
        expert: int = 1,
        masked_pairs: int = 0,
        context: int = 1,
    ) -> Activations:
        """Sizes of a micro-batch.

        Args:
            model: Complete.
            rows: In the micro-batch.
            length: Tokens of a row that this worker has.
            precision: As `train.precision`.
            device: "cpu" or "cuda".
            tensor: Workers that share every matrix. Activations between products are then cut by position; the inputs
                of products are whole, their outputs cut.
            expert: Workers that share the experts. As many tokens reach this one's as its own tokens have experts.
            masked_pairs: As `masked_pairs` says.
            context: Workers that share a row.
        """
        shape, cpu, element = Shape.of(model), device == "cpu", element_bytes(precision)
        tokens = rows * length
        stream = tokens * shape.dim // tensor
        queries, keys = (tokens * heads * shape.head_dim // tensor for heads in (shape.heads, shape.kv_heads))
        inner = tokens * shape.ffn_dim // tensor

        norm = stream * _FP32 * (2 if cpu else 1) + tokens * _FP32
        copies = cpu + (element == _HALF)
        head_norm = (queries + keys) * _FP32 * copies + (queries + keys) // shape.head_dim * _FP32
        shared = cpu or shape.heads == shape.kv_heads or (element == _HALF and not masked_pairs)
        values = keys if context == 1 else 0
        produced = queries + 2 * keys if model.qk_norm and element == _FP32 else values
        heads = produced + _attended(queries, keys, context, shared)
        dropout = stream * (element if cpu else 1) if model.dropout else 0
        # See `models.attention.has_causal_products`.
        by_products = cpu and not masked_pairs and (element == _FP32 or (precision != "fp16" and not has_bf16_tiles()))
        sums = 0 if by_products else tokens * shape.heads // tensor * _FP32
        attention = (
            2 * (norm + dropout)
            + tokens * shape.dim * element
            + heads * element
            + (head_norm if model.qk_norm else 0)
            + sums
            + masked_pairs * element
        )
        fp8 = precision == "fp8"
        width = shape.heads * shape.head_dim
        sides = [(shape.dim, width + 2 * shape.kv_heads * shape.head_dim), (width, shape.dim)]
        feed_forward = [(shape.dim, 2 * shape.ffn_dim), (shape.ffn_dim, shape.dim)]
        matrices = _copied(sides, fp8) // tensor
        kept = stream * _FP32 + ((queries + 2 * keys) + queries) * element + sums
        half = _HALF if element == _HALF else 0
        dense = LayerSizes(
            saved=attention + (tokens * shape.dim + 4 * inner) * element,
            selected=kept + 2 * inner * element,
            casts=(matrices + _copied(feed_forward, fp8) // tensor) * half,
            # Gradients of both branches, and of what came out of them, just before the saved ones are let go.
            backward=2 * inner * element + stream * _FP32,
            rounding=_rounding([*sides, *feed_forward], tokens) if fp8 else 0,
        )
        loss_forward, loss_backward = _loss(shape, tokens, element, device, tensor)
        return cls(
            layer_input=stream * _FP32,
            dense=dense,
            mixture=_mixture(shape, tokens, precision, device, expert, attention, kept, sides)
            if shape.experts
            else dense,
            last_norm=norm,
            gradient=stream * _FP32,
            loss_forward=loss_forward,
            loss_backward=loss_backward,
        )


def _attended(queries: int, keys: int, context: int, shared: bool) -> int:
    """Elements that attention saves and gives, besides masks and sums.

    Args:
        queries, keys: Elements of this worker's.
        context: Workers that share a row.
        shared: The kernel takes fewer key-value heads than query heads.
    """
    if context == 1:
        return queries + keys + queries + (0 if shared else 2 * queries)
    # Keys and values of a run are a view into those of the row, unless they are repeated.
    return queries + (2 * context * keys if shared else (2 * context + 1) * queries) + 2 * queries


def _mixture(
    shape: Shape,
    tokens: int,
    precision: str,
    device: str,
    expert: int,
    attention: int,
    kept: int,
    sides: list[tuple[int, int]],
) -> LayerSizes:
    """A layer with experts (`models/moe.py`, `models/experts.py`).

    Args:
        attention: What its attention saves.
        kept: What `selective` keeps of that.
        sides: Of the matrices of its attention.
    """
    element, fp8 = element_bytes(precision), precision == "fp8"
    half, shared = element == _HALF, tokens * shape.shared_ffn_dim
    pairs = tokens * shape.experts_per_token
    stream, inner = pairs * shape.dim, pairs * shape.expert_ffn_dim
    # Logits and scores; weights before and after they add up to 1; sums of scores, and of exponentials twice.
    router = tokens * (shape.dim + 2 * shape.experts + 2 * shape.experts_per_token + 4) * _FP32
    router += tokens * shape.dim * element if half and shared else 0
    common = [(shape.dim, 2 * shape.shared_ffn_dim), (shape.shared_ffn_dim, shape.dim)] if shared else []
    here = shape.experts // expert
    copies = 3 * shape.dim * here * shape.expert_ffn_dim + _copied([*sides, *common], fp8)
    first, second = (0, 0) if has_grouped_kernel(shape, precision, device) else (here // 2, -(-here // 2))
    selected = tokens * shape.experts * _FP32 + (tokens * shape.dim * element if shared else 0)
    selected += (2 * inner * first + stream * second) // here * element
    return LayerSizes(
        saved=attention + router + (2 * stream + 4 * inner + 4 * shared) * element,
        selected=kept + selected,
        casts=copies * _HALF if half else 0,
        backward=(2 * inner + stream) * element + tokens * shape.dim * _FP32,
        rounding=_rounding([*sides, *common], tokens) if fp8 else 0,
    )


def has_grouped_kernel(shape: Shape, precision: str, device: str) -> bool:
    """Whether all experts are computed by one kernel; as `models.experts.has_grouped_kernel` finds out by tensors."""
    aligned = shape.dim % 8 == 0 and shape.expert_ffn_dim % 8 == 0
    return device == "cuda" and precision in ("bf16", "fp8") and aligned


def fills_tiles(sides: tuple[int, int]) -> bool:
    """Whether a linear layer multiplies in 8 bits with precision "fp8"."""
    return all(side % FP8_TILE == 0 for side in sides)


def _copied(matrices: list[tuple[int, int]], fp8: bool) -> int:
    """Elements of the matrices of which autocast makes a copy."""
    return sum(rows * columns for rows, columns in matrices if not (fp8 and fills_tiles((rows, columns))))


def _rounding(matrices: list[tuple[int, int]], tokens: int) -> int:
    """What rounding the largest operand takes: scaled, limited, both in fp32, and rounded."""
    rounded = [sides for sides in matrices if fills_tiles(sides)]
    operands = [size for rows, columns in rounded for size in (rows * columns, tokens * rows, tokens * columns)]
    return (2 * _FP32 + 1) * max(operands, default=0)


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
        # bf16 logits and their fp32 copy, later the exponentials and the bf16 gradient; then that and a chunk's part of
        # the projection's gradient, which a CPU computes, and turns into fp32, for some of its rows at a time.
        part = projection * _HALF
        if device == "cpu":
            part = shape.dim * (min(vocabulary, PRODUCT_ROWS) * _HALF + min(vocabulary, ADDED_ROWS) * _FP32)
        logits = max(vocabulary * (_FP32 + _HALF) * chunk, vocabulary * _HALF * chunk + part)
        forward = (_FP32 + 2 * _HALF) * rows + (_FP32 + _HALF) * projection + logits + _HALF * chunk * shape.dim
    return forward, 2 * element * rows + projection * _FP32
