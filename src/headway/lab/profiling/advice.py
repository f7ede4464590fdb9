"""Advice on what to change first: only settings that this config lacks and accepts, and that this machine supports."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence

from headway.config import Config, find_optimizer, find_strategy, override
from headway.config.strategies import simplest_strategy
from headway.core.errors import ConfigError
from headway.lab.profiling.record import WorkerRecord
from headway.telemetry.arithmetic import cpu_multiplies_bf16

#: A feed that takes less than this share of a step by itself is not the bottleneck.
_FEED_SHARE = 0.8


def advice_for(
    config: Config, parts: Sequence[str], slowest: WorkerRecord, workers: Sequence[WorkerRecord]
) -> list[str]:
    """Return overrides or sentences, the most promising first; none if nothing is known to help."""
    return [text for text in _ideas(config, parts[0], slowest, workers) if _is_accepted(config, text)]


def _is_accepted(config: Config, text: str) -> bool:
    """Return whether the config remains valid with an override; a sentence changes nothing."""
    if " " in text.partition("=")[0]:
        return True
    try:
        override(config, [text])
    except ConfigError:
        return False
    return True


def _ideas(config: Config, part: str, worker: WorkerRecord, workers: Sequence[WorkerRecord]) -> Iterator[str]:
    strategy = find_strategy(config.parallel.strategy)
    larger = f"train.global_batch={2 * config.train.global_batch_rows}"
    match part:
        case "data":
            yield _on_data(config, worker)
        case "reduction":
            if len(workers) == 1:
                return
            if config.determinism == "elastic":
                yield "determinism=run"  # the sum in the tree cannot begin before the last lane has ended
            is_whole = strategy.sums_gradients and strategy.keeps_whole_gradients
            if is_whole and config.parallel.reduce_precision == "fp32":
                yield "parallel.reduce_precision=bf16"
            yield larger
        case "optimizer":
            if len(workers) > 1 and strategy.sums_gradients and not strategy.shards_moments:
                yield f"parallel.strategy={simplest_strategy(lambda spec: spec.shards_moments)}"
            yield larger
            if faster := find_optimizer(config.optimizer.name).faster:
                yield f"optimizer.name={faster}"
        case "checkpoint":
            if config.checkpoint.every != "auto":
                yield "checkpoint.every=auto"
        case "host":
            if config.telemetry.state_hash_every:
                yield "telemetry.state_hash_every=0"
            if config.telemetry.log_every < 10:
                yield "telemetry.log_every=10"
        case _:
            yield from _on_passes(config, worker, workers)


def _on_passes(config: Config, worker: WorkerRecord, workers: Sequence[WorkerRecord]) -> Iterator[str]:
    train = config.train
    if worker.device == "cpu" and train.precision == "bf16" and not cpu_multiplies_bf16():
        yield "train.precision=fp32"  # bf16 is emulated, or no faster
    if not train.compile and (worker.device == "cuda" or (worker.device == "cpu" and _has_compiler())):
        yield "train.compile=true"
    has_bf16 = worker.device == "cuda" or (worker.device == "cpu" and cpu_multiplies_bf16())
    if train.precision in ("fp32", "tf32") and has_bf16:
        yield "train.precision=bf16"
    if train.activation_checkpointing != "none":
        weaker = {"offload": "full", "full": "selective"}
        yield f"train.activation_checkpointing={weaker.get(train.activation_checkpointing, 'none')}"
    rows = train.global_batch_rows // len(workers)
    if isinstance(train.micro_batch, int) and train.micro_batch < rows and worker.device == "cuda":
        yield "train.micro_batch=auto"


def _has_compiler() -> bool:
    """Return whether a C++ compiler is available, which torch.compile needs on a CPU."""
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++"))))


def _on_data(config: Config, worker: WorkerRecord) -> str:
    rest = worker.step_seconds - worker.part_seconds("data")
    feed = f"{worker.feed_seconds * 1e3:.1f} ms"
    if worker.feed_seconds < _FEED_SHARE * rest:
        return (
            f"checking what else runs on the machine, since the feed by itself makes the batches of a step in {feed},"
            f" while the rest of the step takes {rest * 1e3:.1f} ms"
        )
    if config.data.remote is not None:
        return "a data.cache_bytes that holds the whole store, or a copy of it on a local disk"
    return f"a faster disk for data.store, since the feed by itself takes {feed} for the batches of a step"
