"""The state that checkpoints preserve: weights, moments, and a cursor of a few numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from headway.core.model_protocol import KeptElsewhere
from headway.core.types import StateBlocks, StateTensors
from headway.parallel.blocks import block_of
from headway.parallel.strategy import Engine
from headway.training.average import WeightAverage
from headway.training.health.decisions import History
from headway.training.optimizer import materialize, optimizer_tensors


@dataclass
class Cursor:
    """The position of a run. Everything else that a step needs follows from `step`."""

    step: int = 0
    """Finished steps, skipped ones included."""
    skipped_steps: int = 0
    """Steps whose update was left out because loss or gradient was not finite."""
    skipped_in_row: int = 0
    """Length of the current series of skipped steps, without those that only the loss scale is to blame for."""
    loss_scale: int | None = None
    """The factor of losses in fp16 (`training.setup.precision`); None in other precisions."""
    steps_at_scale: int = 0
    """Steps since the loss scale changed."""
    left_out_steps: int = 0
    """Steps that were not computed, because a rollback left their rows out."""
    steps_without_target: int = 0
    """Steps none of whose tokens is a target, so that there was nothing to learn."""


_RARE = ("left_out_steps", "steps_without_target")
_SCALING = ("loss_scale", "steps_at_scale")
_HISTORY = "health_"


@dataclass
class TrainState:
    """Everything that training changes."""

    model: nn.Module
    optimizer: Optimizer
    cursor: Cursor = field(default_factory=Cursor)
    engine: Engine | None = None
    """The library that keeps weights and moments in buffers of its own, if there is one."""
    history: History = field(default_factory=History)
    """Running statistics of loss and gradient norm."""
    decides: bool = False
    """Whether updates may depend on `history`, so that checkpoints must preserve it."""
    average: WeightAverage | None = None
    """The moving average of the weights (`train.ema`); None without it."""
    clip_limits: tuple[float | None, ...] = ()
    """Limits of the norms of groups of parameters (`training.optimizer.groups`); none if all have one norm."""
    skipped_ranges: tuple[tuple[int, int], ...] = ()
    """Ranges of steps whose rows a decision left out: first step, and the one after the last."""

    @property
    def trained(self) -> nn.Module:
        """The module whose forward pass is called in training."""
        return self.model if self.engine is None else self.engine.model

    def blocks(self) -> StateBlocks:
        """Return this worker's blocks of weights, buffers and moments, by name; a tied weight appears once.

        There are no moments before the first update.
        """
        if self.engine is not None:
            return _engine_blocks(self.model, self.engine)
        tensors = {**model_tensors(self.model), **optimizer_tensors(self.optimizer, parameter_names(self.model))}
        averages = {} if self.average is None else self.average.blocks()
        return {**{name: block_of(tensor) for name, tensor in tensors.items()}, **averages}

    def averaged(self) -> AbstractContextManager[None]:
        """Exchange the weights for their average in a block, if there is one."""
        return nullcontext() if self.average is None else self.average.in_place()

    def prepare_to_load(self, has_moments: bool = True) -> StateBlocks:
        """Return `blocks` of a state with moments, which are created if there are none, or of one without.

        Args:
            has_moments: Whether the state to load has moments (`Manifest.has_moments`). Without them the optimizer is
                as it was built, and creates its state in the first update.
        """
        if not has_moments:
            self.optimizer.state.clear()
            return self.blocks()
        with nullcontext() if self.engine is None else self.engine.exposed():
            materialize(self.optimizer)
        return self.blocks()

    def loaded(self) -> None:
        """Take over the blocks that `prepare_to_load` returned, after they were overwritten."""
        if self.engine is not None:
            self.engine.loaded()

    def cursor_record(self) -> dict[str, int]:
        """Return the cursor as checkpoints store it.

        A loss scale, steps left out or without a target, and a history appear only if there are any.
        """
        record = asdict(self.cursor)
        if self.cursor.loss_scale is None:
            record = {key: value for key, value in record.items() if key not in _SCALING}
        record = {key: value for key, value in record.items() if value or key not in _RARE}
        history = asdict(self.history) if self.decides else {}
        return {**record, **{f"{_HISTORY}{key}": value for key, value in history.items()}}

    def take_cursor(self, record: Mapping[str, int]) -> None:
        """Continue from where `cursor_record` was made."""
        history = {key: value for key, value in record.items() if key.startswith(_HISTORY)}
        self.cursor = Cursor(**{key: value for key, value in record.items() if key not in history})
        self.history = History(**{key.removeprefix(_HISTORY): value for key, value in history.items()})


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers at the end of the block, so that passes leave no trace."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the name of every parameter; tied parameters have the first of their names."""
    return {p: name for name, p in model.named_parameters()}


def model_tensors(model: nn.Module) -> StateTensors:
    """Return live parameters and persistent buffers as `model.<name>`, each tensor once.

    Raises:
        TypeError: a module keeps state that is not a tensor, which a checkpoint could not carry.
    """
    return {f"model.{name}": tensor.detach() for name, tensor in _named_state(model)}


def _named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers themselves, each once, but those that are kept elsewhere."""
    seen: set[int] = set()
    elsewhere = model.kept_elsewhere() if isinstance(model, KeptElsewhere) else ()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in elsewhere:
            continue
        if name.endswith("_extra_state"):
            raise TypeError(f"the module keeps '{name}' besides its tensors; only tensors can be resumed exactly")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _engine_blocks(model: nn.Module, engine: Engine) -> StateBlocks:
    """Return the blocks of the state, by the usual names, where an engine keeps it."""
    blocks: StateBlocks = {}
    for name, tensor in _named_state(model):
        if not isinstance(tensor, nn.Parameter):
            blocks[f"model.{name}"] = block_of(tensor)
            continue
        part = engine.part_of(tensor)
        if part is not None:
            blocks[f"model.{name}"] = part
        blocks |= {f"optimizer.{key}.{name}": moment for key, moment in engine.moments(tensor).items()}
    return blocks
