"""What weights in bf16 with their masters in host memory (`train.weights`) do not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headway.config.derived.mesh import effective_strategy
from headway.config.optimizers import OPTIMIZERS, find_optimizer
from headway.config.strategies import distinct_strategies, find_strategy
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.derived.mesh import MeshShape
    from headway.config.schema import Config

#: A moment in bf16 must lose its share in a step, 1 - beta, by more than half of its last bit, or it never falls.
_LARGEST_BETA_OF_BF16 = 0.99


def host_weight_problems(config: Config, mesh: MeshShape) -> Iterator[ConfigError]:
    """Yield the settings that contradict `train.weights`, or `optimizer.moments` without it.

    Args:
        mesh: The workers.
    """
    weights = config.train.weights
    if weights == "fp32":
        if config.optimizer.moments != "fp32":
            yield ConfigError(
                f"moments in {config.optimizer.moments} belong to weights in bf16",
                where="optimizer.moments, train.weights",
                fix="train.weights=bf16, or optimizer.moments=fp32",
            )
        return
    yield from _arithmetic(config)
    yield from _workers(config, mesh)
    for key, is_set, reason, fix in _others(config):
        if is_set:
            yield ConfigError(
                f"{reason} (train.weights={weights})",
                where=f"{key}, train.weights",
                fix=f"{fix}, or train.weights=fp32",
            )


def _arithmetic(config: Config) -> Iterator[ConfigError]:
    """Check the products and the optimizer."""
    train = config.train
    optimizer = config.optimizer
    if train.precision not in ("bf16", "auto"):
        yield ConfigError(
            f"weights in bf16 are multiplied in bf16, not in {train.precision}",
            where="train.precision, train.weights",
            fix="train.precision=bf16, or train.weights=fp32",
        )
    if not find_optimizer(optimizer.name).updates_masters:
        able = " or ".join(name for name, spec in OPTIMIZERS.items() if spec.updates_masters)
        yield ConfigError(
            f"'{optimizer.name}' does not update weights in host memory",
            where="optimizer.name, train.weights",
            fix=f"optimizer.name={able}, or train.weights=fp32",
        )
    if train.weights == "bf16" and optimizer.moments == "bf16" and max(optimizer.betas) > _LARGEST_BETA_OF_BF16:
        yield ConfigError(
            f"with a decay rate of {max(optimizer.betas)} a moment in bf16 would round back to what it was, and never"
            " fall",
            where="optimizer.betas, optimizer.moments",
            fix=f"rates up to {_LARGEST_BETA_OF_BF16}, or optimizer.moments=fp32",
        )


def _workers(config: Config, mesh: MeshShape) -> Iterator[ConfigError]:
    """Check the strategy, and what else divides a model."""
    strategy = find_strategy(effective_strategy(config.parallel.strategy, mesh))
    parallel = config.parallel
    is_divided = not mesh.is_data_parallel or (mesh.dp_replicate > 1 and strategy.shards_weights) or mesh.ep > 1
    if not strategy.build_on_host or is_divided:
        able = [spec.name for spec in distinct_strategies() if spec.build_on_host and spec.sums_gradients]
        yield ConfigError(
            "weights in bf16 are trained on one worker, or on data-parallel workers that divide masters and moments;"
            f" this run has strategy '{parallel.strategy}' on {mesh.size} workers",
            where="parallel, train.weights",
            fix=f"parallel.strategy={' or '.join(able)} without other kinds of parallelism, or train.weights=fp32",
        )
    if config.determinism == "elastic":
        yield ConfigError(
            "determinism 'elastic' sums lanes in a tree, but gradients in host memory are added one after the other",
            where="determinism, train.weights",
            fix="determinism=run, or train.weights=fp32",
        )


def _others(config: Config) -> Iterator[tuple[str, bool, str, str]]:
    """Yield for each key that does not go with it: the key, whether it is set, why, and what to set instead."""
    yield (
        "optimizer.offload",
        config.optimizer.offload,
        "moments are in host memory already",
        "optimizer.offload=false",
    )
    yield "train.ema", config.train.ema is not None, "an average of weights would be on the device", "train.ema=null"
    yield (
        "model.adapter",
        config.model.adapter is not None,
        "an adapter trains so few weights that their masters and moments fit on the device",
        "model.adapter=null",
    )
    yield (
        "checkpoint.memory_every",
        config.checkpoint.memory_every is not None,
        "a memory snapshot would be a second copy of masters and moments in host memory",
        "checkpoint.memory_every=null",
    )
    yield (
        "health.replay_every",
        bool(config.health.replay_every),
        "gradients leave the device as they are computed, so a step cannot be computed twice and compared",
        "health.replay_every=0",
    )
