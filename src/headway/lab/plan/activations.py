"""Bytes that a forward pass of `models/decoder.py` keeps for its backward pass, and temporaries of both.

A layer saves the following for N tokens, in the order of the forward pass. E is the size of an element in matrix
products: 4 in fp32 (tf32), 2 under autocast in bf16 or fp16. The residual stream and the norms are always in fp32.

| tensor | elements | bytes each |
|---|---|---|
| input of the layer, which the attention norm saves | N dim | 4 |
| root mean squares; of `layernorm1p` means too; of norms with 1 plus a weight the gain too | N | 4 |
| normalised, before the gain (CPU: several operations; CUDA: one kernel recomputes it) | N dim | 4 |
| normalised, which the qkv product saves | N dim | E |
| values; with qk_norm in fp32 the whole output of the qkv product, which the norms save | N kv_heads head_dim | E |
| rotated queries and keys | N (heads + kv_heads) head_dim | E |
| with qk_norm also: normalised queries and keys (CPU), fp32 copies (bf16) | N (heads + kv_heads) head_dim | 4 |
| and their root mean squares | N (heads + kv_heads) | 4 |
| keys and values for every query head, where the kernel cannot share them (CUDA in fp32) | 2 N heads head_dim | E |
| output of attention, which the output product saves | N heads head_dim | E |
| logarithms of the sums of exponentials; not on a CPU without a mask (16 bits: `attention.py`) | N heads | 4 |
| with a mask (sliding window): the mask in that dtype; on CUDA keys and values for every head too | pairs | E |
| with dropout: mask, twice | N dim | CPU: E, CUDA: 1 |
| sum with the residual stream, which the feed-forward norm saves; the rest as for the attention norm | | |
| gate and linear branch | 2 N ffn_dim | E |
| silu(gate), and the product with the linear branch | 2 N ffn_dim | E |
| with `activation: relu2` instead of the two lines above: the ReLU, and its square | 2 N ffn_dim | E |
| with `post_norms`: for each part what a norm saves, input and normalised | as above | 4 |
| with `attention_softcap`: tanh of scores and their weights, which 16 bits have once more in E | 2 pairs heads | 4 |
| and keys and values for every query head | 2 N heads head_dim | E |
| under autocast: half-precision copies of the layer's matrices | parameters | 2 |

If C workers share a row (`parallel.context`; N counts this worker's tokens), each computes two runs of queries. These
lines replace those from the values to the output of attention:

| tensor | elements | bytes each |
|---|---|---|
| output of the qkv product, only with qk_norm in fp32: the norms save it | N (heads + 2 kv_heads) head_dim | E |
| rotated queries | N heads head_dim | E |
| keys and values of the whole row, gathered in every layer | 2 C N kv_heads head_dim | E |
| or for every query head, if kernels cannot share them: for each run, up to its end | (2 C + 1) N heads head_dim | E |
| output of attention for each run, and for both in one tensor | 2 N heads head_dim | E |
| the masks of both runs, in that dtype: every run but the first of the row needs one | pairs | E |

With experts, for N tokens with K experts each, these lines replace the last two:

| tensor | elements | bytes each |
|---|---|---|
| normalised, which the router saves in fp32; shared experts also save it in E | N dim | 4 |
| logits and scores of the router | 2 N experts | 4 |
| tokens in the order of their experts, and the experts' outputs | 2 N K dim | E |
| gate and linear branch, silu(gate), product | 4 N K expert_ffn_dim | E |
| gate and linear branch, silu(gate), product of shared experts | 4 N shared_ffn_dim | E |

With activation checkpointing `full` only the first line is kept, and one layer at a time has everything. With
`selective` the outputs of attention and of every second product, beginning with the first, are kept too
(`models/recompute.py`). In a layer without experts these are queries, keys and values, and the gate with the linear
branch. In a layer with experts the third product is the router's, in fp32; the following ones depend on the kernel. If
each expert has its own products, those of every second expert are kept, assuming equally many tokens. The kernel that
computes all experts at once (`has_grouped_kernel`) is no product to `models/recompute.py`, so nothing of it is kept. Of
shared experts the second product is kept.

Compiled, silu(gate) is never written: the partition of the joint graph by the smallest cut recomputes cheap elementwise
results from saved ones, and the branches are saved anyway (PyTorch, `torch/_functorch/partitioners.py`,
`min_cut_rematerialization_partition`; Chen et al. 2016, "Training deep nets with sublinear memory cost", for the idea).

Copies of weights live as long as the tensors saved with them. Sharded weights have no copies: products then save the
gathered weight, which is freed with all others.

fp8 is like bf16, except for linear layers whose sides fill tiles (`training/setup/precision.py`,
`convert_to_fp8`). torchao 0.18.0, `float8/float8_linear.py`, `matmul_with_hp_or_float8_args`: these save their input in
bf16 and the fp32 weight itself, not a copy, and round both again in the backward pass. Without `torch.compile`,
rounding needs the scaled operand in fp32 twice (`float8_training_tensor.py`, `_ToFloat8ConstrFunc`).
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.config import Config, ModelConfig
from headway.core.machine.cores import has_bf16_tiles
from headway.lab.plan.layout import Layout
from headway.models.loss_chunks import ADDED_ROWS, PRODUCT_ROWS, default_chunk_rows
from headway.models.shape import Shape

_FP32 = 4
_HALF = 2
#: 8-bit products need matrix sides that are multiples of this (`training/setup/precision.py`).
FP8_TILE = 16


def element_bytes(precision: str) -> int:
    """Return the bytes of an element in matrix products."""
    return _FP32 if precision in ("fp32", "tf32") else _HALF


def masked_pairs(config: Config, model: ModelConfig, workers: int, rows: int = 1) -> int:
    """Count the pairs of query and key in the attention mask; 0 if none is needed (`models/layers/attention.py`).

    Workers that share rows need a mask even without a window: each has two runs of queries, and the kernels' own causal
    mask only supports queries that begin with the first key. The count is that of any worker but the first, which is
    the maximum: each of its runs against all keys up to the run's end.

    Args:
        config: Config of the run.
        model: A complete config.
        workers: Number of workers that share a row.
        rows: Rows of the micro-batch; each has its own mask if shared rows contain several documents.
    """
    length = config.train.sequence_length
    window = model.sliding_window
    documents = config.data.document_mask
    if workers > 1:
        part = length // (2 * workers)  # one run ends as many parts from the front as the other begins from the end
        return part * part * (2 * workers + 1) * (rows if documents else 1)
    needed = window is not None and length > window and not documents
    return length * length if needed else 0


@dataclass(frozen=True)
class LayerSizes:
    """Bytes of one layer for one micro-batch."""

    saved: int
    """Everything that the layer saves, including its input, without copies of weights."""
    selected: int
    """The part that `selective` checkpointing keeps, including the input."""
    casts: int
    """Copies of its matrices in half precision, as autocast makes them; 0 in fp32."""
    backward: int
    """Peak of temporaries in its backward pass, without the gradients of its weights."""
    rounding: int = 0
    """Additional temporaries while operands of a product are rounded to 8 bits."""


@dataclass(frozen=True)
class Activations:
    """Bytes for one micro-batch on one worker."""

    layer_input: int
    """Kept of a layer whose activations are recomputed."""
    dense: LayerSizes
    """A layer without experts."""
    mixture: LayerSizes
    """A layer with experts; equal to `dense` in a model without."""
    last_norm: int
    """Saved by the norm after the last layer."""
    gradient: int
    """Gradient of the residual stream."""
    loss_forward: int
    """Loss, forward: hidden states, a chunk of logits, gradients of rows and of the projection."""
    loss_backward: int
    """Loss, at the beginning of its backward pass."""

    @classmethod
    def of_layout(cls, config: Config, model: ModelConfig, layout: Layout, device: str) -> Activations:
        """Compute the sizes for a layout's micro-batch on one worker.

        Args:
            config: Config of the run.
            model: A complete config.
            layout: How the step is split over workers.
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
            compiled=config.train.compile not in (False, "auto"),  # which may decide against it
            half_weights=config.train.weights != "fp32",
        )

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        rows: int,
        length: int,
        precision: str,
        device: str,
        *,
        tensor: int = 1,
        expert: int = 1,
        masked_pairs: int = 0,
        context: int = 1,
        compiled: bool = False,
        half_weights: bool = False,
    ) -> Activations:
        """Compute the sizes for a micro-batch.

        Args:
            model: A complete config.
            rows: Rows of the micro-batch.
            length: Tokens of a row on this worker.
            precision: Value of `train.precision`.
            device: "cpu" or "cuda".
            tensor: Workers that share every matrix. Activations between products are then sharded by position; the
                inputs of products are whole, their outputs sharded.
            expert: Workers that share the experts. Each receives as many pairs of token and expert as it has itself.
            masked_pairs: Result of `masked_pairs`.
            context: Workers that share a row.
            compiled: Whether layers are compiled.
            half_weights: Whether weights are in bf16, and with them the residual stream and the norms.
        """
        shape = Shape.of(model)
        wide = _HALF if half_weights else _FP32
        cpu = device == "cpu"
        element = element_bytes(precision)
        tokens = rows * length
        stream = tokens * shape.dim // tensor
        queries, keys = (tokens * heads * shape.head_dim // tensor for heads in (shape.heads, shape.kv_heads))
        inner = tokens * shape.ffn_dim // tensor

        norm = stream * (wide + _FP32 * cpu) + tokens * _FP32
        if model.norm == "layernorm1p":  # one kernel on the CPU too; means, and the gain
            norm = (stream + 2 * tokens + shape.dim) * _FP32
        elif model.norm == "rmsnorm1p":
            norm += shape.dim * _FP32
        # A norm of the output of a part saves its input in fp32, as the norm before the part does.
        norms = norm * (model.pre_norms + model.post_norms)
        copies = cpu + (element != wide)
        head_norm = (queries + keys) * _FP32 * copies + (queries + keys) // shape.head_dim * _FP32
        shared = cpu or shape.heads == shape.kv_heads or (element == _HALF and not masked_pairs)
        values = keys if context == 1 else 0
        produced = queries + 2 * keys if model.qk_norm and element == wide else values
        heads = produced + _attended(queries, keys, context, shared)
        dropout = stream * (element if cpu else 1) if model.dropout else 0
        # See `models.layers.attention.has_causal_products`.
        by_products = cpu and not masked_pairs and precision != "fp16" and not has_bf16_tiles()
        sums = 0 if by_products else tokens * shape.heads // tensor * _FP32
        attention = (
            2 * (norms + dropout)
            + tokens * shape.dim * element
            + heads * element
            + (head_norm if model.qk_norm else 0)
            + sums
            + masked_pairs * element
        )
        if model.attention_softcap is not None:
            scores = tokens * length * context * shape.heads // tensor
            attention += scores * (2 * _FP32 + element % _FP32) + 2 * queries * element
        fp8 = precision == "fp8"
        width = shape.heads * shape.head_dim
        sides = [(shape.dim, width + 2 * shape.kv_heads * shape.head_dim), (width, shape.dim)]
        # Without a gate: the ReLU, which its square saves too, and the square.
        branches = 1 if model.activation == "relu2" else 2
        fused = (branches - 1) * inner if compiled else 0
        feed_forward = [(shape.dim, branches * shape.ffn_dim), (shape.ffn_dim, shape.dim)]
        matrices = _copied(sides, fp8) // tensor
        kept = stream * wide + ((queries + 2 * keys) + queries) * element + sums
        half = _HALF if element != wide else 0
        dense = LayerSizes(
            saved=attention + (tokens * shape.dim + 2 * branches * inner - fused) * element,
            selected=kept + branches * inner * element,
            casts=(matrices + _copied(feed_forward, fp8) // tensor) * half,
            # Gradients of both branches and of their product, just before the saved tensors are freed.
            backward=2 * inner * element + stream * wide,
            rounding=_rounding([*sides, *feed_forward], tokens) if fp8 else 0,
        )
        projection = (shape.vocab_size // tensor, shape.dim)
        capped = model.logit_softcap is not None
        loss_forward, loss_backward = loss_bytes(
            projection, tokens, element, device, in_place=half_weights, streams=wide, capped=capped
        )
        return cls(
            layer_input=stream * wide,
            dense=dense,
            mixture=_mixture(
                shape,
                tokens,
                precision=precision,
                device=device,
                expert=expert,
                attention=attention,
                kept=kept,
                sides=sides,
            )
            if shape.experts
            else dense,
            last_norm=norm,
            gradient=stream * wide,
            loss_forward=loss_forward,
            loss_backward=loss_backward,
        )


def _attended(queries: int, keys: int, context: int, shared: bool) -> int:
    """Count the elements that attention saves and returns, besides masks and sums.

    Args:
        queries, keys: Elements on this worker.
        context: Workers that share a row.
        shared: The kernel supports fewer key-value heads than query heads.
    """
    if context == 1:
        return queries + keys + queries + (0 if shared else 2 * queries)
    # Keys and values of a run are a view of those of the row, unless heads are repeated.
    return queries + (2 * context * keys if shared else (2 * context + 1) * queries) + 2 * queries


def _mixture(
    shape: Shape,
    tokens: int,
    *,
    precision: str,
    device: str,
    expert: int,
    attention: int,
    kept: int,
    sides: list[tuple[int, int]],
) -> LayerSizes:
    """Compute the sizes of a layer with experts (`models/layers/moe.py`, `models/layers/experts.py`).

    Args:
        attention: Bytes that its attention saves.
        kept: The part that `selective` keeps.
        sides: Sides of the matrices of its attention.
    """
    element = element_bytes(precision)
    fp8 = precision == "fp8"
    half = element == _HALF
    shared = tokens * shape.shared_ffn_dim
    pairs = tokens * shape.experts_per_token
    stream = pairs * shape.dim
    inner = pairs * shape.expert_ffn_dim
    # Logits and scores; weights before and after normalisation; sums of scores, and of exponentials twice.
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
    """Return whether one kernel computes all experts; mirrors `models.layers.experts.has_grouped_kernel`."""
    aligned = shape.dim % 8 == 0 and shape.expert_ffn_dim % 8 == 0
    return device == "cuda" and precision in ("bf16", "fp8") and aligned


def fills_tiles(sides: tuple[int, int]) -> bool:
    """Return whether a linear layer multiplies in 8 bits with precision "fp8"."""
    return all(side % FP8_TILE == 0 for side in sides)


def _copied(matrices: list[tuple[int, int]], fp8: bool) -> int:
    """Count the elements of the matrices that autocast copies."""
    return sum(rows * columns for rows, columns in matrices if not (fp8 and fills_tiles((rows, columns))))


def _rounding(matrices: list[tuple[int, int]], tokens: int) -> int:
    """Return the temporaries of rounding the largest operand: scaled and clamped in fp32, and rounded."""
    rounded = [sides for sides in matrices if fills_tiles(sides)]
    operands = [size for rows, columns in rounded for size in (rows * columns, tokens * rows, tokens * columns)]
    return (2 * _FP32 + 1) * max(operands, default=0)


def loss_bytes(
    sides: tuple[int, int],
    tokens: int,
    element: int,
    device: str,
    *,
    trained: bool = True,
    in_place: bool = False,
    streams: int = _FP32,
    capped: bool = False,
) -> tuple[int, int]:
    """Return the memory of `models/loss.py`, forward and backward; the projection's gradient is in fp32.

    Args:
        sides: Of the projection on this worker: vocabulary, hidden size.
        tokens: Of a micro-batch.
        element: Bytes of an element in matrix products.
        device: "cpu" or "cuda".
        trained: Whether the projection has a gradient.
        in_place: Whether the projection is in the type of matrix products already.
        streams: Bytes of an element of the hidden states.
        capped: Whether logits are capped, which takes the capped ones and the slope.
    """
    vocabulary, dim = sides
    rows = tokens * dim
    projection = vocabulary * dim
    chunk = min(tokens, default_chunk_rows(device, vocabulary))
    # Hidden states and their gradients; a chunk's logits, and two products as large as its rows.
    if element == _FP32:
        logits = vocabulary * _FP32 * chunk
        forward = _FP32 * (2 * rows + projection * trained) + logits + 2 * _FP32 * chunk * dim
    else:
        # bf16 logits and their fp32 copy, later the exponentials and the bf16 gradient; then the gradient and a chunk's
        # part of the projection's gradient, which a CPU computes and converts to fp32 for some rows at a time.
        part = projection * _HALF
        if device == "cpu":
            part = dim * (min(vocabulary, PRODUCT_ROWS) * _HALF + min(vocabulary, ADDED_ROWS) * _FP32)
        logits = max(vocabulary * (_FP32 + _HALF) * chunk, vocabulary * _HALF * chunk + part * trained)
        copies = (_FP32 * trained + _HALF * (not in_place)) * projection
        hidden = streams * (streams != element)
        forward = (hidden + 2 * _HALF) * rows + copies + logits + _HALF * chunk * dim
    if capped:
        forward += 2 * _FP32 * vocabulary * chunk
    # The gradient of a projection in 16 bits is cast to its type.
    cast = _HALF if streams < _FP32 else 0
    return forward, 2 * element * rows + projection * (_FP32 + cast) * trained
