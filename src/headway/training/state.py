"""What must survive: weights, moments, and a cursor of a few numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from headway.core.types import StateBlocks, StateTensors
from headway.parallel.blocks import block_of
from headway.parallel.strategy import Engine
from headway.training.health import History
from headway.training.optimizer import materialize, optimizer_tensors


@dataclass
class Cursor:
    """Where a run is. Everything else that a step needs follows from `step`."""

    step: int = 0
    """Finished steps, skipped ones included."""
    skipped_steps: int = 0
    """Steps whose update was left out because loss or gradient was not finite."""
    skipped_in_row: int = 0
    """How many of them were the very last ones; not counting those that only the loss scale is to blame for."""
    loss_scale: int | None = None
    """What losses are multiplied by in fp16 (`training.loss_scale`); None in other precisions."""
    steps_at_scale: int = 0
    """Steps since it changed."""
    left_out_steps: int = 0
    """Steps that were not computed, since a rollback has left their rows out."""


_SCALING = ("loss_scale", "steps_at_scale")
_HISTORY = "health_"


@dataclass
class TrainState:
    """Everything that training changes."""

    model: nn.Module
    optimizer: Optimizer
    cursor: Cursor = field(default_factory=Cursor)
    engine: Engine | None = None
    """Who keeps weights and moments, when a library has them in buffers of its own."""
    history: History = field(default_factory=History)
    """What is usual for loss and gradient norm."""
    decides: bool = False
    """Updates may follow from `history`, so it is part of what must survive."""
    skipped_ranges: tuple[tuple[int, int], ...] = ()
    """Steps whose rows are left out by decision: first step, and the one after the last."""

    @property
    def trained(self) -> nn.Module:
        """What a forward pass that trains calls."""
        return self.model if self.engine is None else self.engine.model

    def blocks(self) -> StateBlocks:
        """What this worker has of weights, buffers and moments, by name; a weight that is used twice appears once."""
        if self.engine is not None:
            return _engine_blocks(self.model, self.engine)
        tensors = {**model_tensors(self.model), **optimizer_tensors(self.optimizer, parameter_names(self.model))}
        return {name: block_of(tensor) for name, tensor in tensors.items()}

    def prepare_to_load(self) -> StateBlocks:
        """As `blocks`, with the optimizer's state created where it is not there yet."""
        with nullcontext() if self.engine is None else self.engine.exposed():
            materialize(self.optimizer)
        return self.blocks()

    def loaded(self) -> None:
        """To be called after what `prepare_to_load` gave was overwritten."""
        if self.engine is not None:
            self.engine.loaded()

    def cursor_record(self) -> dict[str, int]:
        """The cursor as it is written to a checkpoint: a loss scale, steps left out and a history only where there is
        one."""
        record = asdict(self.cursor)
        if self.cursor.loss_scale is None:
            record = {key: value for key, value in record.items() if key not in _SCALING}
        if not self.cursor.left_out_steps:
            del record["left_out_steps"]
        history = asdict(self.history) if self.decides else {}
        return {**record, **{f"{_HISTORY}{key}": value for key, value in history.items()}}

    def take_cursor(self, record: Mapping[str, int]) -> None:
        """Go on from where `cursor_record` was made."""
        history = {key: value for key, value in record.items() if key.startswith(_HISTORY)}
        self.cursor = Cursor(**{key: value for key, value in record.items() if key not in history})
        self.history = History(**{key.removeprefix(_HISTORY): value for key, value in history.items()})


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Around passes that leave no trace: buffers are afterwards what they were before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """Name of every parameter; tied ones have the first of their names."""
    return {p: name for name, p in model.named_parameters()}


def model_tensors(model: nn.Module) -> StateTensors:
    """Live parameters and persistent buffers as `model.<name>`, each tensor once.

    Raises:
        TypeError: a module keeps state that is no tensor, which a checkpoint could not carry.
    """
    return {f"model.{name}": tensor.detach() for name, tensor in _named_state(model)}


def _named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers themselves, each once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith("_extra_state"):
            raise TypeError(f"the module keeps '{name}' besides its tensors; only tensors can be resumed exactly")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _engine_blocks(model: nn.Module, engine: Engine) -> StateBlocks:
    """The same state under the same names, where an engine keeps it."""
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
