"""The native decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU (Touvron et al. 2023, section 2.2).

Values of the config choose variations of these parts (`headway.models.layers.layer`, `rope`, `moe`, `mamba`).

Tensor-name suffixes: B rows, T positions, S positions including the cached ones, D width of the residual stream, K
key-value heads, G query heads per key-value head, H width of a head, F inner width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from headway.config import ModelConfig
from headway.config.sections.architecture import FULL, NO_ROTARY, SLIDING
from headway.core.errors import ConfigError
from headway.core.model_protocol import FusesProjections
from headway.core.random import derive_seed
from headway.core.startup.dtensors import is_dtensor
from headway.core.types import IGNORE_TARGET, Checkpointing, Fusion
from headway.models.layers.attention import (
    PackedDocuments,
    Positions,
    attention_mask,
    document_kernel,
    packed_positions,
    shared_positions,
)
from headway.models.layers.cache import KVCache, MambaState, RowCaches
from headway.models.layers.layer import Layer, make_norm
from headway.models.layers.mamba import first_mamba_value
from headway.models.layers.moe import MixtureOfExperts, after_step, take_counts
from headway.models.layers.rope import rotary_tables
from headway.models.layers.tied import TiedGradient, takes_one_gradient, tied_embedding
from headway.models.loss import linear_cross_entropy, vocabulary_parallel_cross_entropy
from headway.models.shape import Shape
from headway.models.sharding.context import SharedPositions
from headway.models.sharding.tensor_plan import decoder_plan

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel.style import ParallelStyle


#: Name endings of projections whose output is added to the residual stream.
_TO_RESIDUAL = ("attention.output.weight", "mamba.output.weight", "down.weight", "experts.down")


class Decoder(nn.Module):
    """A decoder-only transformer of the Llama family, which declares all of `headway.core.model_protocol`.

    Supports fp32 weights, fp32 weights under `torch.autocast`, and bf16 weights. A dense decoder never waits for the
    device and has no graph break under `torch.compile`. Each layer with experts breaks the graph twice, and waits once
    if there is no grouped kernel (see `headway.models.layers.experts`).

    Args:
        config: Complete, including `vocab_size` (see `headway.models.build.complete`).

    Raises:
        ConfigError: the config's shape is not complete.
    """

    #: Dropout draws by position: workers that share rows have different positions and need different random numbers.
    draws_by_position = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.shape = shape = Shape.of(config)
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Layer(config, shape, index) for index in range(shape.layers))
        self.norm = make_norm(config, shape.dim)
        self.head = None if config.tie_embeddings else nn.Linear(shape.dim, shape.vocab_size, bias=False)
        self.shared: SharedPositions | None = None
        self._is_shared = False
        self.is_compiled = False
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        if config.local_rope_theta is not None:
            self.register_buffer("local_cos", torch.empty(0), persistent=False)
            self.register_buffer("local_sin", torch.empty(0), persistent=False)
        self.make_rotary_tables()

    def make_rotary_tables(self) -> None:
        """Compute the rotary tables on the device of the weights; they are not part of the state."""
        device = self._any_weight.device
        config = self.config
        length = config.max_sequence_length
        width = self.shape.rotary_dim
        cos, sin = rotary_tables(length, width, config.rope_theta, config.rope_scaling)
        self.cos, self.sin = cos.to(device), sin.to(device)
        if config.local_rope_theta is not None:
            cos, sin = rotary_tables(length, width, config.local_rope_theta)
            self.local_cos, self.local_sin = cos.to(device), sin.to(device)

    def make_buffers(self) -> None:
        """Compute every buffer that is not part of the state, on the device of the weights."""
        self.make_rotary_tables()

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set the initial weights, a pure function of the seed and each parameter's name on any device.

        Weights are normal with `init_std`. The two output projections of a layer have 1/sqrt(2 * layers) of it, so that
        the residual stream does not grow with depth (Radford et al. 2019, section 2.3). Gains of norms are 1, biases 0;
        the other parameters of Mamba-2 layers have values of their own (`headway.models.layers.mamba`).
        Also rebuilds the rotary tables, so a module from the meta device is ready after `to_empty` and this call.
        """
        for name, tensor in self.state_dict().items():
            tensor.copy_(self.first_value(name, tensor.shape, seed))
        self.make_rotary_tables()

    def first_value(self, name: str, size: Sequence[int], seed: int) -> torch.Tensor:
        """Return the value that `initialize` gives one parameter or buffer of the state, on the CPU."""
        generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
        if ".mamba." in name and not name.endswith(("input.weight", "output.weight")):
            return first_mamba_value(name, tuple(size), self.config, generator)
        if len(size) == 1:
            return torch.zeros(size) if name.endswith("bias") or self._has_gain_1p(name) else torch.ones(size)
        to_residual = name.endswith(_TO_RESIDUAL)
        std = self.config.init_std / (math.sqrt(2 * self.shape.layers) if to_residual else 1)
        return torch.empty(size).normal_(0.0, std, generator=generator)

    def _has_gain_1p(self, name: str) -> bool:
        """Return whether a parameter is the weight of a norm that adds 1 to it."""
        kind = self.config.norm
        of_heads = name.endswith(("q_norm.weight", "k_norm.weight"))
        return name.endswith("norm.weight") and (kind == "rmsnorm1p" or (kind == "layernorm1p" and not of_heads))

    def wrap_units(self) -> list[nn.Module]:
        """Return the modules whose weights are gathered one at a time when weights are sharded."""
        return list(self._layers())

    def _layers(self) -> list[Layer]:
        """Return the layers that this worker has."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def product_parameters(self) -> list[nn.Parameter]:
        """Return the layer parameters used only in matrix products, so that autocast casts every use of them.

        Norms and routers compute in fp32 and are left out.
        """
        first = ("qkv.weight", "mamba.input.weight", "gate_up_groups.weight", "feed_forward.up.weight")
        names = (*_TO_RESIDUAL, *first, "experts.gate_up", "shared.gate_up.weight")
        return [p for name, p in self.named_parameters() if name.startswith("layers.") and name.endswith(names)]

    def fusions(self) -> dict[nn.Parameter, Fusion]:
        """Return the matrices of layers that hold those of several projections, and how."""
        found: dict[nn.Parameter, Fusion] = {}
        for layer in self._layers():
            for part in layer.modules():
                if isinstance(part, FusesProjections):
                    found |= part.fusions()
        return found

    def keep_stages(self, stages: Sequence[range]) -> None:
        """Drop all but some pipeline stages, each given by its layers; what remains keeps its name.

        The stage with the first layer has the embedding; the stage with the last layer has the norm and the output
        projection. Both have the matrix of tied embeddings.
        """
        kept = {layer for stage in stages for layer in stage}
        first = 0 in kept
        last = self.shape.layers - 1 in kept
        for index in set(range(self.shape.layers)) - kept:
            self.layers[index] = nn.Identity()
        self._is_shared = self.config.tie_embeddings and first != last
        if not first and not (last and self.config.tie_embeddings):
            del self.embedding
        if not last:
            del self.norm
            self.head = None

    def shared_between_stages(self) -> list[torch.Tensor]:
        """Return the parameters that the first and the last pipeline stage both hold when embeddings are tied."""
        return [self.embedding.weight] if self._is_shared else []

    def stage_output(self, ids_BT: torch.Tensor, workers: int = 1) -> torch.Tensor:
        """Return a meta tensor shaped like the output of an inner pipeline stage, (B, T / workers, D).

        `workers` is the number of workers that split the positions of each row between layers.
        """
        B, T = ids_BT.shape
        return torch.empty(B, T // workers, self.shape.dim, dtype=self._any_weight.dtype, device="meta")

    def set_activation_checkpointing(self, mode: Checkpointing) -> None:
        """Set how much each layer keeps for the backward pass.

        `full` keeps only each layer's input and recomputes the layer, `offload` keeps that in host memory; `selective`
        also keeps some results (`models.recompute`).
        """
        for layer in self._layers():
            layer.activation_checkpointing = mode

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile every layer and the loss separately; the arguments are those of `torch.compile`.

        Layers are alike, so one trace serves all of them, at a fraction of the time for the whole model. Strategy hooks
        before and after a layer stay outside the graph. Shapes stay static: the code for a shape must not depend on the
        shapes seen before.
        """
        options = {"dynamic": False, **kwargs}
        for layer in self._layers():
            layer.forward = torch.compile(layer.forward, *args, **options)  # type: ignore[method-assign]
        self.is_compiled = True

    def mixtures(self) -> list[MixtureOfExperts]:
        """Return the mixtures of experts in layer order."""
        if not self.shape.experts:  # called in every step; `modules()` is slow
            return []
        return [module for module in self.modules() if isinstance(module, MixtureOfExperts)]

    def expert_units(self) -> list[nn.Module] | None:
        """Return the modules whose parameters are all stacked by expert along the first dimension.

        Returns None for a dense model, and an empty list if only other pipeline stages have experts.
        """
        return [mixture.experts for mixture in self.mixtures()] if self.shape.experts else None

    def share_experts(self, workers: ProcessGroup | None, row_sharers: ProcessGroup | None) -> None:
        """Compute mixtures of experts together with other workers.

        Args:
            workers: The workers that share the experts of a layer, each with an equal contiguous range. The caller
                cuts the parameters accordingly. None if every expert is local.
            row_sharers: The workers that compute other positions of the same rows; None if rows are whole.
        """
        for mixture in self.mixtures():
            mixture.experts.workers = workers
            mixture.row_sharers = row_sharers

    def scale_losses(self, scale: float) -> None:
        """Set the factor that scales the loss before the backward pass; router losses are added there."""
        for mixture in self.mixtures():
            mixture.loss_scale = scale

    def take_counts(self) -> torch.Tensor | None:
        """Return and reset the routers' counts from backward passes, int64; None without experts."""
        if not self.shape.experts:  # called in every step
            return None
        layers = self._layers_with_experts()
        return take_counts(layers, self.shape.experts) if layers else None

    def after_step(self, counts: torch.Tensor, updated: bool) -> dict[str, float]:
        """Balance the experts by the sum of all workers' `take_counts`; see `headway.models.layers.moe.after_step`."""
        return after_step(self._layers_with_experts(), counts, updated, self.shape.experts_per_token)

    def _layers_with_experts(self) -> list[MixtureOfExperts | None]:
        """Return one entry per layer with experts in the whole model; None for layers of other pipeline stages."""
        layers = list(self.layers)[self.shape.dense_layers :]
        return [cast(MixtureOfExperts, layer.feed_forward) if isinstance(layer, Layer) else None for layer in layers]

    def tensor_plan(self, workers: int) -> dict[str, ParallelStyle]:
        """Return the tensor-parallel style of each matrix; see `headway.models.sharding.tensor_plan`."""
        there = (name for name, module in self.named_modules() if not isinstance(module, nn.Identity))
        return decoder_plan(self.config, workers, there)

    def share_positions(self, group: ProcessGroup) -> None:
        """Split every row with other workers of `group`; each of them calls `forward` with the whole row.

        Raises:
            ConfigError: the model has Mamba-2 layers, and the workers are several.
        """
        self.shared = SharedPositions(group)
        if self.config.mamba is not None and self.shared.size > 1:
            raise ConfigError(
                "the state of a Mamba-2 layer passes through all positions of a row, one after the other",
                where="Decoder.share_positions",
                fix="whole rows: parallel.context=1",
            )

    def new_cache(self, rows: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """Create an empty cache for `rows` sequences of up to `capacity` positions.

        Its dtype is that of the weights by default.
        """
        weight = self.embedding.weight
        cache = KVCache(self.shape, rows, capacity, dtype or weight.dtype, weight.device)
        for index in self.shape.mamba_layers:
            cache.states[index] = MambaState.empty(self.config, rows, weight.device)
        return cache

    def next_logits(self, ids_BT: torch.Tensor, cache: KVCache | RowCaches) -> torch.Tensor:
        """Compute the logits after ids that continue those in the cache, (B, V).

        Only the last position is projected: the logits of a long prompt would be large, and are not needed.
        """
        return self.logits(self.hidden_states(ids_BT, cache)[:, -1])

    def forward(
        self,
        ids_BT: torch.Tensor,
        targets_BT: torch.Tensor | None = None,
        cache: KVCache | RowCaches | None = None,
        documents: PackedDocuments | None = None,
        *,
        stage: range | None = None,
        x_BTD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the loss or the logits; for a pipeline stage before the last, the input of the next stage.

        Args:
            ids_BT: int64 token ids, (B, T).
            targets_BT: int64, (B, T); positions with `IGNORE_TARGET` are left out of the loss.
            cache: Keys and values of earlier positions; `ids_BT` continues them and is added to the cache.
            documents: Documents packed into the rows; attention stays inside each. Not allowed with a cache.
            stage: Layers to compute; all by default.
            x_BTD: Output of the previous stage, for every stage but the first.

        Returns:
            With targets, the fp32 scalar sum of the cross-entropies in nats; without targets, logits (B, T, V). Router
            losses enter the gradients of that sum, not its value (`headway.models.layers.moe`). If rows are shared
            (`share_positions`), the sum or the logits cover this worker's positions. A stage without the last layer
            returns the residual stream, (B, T, D), of this worker's positions.

        Raises:
            ConfigError: the sequence is longer than `max_sequence_length`, or a cache is combined with documents or
                with shared rows.
        """
        counted_BT = None if targets_BT is None else targets_BT != IGNORE_TARGET
        tied = self._tied_gradient(targets_BT, stage)
        x_BTD = self.hidden_states(ids_BT, cache, documents, counted_BT=counted_BT, stage=stage, x_BTD=x_BTD, tied=tied)
        if stage is not None and stage.stop < self.shape.layers:
            return x_BTD
        if targets_BT is None:
            return self.logits(x_BTD)
        if self.shared is not None:
            targets_BT = self.shared.cut(targets_BT, 1)
        x_BTD = self._divided(x_BTD)
        softcap = self.config.logit_softcap
        if is_dtensor(x_BTD):
            return vocabulary_parallel_cross_entropy(x_BTD, self.projection, targets_BT, softcap=softcap)
        return linear_cross_entropy(
            x_BTD.flatten(0, 1),
            self.projection,
            targets_BT.flatten(),
            compiled=self.is_compiled,
            tied=tied,
            softcap=softcap,
        )

    def _tied_gradient(self, targets_BT: torch.Tensor | None, stage: range | None) -> TiedGradient | None:
        """Create the shared gradient for a pass from embedding to loss, if one matrix serves both."""
        if targets_BT is None or stage is not None or self.head is not None:
            return None
        weight_VD = self.embedding.weight
        return TiedGradient(weight_VD) if takes_one_gradient(weight_VD) else None

    @property
    def projection(self) -> torch.Tensor:
        """The vocabulary projection, (V, D); the embedding's own matrix when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def output_projection(self) -> torch.Tensor | None:
        """Return the vocabulary projection; None on a pipeline stage that lacks it."""
        has_it = self.head is not None or (self.config.tie_embeddings and "embedding" in self._modules)
        return self.projection if has_it else None

    def logits(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Compute logits (B, T, V) from final hidden states."""
        x_BTD = self._divided(x_BTD)
        softcap = self.config.logit_softcap
        if is_dtensor(x_BTD):
            from torch.distributed.tensor import Replicate

            whole_BTD = x_BTD.redistribute(placements=[Replicate()])
            logits = cast("DTensor", F.linear(whole_BTD, self.projection)).full_tensor()
        else:
            logits = F.linear(x_BTD, self.projection)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _divided(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Divide hidden states by what divides the logits, of which there are more."""
        divisor = self.config.logit_divisor
        return x_BTD if divisor == 1.0 else x_BTD / divisor

    def hidden_states(
        self,
        ids_BT: torch.Tensor,
        cache: KVCache | RowCaches | None = None,
        documents: PackedDocuments | None = None,
        *,
        counted_BT: torch.Tensor | None = None,
        stage: range | None = None,
        x_BTD: torch.Tensor | None = None,
        tied: TiedGradient | None = None,
    ) -> torch.Tensor:
        """Compute the output of the last layer to run, (B, T, D), normalised if it is the model's last layer.

        Arguments and errors are those of `forward`. `counted_BT` is True for positions that enter the routers' losses
        and loads; all positions do when it is None. Under tensor parallelism (`tensor_plan`) the result is a `DTensor`
        over positions.
        """
        layers = range(self.shape.layers) if stage is None else stage
        kinds = self.shape.attention_pattern
        # Layers without rotary embedding see the keys that full ones see.
        present = dict.fromkeys(kinds[index].replace(NO_ROTARY, FULL) for index in layers)
        positions = {kind: self._positions(kind, ids_BT, cache, documents) for kind in present}
        if self.shared is not None:
            ids_BT = self.shared.cut(ids_BT, 1)
            counted_BT = None if counted_BT is None else self.shared.cut(counted_BT, 1)
        positions = {kind: found._replace(counted=counted_BT) for kind, found in positions.items()}
        if NO_ROTARY in kinds and FULL in positions:
            full = positions[FULL]
            positions[NO_ROTARY] = full._replace(cos=full.cos[..., :0], sin=full.sin[..., :0])
        if x_BTD is None:
            weight_VD = self.embedding.weight
            x_BTD = self.embedding(ids_BT) if tied is None else tied_embedding(ids_BT, weight_VD, tied)
            if self.config.embedding_scale != 1.0:
                x_BTD = x_BTD * self.config.embedding_scale
        for index in layers:
            x_BTD = self.layers[index](x_BTD, positions[kinds[index]], cache)
        if cache is not None:
            cache.advance(ids_BT.shape[1])
        if stage is None or stage.stop == self.shape.layers:
            x_BTD = self.norm(x_BTD)
        return x_BTD

    @property
    def _any_weight(self) -> torch.Tensor:
        return next(self.parameters())

    def _positions(
        self, kind: str, ids_BT: torch.Tensor, cache: KVCache | RowCaches | None, documents: PackedDocuments | None
    ) -> Positions:
        """Build the positions for layers of one kind of attention (`headway.config.sections.architecture`)."""
        T = ids_BT.shape[1]
        device = ids_BT.device
        start = 0 if cache is None else cache.length
        limit = self.config.max_sequence_length if cache is None else cache.capacity
        if start + T > min(limit, self.config.max_sequence_length):
            raise ConfigError(
                f"a sequence of {start + T} tokens does not fit: the limit is {limit}",
                where="model.max_sequence_length" if cache is None else "the capacity of the key-value cache",
                fix="use shorter sequences, or raise the limit",
            )
        window = self.config.sliding_window if kind == SLIDING else None
        cos, sin = self._rotary_tables(kind)
        if self.shared is not None:
            if cache is not None:
                raise ConfigError(
                    "a key-value cache holds whole rows",
                    where="Decoder.forward, cache",
                    fix="generate from a checkpoint, with a model whose rows are not shared",
                )
            return shared_positions(cos, sin, T, self.shared, documents=documents, window=window)
        if documents is None and isinstance(cache, RowCaches):
            return cache.positions(cos, sin, ids_BT.shape[0], window)
        if documents is None and cache is not None:
            return cache.positions(cos, sin, T, window)
        if documents is None:
            mask_TS, is_causal = attention_mask(0, T, window, device)
            return Positions(cos[:T], sin[:T], mask_TS, is_causal)
        if cache is not None:
            raise ConfigError(
                "a key-value cache holds one document per row",
                where="Decoder.forward, documents",
                fix="leave out the cache, or put each document into a row of its own",
            )
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else self._any_weight.dtype
        compiled = self.is_compiled or torch.compiler.is_compiling()
        capped = self.config.attention_softcap is not None
        kernel = document_kernel(device, dtype, self.shape.head_dim, compiled, capped)
        positions = packed_positions(cos, sin, documents, window, kernel)
        if self.config.mamba is not None:
            # Numbers of `documents` may come again in a row; these do not fall.
            positions = positions._replace(documents=(documents.positions_BT == 0).cumsum(1))
        return positions

    def _rotary_tables(self, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotary tables for layers of one kind of attention."""
        if kind == SLIDING and self.config.local_rope_theta is not None:
            return self.local_cos, self.local_sin
        return self.cos, self.sin
