"""Advice on what to change first: only settings that this config lacks and accepts, and that this machine supports."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence

from headway.config import Config, find_optimizer, find_strategy, override
from headway.config.strategies import simplest_strategy
from headway.core.errors import ConfigError
from headway.lab.profiling.record import BOTH_PASSES, CHECKPOINT, WorkerRecord
from headway.telemetry.arithmetic import cpu_multiplies_bf16

#: A feed that takes less than this share of a step by itself is not the bottleneck.
_FEED_SHARE = 0.8


def advice_for(
    config: Config, parts: Sequence[str], slowest: WorkerRecord, workers: Sequence[WorkerRecord]
) -> list[str]:
    """Return overrides or sentences, the most promising first; none if nothing is known to help."""
    rules = {
        "data": _data,
        "forward": _passes,
        BOTH_PASSES: _passes,
        "reduction": _reduction,
        "optimizer": _optimizer,
        CHECKPOINT: _checkpoint,
        "host": _host,
    }
    found = rules[parts[0]](config, slowest, workers)
    return [text for text in found if not _is_override(text) or _is_accepted(config, text)]


def _is_override(text: str) -> bool:
    return "=" in text and " " not in text.partition("=")[0]


def _is_accepted(config: Config, text: str) -> bool:
    """Return whether the config remains valid with the override."""
    try:
        override(config, [text])
    except ConfigError:
        return False
    return True


def _passes(config: Config, worker: WorkerRecord, workers: Sequence[WorkerRecord]) -> Iterator[str]:
    train = config.train
    if worker.device == "cpu" and train.precision == "bf16" and not cpu_multiplies_bf16():
        yield "train.precision=fp32"  # bf16 is emulated, or no faster
    if not train.compile and (worker.device == "cuda" or (worker.device == "cpu" and _has_compiler())):
        yield "train.compile=true"
    if train.precision in ("fp32", "tf32") and (worker.device == "cuda" or _cpu_has_bf16(worker)):
        yield "train.precision=bf16"
    if train.activation_checkpointing != "none":
        weaker = {"offload": "full", "full": "selective"}
        yield f"train.activation_checkpointing={weaker.get(train.activation_checkpointing, 'none')}"
    rows = train.global_batch_rows // len(workers)
    if isinstance(train.micro_batch, int) and train.micro_batch < rows and worker.device == "cuda":
        yield "train.micro_batch=auto"


def _cpu_has_bf16(worker: WorkerRecord) -> bool:
    return worker.device == "cpu" and cpu_multiplies_bf16()


def _has_compiler() -> bool:
    """Return whether a C++ compiler is available, which torch.compile needs on a CPU."""
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++"))))


def _data(config: Config, worker: WorkerRecord, workers: Sequence[WorkerRecord]) -> Iterator[str]:
    rest = worker.step_seconds - worker.part_seconds("data")
    if worker.feed_seconds < _FEED_SHARE * rest:
        yield (
            "checking what else runs on the machine, since the feed by itself makes the batches of a step in"
            f" {worker.feed_seconds * 1e3:.1f} ms, while the rest of the step takes {rest * 1e3:.1f} ms"
        )
    elif config.data.remote is not None:
        yield "a data.cache_bytes that holds the whole store, or a copy of it on a local disk"
    else:
        yield (
            f"a faster disk for data.store, since the feed by itself takes {worker.feed_seconds * 1e3:.1f} ms for the"
            " batches of a step"
        )


def _reduction(config: Config, worker: WorkerRecord, workers: Sequence[WorkerRecord]) -> Iterator[str]:
    if len(workers) == 1:
        return
    if config.determinism == "elastic":
        yield "determinism=run"  # the sum in the tree cannot begin before the last lane has ended
    strategy = find_strategy(config.parallel.strategy)
    if strategy.sums_gradients and strategy.keeps_whole_gradients and config.parallel.reduce_precision == "fp32":
        yield "parallel.reduce_precision=bf16"
    yield f"train.global_batch={2 * config.train.global_batch_rows}"


def _optimizer(config: Config, worker: WorkerRecord, workers: Sequence[WorkerRecord]) -> Iterator[str]:
    strategy = find_strategy(config.parallel.strategy)
    if len(workers) > 1 and strategy.sums_gradients and not strategy.shards_moments:
        yield f"parallel.strategy={simplest_strategy(lambda spec: spec.shards_moments)}"
    yield f"train.global_batch={2 * config.train.global_batch_rows}"
    if faster := find_optimizer(config.optimizer.name).faster:
        yield f"optimizer.name={faster}"


def _checkpoint(config: Config, worker: WorkerRecord, workers: Sequence[WorkerRecord]) -> Iterator[str]:
    if config.checkpoint.every != "auto":
        yield "checkpoint.every=auto"


def _host(config: Config, worker: WorkerRecord, workers: Sequence[WorkerRecord]) -> Iterator[str]:
    telemetry = config.telemetry
    if telemetry.state_hash_every:
        yield "telemetry.state_hash_every=0"
    if telemetry.log_every < 10:
        yield "telemetry.log_every=10"
