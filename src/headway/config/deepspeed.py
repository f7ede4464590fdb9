"""What DeepSpeed is told: ours, which follows from the config, and what a user's own DeepSpeed JSON adds to it.

A key there may repeat what the config says, or leave it open with "auto". One that says something else is refused, with
the key of the config that it should have been.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.lanes import resolve_lanes
from headway.core.errors import ConfigError
from headway.core.foreign import read_json_object

if TYPE_CHECKING:
    from headway.config.mesh import MeshShape
    from headway.config.schema import Config

#: Strategies of the library of that name; the last character is the stage of ZeRO.
DEEPSPEED = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
_FILE = "parallel.deepspeed_config"
#: Optimizers that treat every element by itself: all that flat pieces of weights allow.
_ELEMENTWISE = ("adamw", "lion")


def engine_settings(config: Config, workers: int) -> dict[str, Any]:
    """DeepSpeed's own config of a run: the user's, with ours on top.

    Raises:
        ConfigError: the user's file cannot be read.
    """
    settings = _without_auto(_read(config.parallel.deepspeed_config)) if config.parallel.deepspeed_config else {}
    for key in (*_REFUSED, *_OWN):
        _pop(settings, key)
    grid = resolve_lanes(config, workers)
    zero = settings.setdefault("zero_optimization", {})
    offload = zero.pop("offload_optimizer", {})
    zero["stage"] = int(config.parallel.strategy[-1])
    if config.optimizer.offload:
        zero["offload_optimizer"] = {**offload, "device": "cpu"}
    settings |= {
        "train_batch_size": config.train.global_batch_rows,
        "train_micro_batch_size_per_gpu": grid.micro_batch,
        "gradient_accumulation_steps": grid.lanes // workers * grid.micro_batches,
        "gradient_clipping": 0.0,  # clipping is part of the scale that it is given at each step
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # PyTorch's fused kernel for the CPU needs no compiler
    }
    if config.train.precision == "bf16":
        # Without a list of its own, DeepSpeed would also round the gradients of linear layers on their way.
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return settings


def deepspeed_problems(config: Config, mesh: MeshShape) -> Iterator[ConfigError]:
    """What these strategies, or a DeepSpeed JSON, do not go together with."""
    strategy, train = config.parallel.strategy, config.train
    if strategy not in DEEPSPEED:
        if config.parallel.deepspeed_config is not None:
            yield ConfigError(
                f"strategy '{strategy}' has no use for a DeepSpeed config",
                where=f"{_FILE}, parallel.strategy",
                fix=f"parallel.strategy={DEEPSPEED[1]}, or leave {_FILE} out",
            )
        return
    own = f"zero{strategy[-1]}"
    if config.determinism == "elastic":
        yield ConfigError(
            "DeepSpeed sums gradients in an order that depends on the number of workers, so it cannot be 'elastic'",
            where="determinism, parallel.strategy",
            fix=f"parallel.strategy={own}, or determinism=run",
        )
    if config.optimizer.name not in _ELEMENTWISE:
        yield ConfigError(
            f"DeepSpeed updates flat pieces of weights, of which '{config.optimizer.name}' needs more than that",
            where="optimizer.name, parallel.strategy",
            fix=f"optimizer.name=adamw, or parallel.strategy={'zero2' if own == 'zero3' else own}",
        )
    if train.batch_ramp:
        yield ConfigError(
            "DeepSpeed is told one global batch for the whole run, so it cannot begin with smaller ones",
            where="train.batch_ramp, parallel.strategy",
            fix=f"parallel.strategy={own}, or leave train.batch_ramp out",
        )
    if not mesh.is_data_parallel:
        yield ConfigError(
            "with DeepSpeed all workers share the data; other kinds of parallelism go with our own strategies",
            where="parallel.strategy, parallel.tensor, parallel.context, parallel.pipeline",
            fix=f"parallel.strategy={own}",
        )
    if train.precision not in ("fp32", "bf16"):
        yield ConfigError(
            f"with DeepSpeed models compute in fp32 or bf16, not in {train.precision}",
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
    """A key of DeepSpeed's that follows from ours."""

    key: str
    """Of the config."""
    fix: str
    """With `{theirs}`."""


_GRID = "train.micro_batch, train.lanes or parallel.workers until they agree"
_OWN = {
    "train_batch_size": _Owned("train.global_batch", "train.global_batch={theirs}"),
    "train_micro_batch_size_per_gpu": _Owned("train.micro_batch", "train.micro_batch={theirs}"),
    "gradient_accumulation_steps": _Owned("train.global_batch", f"change {_GRID}"),
    "gradient_clipping": _Owned("train.max_grad_norm", "train.max_grad_norm={theirs}"),
    "zero_optimization.compute_grad_norm": _Owned("train.skip_limit", "leave steps that are not finite to that norm"),
    "zero_optimization.stage": _Owned("parallel.strategy", "parallel.strategy=deepspeed_zero{theirs}"),
}

#: Keys that have no place here, unless they are switched off, and what takes it.
_REFUSED = {
    "optimizer": "set it by optimizer.name, optimizer.learning_rate, optimizer.betas and so on",
    "scheduler": "set it by schedule.name, schedule.warmup and so on",
    "fp16": "train.precision=bf16 computes in half precision, with weights kept in fp32",
    "bf16": "train.precision=bf16 computes in bf16, with weights kept in fp32",
    "bfloat16": "train.precision=bf16 computes in bf16, with weights kept in fp32",
    "amp": "train.precision=bf16 computes in bf16",
    "torch_autocast": "train.precision=bf16 does this",
    "data_types": "weights, gradients and moments are kept in fp32",
    "gradient_allreduce_op": "gradients are averaged over all items, whatever workers have of them",
    "managed_gradient_accumulation": "when a step ends follows from train.global_batch",
    "checkpoint": "checkpoints are ours: checkpoint.every, checkpoint.keep",
    "elasticity": "batches do not depend on the number of workers here; run again with another number",
    "data_efficiency": "data.mixture.stages changes rows while a run goes on",
    "curriculum_learning": "data.mixture.stages changes rows while a run goes on",
    "autotuning": "take DeepSpeed's own launcher for it, and its result for a run",
    "compression_training": "it changes what is trained",
    "hybrid_engine": "it serves generation while training, which does not happen here",
    "tensor_parallel": "parallel.tensor, with parallel.strategy=fsdp",
    "sequence_parallel_size": "parallel.context, with parallel.strategy=fsdp",
    "expert_parallel": "experts are not divided by DeepSpeed here",
    "compile": "train.compile, with one of our own strategies",
    "zero_optimization.zenflow": "it updates some weights later than others, which a checkpoint could not tell",
    "zero_optimization.super_offload": "it keeps moments where a checkpoint does not look for them",
    "zero_optimization.cpu_offload": "optimizer.offload=true",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param with device cpu",
    "zero_optimization.zero_hpz_partition_size": "its second copy of weights would not follow a checkpoint",
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
    ours["zero_optimization"]["compute_grad_norm"] = True  # as it is when nobody says anything
    for key, owned in _OWN.items():
        value = _get(theirs, key)
        if value is not None and value != _get(ours, key):
            yield ConfigError(
                f"{path.name} says {key} is {json.dumps(value)}; this config makes it {json.dumps(_get(ours, key))}",
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
                f"{path.name} keeps moments in host memory, and this config does not",
                where=f"{_FILE}, optimizer.offload",
                fix="optimizer.offload=true, or remove zero_optimization.offload_optimizer there",
            )


def _is_off(value: Any) -> bool:
    """Whether a section or a value does nothing."""
    if isinstance(value, dict) and "enabled" in value:
        return value["enabled"] is False
    return any(value is off or (type(value) is type(off) and value == off) for off in _OFF)


def _read(path: Path) -> dict[str, Any]:
    """A DeepSpeed JSON.

    Raises:
        ConfigError: there is none that can be read.
    """
    try:
        return read_json_object(path)
    except OSError as error:
        what = f"the DeepSpeed config cannot be read: {error.strerror or error}"
        raise ConfigError(what, where=_FILE, fix=f"check {path}") from None
    except ValueError as error:
        raise ConfigError(f"the DeepSpeed config {error}", where=_FILE, fix=f"check {path}") from None


def _without_auto(value: Any) -> Any:
    """What is left open for a program to fill in is as good as not given."""
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
