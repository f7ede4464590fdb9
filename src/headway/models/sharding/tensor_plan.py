"""How tensor parallelism cuts the decoder's matrices.

Between layers each worker has some positions of the residual stream in full width. A layer's first matrices take all
positions and give each worker whole groups of heads or of the feed-forward width. Its last matrices give partial sums;
one reduce-scatter adds them and splits the result by position.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from headway.config import ModelConfig
from headway.config.derived.mesh import padded_rows
from headway.config.sections.architecture import UNDIVIDED_NORM
from headway.core.errors import ConfigError
from headway.models.shape import Shape

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel.style import ParallelStyle


def decoder_plan(config: ModelConfig, workers: int, parts: Iterable[str]) -> dict[str, ParallelStyle]:
    """Return a style for every module of a decoder that has parameters or needs all positions of its input.

    Args:
        config: Config of the decoder.
        workers: Number of tensor-parallel workers.
        parts: Names of the local modules; a pipeline stage has some of the model's.

    Raises:
        ConfigError: the heads, feed-forward groups or vocabulary cannot be split evenly, or there are Mamba-2 layers.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    shape = Shape.of(config)
    if config.mamba is not None:
        raise ConfigError(
            "the groups of a Mamba-2 layer are not divided between workers",
            where="parallel.tensor, model.layer_pattern",
            fix="parallel.tensor=1, and more data parallelism",
        )
    if config.qk_norm_over == "projection" and workers > 1:
        raise ConfigError(
            UNDIVIDED_NORM,
            where="parallel.tensor, model.qk_norm_over",
            fix="parallel.tensor=1, and more data parallelism",
        )
    _check_equal_parts(shape, workers)

    def all_positions(others: int) -> ParallelStyle:
        """Gather all positions of the first argument on every worker and leave the others alone."""
        rest = (None,) * others
        return PrepareModuleInput(input_layouts=(Shard(1), *rest), desired_input_layouts=(Replicate(), *rest))

    to_positions = RowwiseParallel(output_layouts=Shard(1))
    per_head = SequenceParallel(sequence_dim=2, use_local_output=True)
    to_residual = SequenceParallel(use_local_output=True)
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention_post_norm": to_residual,
        "layers.*.attention": all_positions(others=2),
        "layers.*.attention.qkv": ColwiseParallel(),
        "layers.*.attention.output": to_positions,
        "layers.*.feed_forward_norm": SequenceParallel(),
        "layers.*.feed_forward_post_norm": to_residual,
        "layers.*.feed_forward": all_positions(others=0),
        "layers.*.feed_forward.gate_up_groups": ColwiseParallel(),
        "layers.*.feed_forward.up": ColwiseParallel(),
        "layers.*.feed_forward.down": to_positions,
        "layers.*.attention.q_norm": per_head,
        "layers.*.attention.k_norm": per_head,
        "norm": SequenceParallel(),
        "head": ColwiseParallel(),
    }
    named = [(part, re.sub(r"^layers\.\d+", "layers.*", part)) for part in parts]
    plan = {part: styles[kind] for part, kind in named if kind in styles}
    routers = [part for part, kind in named if kind == "layers.*.feed_forward.router"]
    if routers:
        from headway.models.sharding.mixture_plan import OwnPositions

        plan |= {router.removesuffix(".router"): OwnPositions() for router in routers}
    return plan


def _check_equal_parts(shape: Shape, workers: int) -> None:
    for what, number in (("key-value heads", shape.kv_heads), ("groups of its feed-forward width", shape.ffn_groups)):
        if number % workers:
            raise ConfigError(
                f"the model's {number} {what} cannot be shared evenly by {workers} tensor-parallel workers",
                where="parallel.tensor",
                fix="a number of workers that divides it",
            )
    if shape.vocab_size % workers:
        raise ConfigError(
            f"a vocabulary of {shape.vocab_size} rows cannot be shared evenly by {workers} tensor-parallel workers",
            where="parallel.tensor, model.vocab_size",
            fix=f"model.vocab_size={padded_rows(shape.vocab_size, workers)}, in a new run",
        )
