"""Optimizers: what each keeps for a parameter, needs and allows. The only place that knows their names.

Everything that differs between optimizers is a trait of an `OptimizerSpec`; checks, plans, trials and advice ask it. A
spec from outside is named in the config as `package.module:NAME` (docs/extending/optimizer.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

from headway.config.specs import Package, Spec, choices, resolve_spec
from headway.core.eight_bit import block_size
from headway.core.errors import ConfigError

FP32_BYTES = 4
TORCHAO = Package("torchao", "torchao", "torchao")
#: Lion computes directions for this many elements at a time (`training/optimizer/lion.py`).
_LION_ELEMENTS = 2**25
#: Projections in matrices of the native decoder (`headway.models.decoder.Decoder.fusions`), by endings of names.
_PROJECTIONS = {
    "attention.qkv.weight": 3,
    "gate_up_groups.weight": 2,
    "shared.gate_up.weight": 2,
    "mamba.input.weight": 5,
}


@dataclass(frozen=True)
class UpdateSizes:
    """Sizes that the temporaries of an update depend on, in bytes of fp32."""

    updated: int
    """All parameters that the worker updates."""
    largest: int
    """The largest parameter."""
    largest_hidden: int
    """The largest matrix in layers."""
    largest_in_8_bits: int
    """The largest parameter whose moments fit into blocks of 8-bit values; 0 without one."""
    elastic: bool
    """Whether the bits must not depend on how a matrix is sharded."""
    cpu: bool
    """Whether the update runs on the CPU."""


def _no_temporaries(sizes: UpdateSizes) -> int:
    return 0


def _no_problems(config: Any, shards: bool) -> Iterator[ConfigError]:
    yield from ()


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(Spec):
    """A value of `optimizer.name`.

    `build` makes a `torch.optim.Optimizer` from a `headway.training.optimizer.build.OptimizerInputs`.
    """

    moment_bytes: Callable[[str, tuple[int, ...]], int]
    """Bytes of the state of a parameter, or of a part of it, by its name and shape."""
    update_bytes: Callable[[UpdateSizes], int] = _no_temporaries
    """Bytes of temporaries of an update."""
    betas: tuple[float, float] | None = None
    """Decay rates where the config gives none; None for those of the schema."""
    updates_masters: bool = False
    """Whether it can update masters in host memory (`train.weights`)."""
    is_elementwise: bool = False
    """Whether it updates every element independently, as flat pieces of weights require."""
    needs_whole_rows: str | None = None
    """Why it cannot update parts of a matrix that are not whole rows; None if it can."""
    reads_matrices: bool = False
    """Whether an update depends on what shares a matrix, so that `optimizer.projections` matters."""
    lighter: tuple[str, ...] = ()
    """Optimizers to change to when memory runs out."""
    faster: str | None = None
    """Optimizer to change to when updates take long."""
    has_one_rate: bool = False
    """Whether all matrices between layers have one learning rate."""
    mixes_shards: str | None = None
    """How sums over workers change its bits where parameters are shards; None if they do not."""
    stays_with_shards: str | None = None
    """Why it cannot update shards in host memory; None if it can."""
    problems: Callable[[Any, bool], Iterator[ConfigError]] = _no_problems
    """Yields why a `Config` cannot use it, beyond what follows from the rest; the second argument says whether
    parameters are shards."""


def _two_moments(name: str, size: tuple[int, ...]) -> int:
    return 2 * FP32_BYTES * prod(size)


def _one_moment(name: str, size: tuple[int, ...]) -> int:
    return FP32_BYTES * prod(size)


def _adamw_update_bytes(sizes: UpdateSizes) -> int:
    # Fused AdamW needs none. An elastic update on the CPU runs separate operations: root, denominator, quotient.
    return 2 * sizes.largest if sizes.elastic and sizes.cpu else 0


def _muon_moment_bytes(name: str, size: tuple[int, ...]) -> int:
    is_hidden = name.startswith("layers.") and len(size) == 2
    return _one_moment(name, size) if is_hidden else _two_moments(name, size)


def _muon_update_bytes(sizes: UpdateSizes) -> int:
    # The update in fp32, three matrices in bf16 (Newton-Schulz): its argument, the last step's and the next.
    return sizes.largest_hidden * (FP32_BYTES + 3 * 2) // FP32_BYTES


def _lion_update_bytes(sizes: UpdateSizes) -> int:
    return min(sizes.updated, max(_LION_ELEMENTS * FP32_BYTES, sizes.largest))


def _adafactor_moment_bytes(name: str, size: tuple[int, ...]) -> int:
    if len(size) < 2:
        return _one_moment(name, size)
    elements = prod(size)
    by_column = next((count for ending, count in _PROJECTIONS.items() if name.endswith(ending)), 1)
    return FP32_BYTES * (elements // size[-1] + by_column * (elements // size[-2]))


def _adafactor_update_bytes(sizes: UpdateSizes) -> int:
    # The update; for a projection in a larger matrix, of which it may be two thirds, its weight and gradient too.
    return max(sizes.largest, 2 * sizes.largest_hidden)


def _adamw8bit_moment_bytes(name: str, size: tuple[int, ...]) -> int:
    if not (block := block_size(size)):
        return _two_moments(name, size)
    return 2 * (prod(size) + FP32_BYTES * prod(size) // block)


def _adamw8bit_update_bytes(sizes: UpdateSizes) -> int:
    # One compiled kernel on a GPU. On the CPU, as measured: fp32 copies of both moments and of the weight, quotients,
    # and the search for codes with 8-byte indices.
    return 53 * sizes.largest_in_8_bits // 4 if sizes.cpu else 0


_ADAMW = OptimizerSpec(
    name="adamw",
    build="headway.training.optimizer.build:build_adamw",
    moment_bytes=_two_moments,
    update_bytes=_adamw_update_bytes,
    updates_masters=True,
    is_elementwise=True,
    lighter=("adamw8bit", "lion"),
)
_LION = OptimizerSpec(
    name="lion",
    build="headway.training.optimizer.build:build_lion",
    moment_bytes=_one_moment,
    update_bytes=_lion_update_bytes,
    betas=(0.9, 0.99),
    is_elementwise=True,
)

#: Headway's optimizers by name.
OPTIMIZERS = {
    spec.name: spec
    for spec in (
        _ADAMW,
        OptimizerSpec(
            name="muon",
            build="headway.training.optimizer.build:build_muon",
            moment_bytes=_muon_moment_bytes,
            update_bytes=_muon_update_bytes,
            faster=_ADAMW.name,
            reads_matrices=True,
            has_one_rate=True,
        ),
        _LION,
        OptimizerSpec(
            name="adafactor",
            reads_matrices=True,
            build="headway.training.optimizer.build:build_adafactor",
            moment_bytes=_adafactor_moment_bytes,
            update_bytes=_adafactor_update_bytes,
            needs_whole_rows="adafactor keeps means of whole rows, which a part of a matrix does not have",
            mixes_shards=(
                "adafactor sums over the rows of a matrix, and sums over workers round differently from sums on one"
            ),
            stays_with_shards="adafactor sums over the parts of a matrix on all workers",
        ),
        OptimizerSpec(
            name="adamw8bit",
            build="headway.training.optimizer.build:build_adamw8bit",
            needs=TORCHAO,
            moment_bytes=_adamw8bit_moment_bytes,
            update_bytes=_adamw8bit_update_bytes,
            needs_whole_rows=(
                "adamw8bit quantises blocks of up to 256 neighbours in a row, and these blocks change when rows are cut"
            ),
            stays_with_shards="adamw8bit keeps its moments in shards on the device",
        ),
    )
}
#: The default, which any strategy and any machine can use.
DEFAULT_OPTIMIZER = _ADAMW.name
#: One with small moments that can update any part of a matrix.
LIGHT_OPTIMIZER = _LION.name

OptimizerName = Annotated[str, *choices(OPTIMIZERS)]


def find_optimizer(name: str) -> OptimizerSpec:
    """Return the spec of a value of `optimizer.name`.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    return resolve_spec(OPTIMIZERS, name, "optimizer.name", OptimizerSpec)
