"""DeepSpeed's settings: those that follow from the config, and those that a user's own DeepSpeed JSON adds.

A key of the JSON may repeat a value of the config, or leave it open with "auto". A contradiction is refused, and the
error names the key of the config to use instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.derived.lanes import resolve_lanes
from headway.config.optimizers import DEFAULT_OPTIMIZER, find_optimizer
from headway.config.schema import Config
from headway.config.strategies import DEEPSPEED, find_strategy, simplest_strategy
from headway.core.errors import ConfigError
from headway.core.files.foreign import read_json_object

if TYPE_CHECKING:
    from headway.config.derived.mesh import MeshShape

_FILE = "parallel.deepspeed_config"


def engine_settings(config: Config, workers: int) -> dict[str, Any]:
    """Build DeepSpeed's own config of a run: the user's, with ours on top.

    Raises:
        ConfigError: the user's file cannot be read.
    """
    settings = _without_auto(_read(config.parallel.deepspeed_config)) if config.parallel.deepspeed_config else {}
    for key in (*_REFUSED, *_OWN):
        _pop(settings, key)
    grid = resolve_lanes(config, workers)
    zero = settings.setdefault("zero_optimization", {})
    offload = zero.pop("offload_optimizer", {})
    zero["stage"] = find_strategy(config.parallel.strategy).deepspeed_stage
    if config.optimizer.offload:
        zero["offload_optimizer"] = {**offload, "device": "cpu"}
    settings |= {
        "train_batch_size": config.train.global_batch_rows,
        "train_micro_batch_size_per_gpu": grid.micro_batch,
        "gradient_accumulation_steps": grid.lanes // workers * grid.micro_batches,
        "gradient_clipping": 0.0,  # clipping is part of the scale that is passed to it at each step
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # PyTorch's fused kernel for the CPU needs no compiler
    }
    if config.train.precision == "bf16":
        # With its default list, DeepSpeed would also round the gradients of linear layers in transit.
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return settings


def deepspeed_problems(config: Config, mesh: MeshShape) -> Iterator[ConfigError]:
    """Yield the settings that contradict these strategies or a DeepSpeed JSON."""
    strategy = find_strategy(config.parallel.strategy)
    train = config.train
    if not strategy.is_deepspeed:
        if config.parallel.deepspeed_config is not None:
            yield ConfigError(
                f"strategy '{strategy.name}' does not use a DeepSpeed config",
                where=f"{_FILE}, parallel.strategy",
                fix=f"parallel.strategy={DEEPSPEED[1]}, or leave {_FILE} out",
            )
        return
    own = strategy.counterpart
    if config.determinism == "elastic":
        yield ConfigError(
            "DeepSpeed sums gradients in an order that depends on the number of workers, so it cannot be 'elastic'",
            where="determinism, parallel.strategy",
            fix=f"parallel.strategy={own}, or determinism=run",
        )
    if not find_optimizer(config.optimizer.name).is_elementwise:
        whole = simplest_strategy(lambda s: s.shards_gradients) if strategy.shards_weights else own
        yield ConfigError(
            f"DeepSpeed updates flat pieces of weights, but '{config.optimizer.name}' needs whole matrices",
            where="optimizer.name, parallel.strategy",
            fix=f"optimizer.name={DEFAULT_OPTIMIZER}, or parallel.strategy={whole}",
        )
    if train.batch_ramp:
        yield ConfigError(
            "DeepSpeed has one global batch for the whole run, so it cannot begin with smaller ones",
            where="train.batch_ramp, parallel.strategy",
            fix=f"parallel.strategy={own}, or leave train.batch_ramp out",
        )
    if not mesh.is_data_parallel:
        yield ConfigError(
            "with DeepSpeed all workers are data parallel; other kinds of parallelism need Headway's own strategies",
            where="parallel.strategy, parallel.tensor, parallel.context, parallel.pipeline",
            fix=f"parallel.strategy={own}",
        )
    if train.precision not in ("fp32", "bf16", "auto"):
        yield ConfigError(
            f"with DeepSpeed, models compute in fp32 or bf16, not in {train.precision}",
            where="train.precision, parallel.strategy",
            fix=f"train.precision=bf16, or parallel.strategy={own}",
        )
    if train.compile:
        yield ConfigError(
            "a model under DeepSpeed is not compiled: its hooks would cut the graph at every layer",
            where="train.compile, parallel.strategy",
            fix=f"train.compile=false, or parallel.strategy={own}",
        )
    if config.parallel.deepspeed_config is not None:
        yield from _contradictions(config, mesh.data)


@dataclass(frozen=True)
class _Owned:
    """A key of DeepSpeed that follows from a key of the config."""

    key: str
    """Key of the config."""
    fix: str
    """Fix, with a placeholder `{theirs}` for the value in the JSON."""


_GRID = "train.micro_batch, train.lanes or parallel.workers until they agree"
_OWN = {
    "train_batch_size": _Owned("train.global_batch", "train.global_batch={theirs}"),
    "train_micro_batch_size_per_gpu": _Owned("train.micro_batch", "train.micro_batch={theirs}"),
    "gradient_accumulation_steps": _Owned("train.global_batch", f"change {_GRID}"),
    "gradient_clipping": _Owned("train.max_grad_norm", "train.max_grad_norm={theirs}"),
    "zero_optimization.compute_grad_norm": _Owned(
        "train.skip_limit", "keep it true, since train.skip_limit uses that norm"
    ),
    "zero_optimization.stage": _Owned("parallel.strategy", "parallel.strategy=deepspeed_zero{theirs}"),
}

_WITH_SHARDS = f"with parallel.strategy={simplest_strategy(lambda s: s.shards_weights)}"
#: Keys that are refused unless they are switched off, and what to use instead.
_REFUSED = {
    "optimizer": "set it by optimizer.name, optimizer.learning_rate, optimizer.betas and so on",
    "scheduler": "set it by schedule.name, schedule.warmup and so on",
    "fp16": "train.precision=bf16 computes in half precision, with weights kept in fp32",
    "bf16": "train.precision=bf16 computes in bf16, with weights kept in fp32",
    "bfloat16": "train.precision=bf16 computes in bf16, with weights kept in fp32",
    "amp": "train.precision=bf16 computes in bf16",
    "torch_autocast": "train.precision=bf16 does this",
    "data_types": "weights, gradients and moments are kept in fp32",
    "gradient_allreduce_op": "gradients are averaged over all items, however workers share them",
    "managed_gradient_accumulation": "the end of a step follows from train.global_batch",
    "checkpoint": "Headway writes the checkpoints: checkpoint.every, checkpoint.keep",
    "elasticity": "batches do not depend on the number of workers here; run again with another number",
    "data_efficiency": "data.mixture.stages changes rows during a run",
    "curriculum_learning": "data.mixture.stages changes rows during a run",
    "autotuning": "tune with DeepSpeed's own launcher, and use the result here",
    "compression_training": "it changes what is trained",
    "hybrid_engine": "it generates text during training, which Headway does not do",
    "tensor_parallel": f"parallel.tensor, {_WITH_SHARDS}",
    "sequence_parallel_size": f"parallel.context, {_WITH_SHARDS}",
    "expert_parallel": "DeepSpeed does not shard experts here",
    "compile": "train.compile, with one of Headway's own strategies",
    "zero_optimization.zenflow": "it delays the update of some weights, which a checkpoint could not record",
    "zero_optimization.super_offload": "it keeps moments where checkpoints do not find them",
    "zero_optimization.cpu_offload": "optimizer.offload=true",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param with device cpu",
    "zero_optimization.zero_hpz_partition_size": "a checkpoint could not restore its second copy of the weights",
    "zero_optimization.zero_quantized_nontrainable_weights": "weights are kept in fp32",
}
#: Values that switch such a key off.
_OFF: tuple[Any, ...] = (None, False, {}, 1, "mean")


def _contradictions(config: Config, workers: int) -> Iterator[ConfigError]:
    path = config.parallel.deepspeed_config
    assert path is not None
    try:
        theirs = _without_auto(_read(path))
        ours = engine_settings(config, workers)
    except ConfigError as error:
        yield error
        return
    ours["gradient_clipping"] = config.train.max_grad_norm or 0.0
    ours["zero_optimization"]["compute_grad_norm"] = True  # the default
    for key, owned in _OWN.items():
        value = _get(theirs, key)
        if value is not None and value != _get(ours, key):
            yield ConfigError(
                f"{path.name} sets {key} to {json.dumps(value)}; this config makes it {json.dumps(_get(ours, key))}",
                where=f"{_FILE}, {owned.key}",
                fix=f"remove it there, or {owned.fix.format(theirs=value)}",
            )
    for key, instead in _REFUSED.items():
        if not _is_off(_get(theirs, key)):
            yield ConfigError(f"{path.name} has a key '{key}': {instead}", where=_FILE, fix="remove it there")
    yield from _offloading(config, path, theirs)


def _offloading(config: Config, path: Path, theirs: dict[str, Any]) -> Iterator[ConfigError]:
    for key in ("offload_optimizer", "offload_param"):
        device = _get(theirs, f"zero_optimization.{key}.device") or "none"
        if device not in ("none", "cpu"):
            yield ConfigError(
                f"{path.name} moves state to {device}, but checkpoints are written from memory",
                where=_FILE,
                fix=f'zero_optimization.{key}.device "cpu" there',
            )
        elif key == "offload_optimizer" and device == "cpu" and not config.optimizer.offload:
            yield ConfigError(
                f"{path.name} keeps moments in host memory, but this config does not",
                where=f"{_FILE}, optimizer.offload",
                fix="optimizer.offload=true, or remove zero_optimization.offload_optimizer there",
            )


def _is_off(value: Any) -> bool:
    """Return whether a section or a value has no effect."""
    if isinstance(value, dict) and "enabled" in value:
        return value["enabled"] is False
    return any(value is off or (type(value) is type(off) and value == off) for off in _OFF)


def _read(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read_json_object(path)
    except OSError as error:
        what = f"the DeepSpeed config cannot be read: {error.strerror or error}"
        raise ConfigError(what, where=_FILE, fix=f"check {path}") from None
    except ValueError as error:
        raise ConfigError(f"the DeepSpeed config {error}", where=_FILE, fix=f"check {path}") from None


def _without_auto(value: Any) -> Any:
    """Drop values that are "auto": they count as not given."""
    if not isinstance(value, dict):
        return value
    return {key: _without_auto(child) for key, child in value.items() if child != "auto"}


def _get(settings: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        settings = settings.get(key) if isinstance(settings, dict) else None
    return settings


def _pop(settings: dict[str, Any], dotted: str) -> None:
    section, _, key = dotted.rpartition(".")
    place = _get(settings, section) if section else settings
    if isinstance(place, dict):
        place.pop(key, None)
