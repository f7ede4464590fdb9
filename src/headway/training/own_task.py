"""Tasks of the user's own: any module on any map-style dataset, made by a function that the config names."""

from __future__ import annotations

import dataclasses
import inspect
import random
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, TypeAdapter, ValidationError
from torch import nn

from headway.config import Config, LaneGrid, MeshShape
from headway.config.sections.task import TaskConfig
from headway.core.code_identity import combined, object_identity
from headway.core.errors import ConfigError, HeadwayError
from headway.core.files.hashes import fingerprint
from headway.core.functions import load_function
from headway.core.own_code import identity_of_sources, import_from, sources_of
from headway.core.random import derive_seed
from headway.core.types import Checkpointing
from headway.data.feeding.dataset_feed import DatasetEvaluationFeed, DatasetFeed, Reader
from headway.data.feeding.segmented import dataset_plan
from headway.models.decoder import Decoder
from headway.training.custom_loss import check_differentiable
from headway.training.figures import Figures, Metric, metric_of
from headway.training.optimizer.groups import own_groups
from headway.training.task import Objective
from headway.training.task import Task as RunTask

#: (model, micro-batch) -> the mean loss over the micro-batch's items, (): one number, or several by name; or a pair of
#: that and outputs, which the metrics get.
Loss = Callable[[nn.Module, Any], Any]
#: Names of metrics and of parts of the loss.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
#: Names under `evaluation/` that are taken.
_TAKEN = {"loss", "losses", "perplexity", "replay_loss", "replay_perplexity", "benchmarks", "benchmarks_step"}
#: Longer lists of a dataset hold samples, not functions or datasets.
_FEW = 100


@dataclass
class Task:
    """What a run trains in place of a language model: `headway.Task(model, dataset, loss, ...)`."""

    model: nn.Module
    """Its forward pass is called by the loss. Its blocks for `zero3` are those of `wrap_units`, if it has that."""
    dataset: Any
    """With `__len__`, and `__getitem__(i)` or `__getitem__(i, rng)`: a sample is a function of the index, and of the
    `numpy.random.Generator` that belongs to the step, the lane and the index."""
    loss: Loss
    """`(model, micro-batch)` -> the mean loss over the micro-batch's items: one number, or several by name, which are
    weighted and added. With metrics, a pair of that and outputs."""
    validation: Any = None
    """A second dataset, for evaluations."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a micro-batch from a list of samples; PyTorch's default when not given."""
    metrics: Mapping[str, Metric | Callable[[Any, Any], Any]] = field(default_factory=dict)
    """By name: `(outputs, micro-batch)` -> values to average, or a `headway.Metric`; computed in evaluations."""
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of a loss that gives several numbers, by name; 1 for a name that is not here."""
    parameter_groups: Callable[[nn.Module], Sequence[Mapping[str, Any]]] | None = None
    """`(model)` -> groups of parameters with what they have of their own: `{"params": ..., "lr_scale": 0.1,
    "weight_decay": 0.0, "max_grad_norm": 1.0}`. Parameters in no group are as in the config."""
    count_items: Callable[[Any], int] | None = None
    """The number of items in a micro-batch, over which the loss is a mean; its samples when not given."""


def build_task(config: Config) -> Task:
    """Make the task that a config names.

    The weights that the function draws are a function of `seed`; the generators are as before afterwards.

    Raises:
        ConfigError: the function cannot be found, its options do not fit, or what it returns is no task.
    """
    given = config.task
    assert given is not None, "the run has a task of its own"
    if given.files:
        import_from(given.files)
    _, function = load_function(given.function, "task.function")
    arguments = [config, *_options(function, given.function, given.options)]
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed = derive_seed(config.seed, "task")
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        found = function(*arguments)
    random.setstate(states[0])
    np.random.set_state(states[1])
    if not isinstance(found, Task):
        raise ConfigError(
            f"{given.function} returned {_kind(found)}, which is no task",
            where="task.function",
            fix="return headway.Task(model, dataset, loss)",
        )
    check_task(found)
    return found


def _options(function: Callable[..., Any], name: str, given: Mapping[str, Any]) -> list[Any]:
    """Return what the function of a task gets besides the config: its options, checked by the type that it declares."""
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) < 2:
        if given:
            raise ConfigError(
                f"{name} takes no options: {', '.join(given)}",
                where="task.options",
                fix="leave them out, or give the function a second parameter: def build(config, options: Options)",
            )
        return []
    kind = typing.get_type_hints(function).get(parameters[1].name, dict)
    known: list[str] = []
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        known = [field.alias or key for key, field in kind.model_fields.items()]
    elif dataclasses.is_dataclass(kind):
        known = [one.name for one in dataclasses.fields(kind)]
    elif kind in (dict, Any):
        return [dict(given)]
    for key in (key for key in given if key not in known):
        near = get_close_matches(key, known, n=1)
        raise ConfigError(
            f"{name} has no option {key}",
            where=f"task.options.{key}",
            fix=f"did you mean {near[0]}?" if near else f"known options: {', '.join(known) or 'none'}",
        )
    try:
        return [TypeAdapter(kind).validate_python(dict(given))]
    except ValidationError as error:
        problems = [
            (".".join(["task.options", *map(str, one["loc"])]), one["msg"])
            for one in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError(
            f"the options of {name} do not fit: " + "; ".join(f"{key}: {words}" for key, words in problems),
            where=", ".join(key for key, _ in problems),
            fix=f"see {kind.__name__}, which the function declares",
        ) from None


def check_task(task: Task) -> None:
    """Check a task as far as that needs no pass of its model.

    Raises:
        ConfigError: a part of it cannot be trained.
    """
    if not isinstance(task.model, nn.Module):
        raise _unfit("model", f"{_kind(task.model)} is no torch.nn.Module", "give a module")
    if not any(p.requires_grad for p in task.model.parameters()):
        raise _unfit("model", "no parameter of the model is trainable", "leave requires_grad on for some")
    for name, dataset in (("dataset", task.dataset), ("validation", task.validation)):
        if dataset is None and name == "validation":
            continue
        try:
            count = len(dataset)
        except TypeError:
            raise _unfit(
                name,
                f"{_kind(dataset)} has no length, so its rows cannot be put into an order",
                "give a map-style dataset, with __len__ and __getitem__; wids (webdataset<1) reads WebDataset by index",
            ) from None
        if not hasattr(dataset, "__getitem__"):
            raise _unfit(name, f"{_kind(dataset)} has no __getitem__", "give a map-style dataset")
        if not count:
            raise _unfit(name, f"{_kind(dataset)} has no rows", "give it at least one")
    if not callable(task.loss):
        raise _unfit("loss", f"{_kind(task.loss)} cannot be called", "give a function (model, micro-batch) -> loss")
    for key, names in (("metrics", task.metrics), ("loss_weights", task.loss_weights)):
        for name in names:
            if not _NAME.fullmatch(name) or (key == "metrics" and name in _TAKEN):
                raise _unfit(key, f"'{name}' cannot be the name of a figure", "letters, digits, '_', '-', '.'")


def _unfit(part: str, what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=f"task: {part}", fix=fix)


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def own_run_task(
    config: Config,
    own: Task,
    grid: LaneGrid,
    mesh: MeshShape,
    rank: int,
    *,
    code: Mapping[str, str] | None = None,
) -> RunTask:
    """Make one worker's part of a run of a task of the user's own.

    Args:
        code: Identities of its code; those of the modules that the config names when not given.

    Raises:
        ConfigError: it cannot be trained as the config says.
    """
    _set_activation_checkpointing(own.model, config.train.activation_checkpointing)
    reader = Reader(own.dataset, config.seed, own.collate)
    if config.determinism != "off":
        _check_samples_are_pure(reader, config.data.processes)
    # Two processes may hang before the supervisor considers the worker hung.
    feeds: dict[str, Any] = {
        "processes": config.data.processes,
        "patience_seconds": config.supervise.data_seconds / 3,
    }

    def cut(grid: LaneGrid) -> tuple[Any, Any]:
        plan = dataset_plan(config.row_settings, len(own.dataset))
        feed = DatasetFeed(reader, plan, lanes=grid.lanes, micro_batch=grid.micro_batch, **feeds)
        if own.validation is None:
            return feed, None
        held_out = Reader(own.validation, config.seed, own.collate)
        return feed, DatasetEvaluationFeed(held_out, micro_batch=grid.micro_batch, **feeds)

    feed, evaluation = cut(grid)
    figures = Figures({name: metric_of(given) for name, given in own.metrics.items()})
    count = own.count_items or count_samples
    return RunTask(
        model=own.model,
        feed=feed,
        objective=Objective(partial(_summed, own, count, figures), count, figures=figures),
        evaluation=evaluation,
        fingerprints=task_fingerprints(own),
        code=code if code is not None else named_code(config.task),
        recut=cut,
        parameter_groups=own.parameter_groups,
    )


def _summed(own: Task, count: Callable[[Any], int], figures: Figures, model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a micro-batch, summed over its items, and add its figures."""
    found = own.loss(model, batch)
    items = count(batch)
    outputs = None
    if isinstance(found, tuple) and len(found) == 2:
        found, outputs = found
    elif own.metrics:
        raise _unfit(
            "loss",
            f"the loss returned {_kind(found)} alone, and the metrics need outputs",
            "return a pair: return loss, outputs",
        )
    parts = found if isinstance(found, Mapping) else {}
    for name, part in parts.items() if parts else [("", found)]:
        if not isinstance(part, torch.Tensor) or part.ndim or not part.dtype.is_floating_point:
            shape = f"a tensor {tuple(part.shape)}" if isinstance(part, torch.Tensor) else _kind(part)
            of = f" for '{name}'" if name else ""
            raise _unfit("loss", f"the loss returned {shape}{of}, not one number", "return the mean over the items")
    unknown = [name for name in own.loss_weights if name not in parts]
    if unknown:
        raise _unfit(
            "loss_weights",
            f"the loss has no part {', '.join(unknown)}",
            f"its parts are {', '.join(parts) or 'none: return a mapping of names to numbers'}",
        )
    if parts:
        found = torch.stack([part * own.loss_weights.get(name, 1.0) for name, part in parts.items()]).sum()
    check_differentiable(found, "the task")
    figures.add(parts, items, outputs, batch)
    return found * items  # type: ignore[no-any-return]


def try_loss(own: Task, seed: int, micro_batch: int) -> None:
    """Compute the loss of the first samples on the CPU, where nothing else shows what it returns before a run.

    Raises:
        ConfigError: it is no loss, or cannot be computed.
        DataError: a sample cannot be read.
    """
    reader = Reader(own.dataset, seed, own.collate)
    count = own.count_items or count_samples
    rows = range(min(micro_batch, len(own.dataset)))
    try:
        batch = reader.micro_batch(0, 0, rows)
        with torch.random.fork_rng(devices=[]):
            _summed(own, count, Figures({}), own.model, batch)
            if own.metrics:
                with torch.no_grad():
                    figures = Figures({name: metric_of(given) for name, given in own.metrics.items()})
                    _summed(own, count, figures, own.model.eval(), batch)
                    figures.of_evaluation(figures.take())
        if own.parameter_groups is not None:
            own_groups(own.model, own.parameter_groups)
    except HeadwayError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the loss cannot be computed: {type(error).__name__}: {error}",
            where="task: loss, metrics",
            fix="try it in Python: own = build(config); own.loss(own.model, batch)",
        ) from error


def task_fingerprints(own: Task) -> dict[str, str]:
    """Return the fingerprints of what checkpoints of a task belong to."""
    return {"data": rows_fingerprint(len(own.dataset))}


def task_facts(own: Task) -> dict[str, int]:
    """Return the facts about the model for the run's record."""
    return {"parameters": sum(p.numel() for p in own.model.parameters())}


def rows_fingerprint(rows: int) -> str:
    """Return the fingerprint of what the order of a dataset's rows follows from."""
    return fingerprint({"rows": rows})


def named_code(task: TaskConfig | None) -> dict[str, str]:
    """Return the identity of the modules of the task that a run has, as this machine has them or as they came.

    Raises:
        ConfigError: they are not there.
    """
    assert task is not None, "the run has a task of its own"
    module = task.function.partition(":")[0]
    return {"task": identity_of_sources(task.files or sources_of(module, "task.function"))}


def code_of_objects(own: Task) -> dict[str, str]:
    """Return the identities of the code of a task that a script has made, by what decides what is computed."""
    # What a loss reads of the model is in the checkpoint.
    parts = (own.model, *own.model.modules(), *own.model.parameters(), *own.model.buffers())
    known = {id(part): "of the model" for part in parts} | {id(own.dataset): "the dataset"}
    found = {
        "loss": object_identity([own.loss], known),
        "model": combined(object_identity([kind]) for kind in {type(part) for part in own.model.modules()}),
        "dataset": object_identity(_dataset_code(own.dataset)),
    }
    return found if own.collate is None else {**found, "collate": object_identity([own.collate], known)}


def _dataset_code(dataset: Any, seen: set[int] | None = None) -> list[Any]:
    """Return what decides the samples of a dataset: its class, functions that it was given, and datasets within it.

    Args:
        dataset: The dataset.
        seen: By `id`, the datasets around it; one within may refer to one of them.
    """
    seen = {id(dataset)} if seen is None else seen | {id(dataset)}
    found: list[Any] = [type(dataset)]
    for value in getattr(dataset, "__dict__", {}).values():
        for item in value if isinstance(value, list | tuple) and len(value) <= _FEW else [value]:
            if inspect.isroutine(item) or isinstance(item, partial):
                found.append(item)
            elif id(item) not in seen and hasattr(type(item), "__getitem__") and hasattr(item, "__dict__"):
                found.extend(_dataset_code(item, seen))
    return found


def _set_activation_checkpointing(model: nn.Module, mode: Checkpointing) -> None:
    """Apply `train.activation_checkpointing`, which only the native decoder implements.

    Raises:
        ConfigError: it is asked for, and the model is another one.
    """
    if isinstance(model, Decoder):
        model.set_activation_checkpointing(mode)
    elif mode != "none":
        raise ConfigError(
            f"a module of your own checkpoints its activations itself; Headway cannot do it for {type(model).__name__}",
            where="train.activation_checkpointing",
            fix="train.activation_checkpointing=none, and in the module torch.utils.checkpoint, or for a model of"
            " transformers gradient_checkpointing_enable()",
        )


def _check_samples_are_pure(reader: Reader, processes: int) -> None:
    """Check that a sample draws nothing from shared random generators, unless processes read it, which seed their own.

    A thread reads samples ahead, so that draws would come in any order.
    """

    def generators() -> str:
        return repr([torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=False)])

    if processes:
        return
    before = generators()
    reader.sample(0, 0, 0)
    if generators() != before:
        raise ConfigError(
            "the dataset draws random numbers for a sample, so a run could not be repeated",
            where=f"{type(reader.dataset).__name__}.__getitem__",
            fix="data.processes=1 or more, which seed the generators for every sample; or draw them from the rng of"
            " __getitem__(i, rng), in the loss or in the model; or determinism=off",
        )


def count_samples(batch: Any) -> int:
    """Count the samples of a nested batch: the length of the first dimension of its first tensor.

    Raises:
        ConfigError: there is no tensor with a dimension.
    """
    shape = next(_shapes(batch), None)
    if shape is None:
        raise ConfigError("the batch holds no tensor, so its samples cannot be counted", fix="return tensors (collate)")
    return int(shape[0])


def _shapes(batch: Any) -> Iterator[Sequence[int]]:
    if hasattr(batch, "shape"):
        if len(batch.shape):
            yield batch.shape
    elif isinstance(batch, (Mapping, list, tuple)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _shapes(value)
    elif hasattr(batch, "__dict__"):
        yield from _shapes(vars(batch))
