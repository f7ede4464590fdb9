"""A check that a model keeps what it declares (`headway.core.model_protocol`), for a test of any model.

    check_model(model, loss, batch)

Each declaration is tested on copies of the model in one process, as far as one process can show it.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway.core import model_protocol as declared
from headway.core.errors import ConfigError
from headway.core.types import MicroBatch

#: (model, micro-batch, output of the previous stage or None, layers) -> input of the next stage, or the loss.
StageForward = Callable[[nn.Module, MicroBatch, torch.Tensor | None, range], torch.Tensor]


@dataclass(frozen=True)
class _Trial:
    """Passes of a model on one micro-batch, with the same random numbers each time, and how it is to be cut."""

    loss: Callable[[nn.Module, MicroBatch], torch.Tensor]
    batch: MicroBatch
    stages: Sequence[range]
    stage_forward: StageForward | None
    workers: int

    def forward(self, model: nn.Module) -> torch.Tensor:
        """Return the loss."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.loss(model, self.batch)

    def gradients(self, model: nn.Module, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Return the gradient of the scaled loss, by parameter."""
        model.zero_grad(set_to_none=True)
        (self.forward(model) * scale).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_model(
    model: nn.Module,
    loss: Callable[[nn.Module, MicroBatch], torch.Tensor],
    batch: MicroBatch,
    *,
    stages: Sequence[range] = (),
    stage_forward: StageForward | None = None,
    workers: int = 2,
) -> None:
    """Check that a model can be trained, and that it keeps what it declares. The model itself is not changed.

    Args:
        model: On the CPU, in fp32, with its first weights.
        loss: (model, micro-batch) -> scalar.
        batch: A micro-batch; for a model that divides positions, of rows of an even length.
        stages: The layers of every pipeline stage, for a model that can be cut into stages.
        stage_forward: The loss by stages.
        workers: Number of workers that are to share matrices.

    Raises:
        ConfigError: it breaks a promise; the message lists all that are broken.
    """
    trial = _Trial(loss, batch, stages, stage_forward, workers)
    broken = list(_check_module(model, trial))
    if not broken:  # otherwise the other checks have nothing to compare with
        for protocol, check in _CHECKS.items():
            if not isinstance(model, protocol):
                continue
            wrong = list(_check_signatures(model, protocol)) or check(copy.deepcopy(model).train(), trial)
            broken += [f"{protocol.__name__}: {problem}" for problem in wrong]
    if broken:
        raise ConfigError(
            f"{type(model).__name__} does not keep what a model declares: " + "; ".join(broken),
            where=f"{type(model).__module__}.{type(model).__qualname__}",
            fix="mend these methods, or remove them: a model need not declare anything (headway.core.model_protocol)",
        )


def _check_module(model: nn.Module, trial: _Trial) -> Iterator[str]:
    """Check what any model must be."""
    for name in model.state_dict():
        if name.endswith("_extra_state"):
            yield f"its state '{name}' is no tensor, and would not be saved"
    if not any(p.requires_grad for p in model.parameters()):
        yield "no parameter is trainable"
        return
    first, second = (trial.forward(copy.deepcopy(model).train()) for _ in range(2))
    if first.ndim or not math.isfinite(first.item()) or not first.requires_grad:
        yield f"its loss is not a finite number with a gradient, but {first}"
    elif not torch.equal(first, second):
        yield "its loss differs between two passes with the same seed: it draws from other generators than PyTorch's"


def _check_signatures(model: nn.Module, protocol: type) -> Iterator[str]:
    """Check that the methods of a protocol can be called as it says."""
    for name, promised in vars(protocol).items():
        if name.startswith("_") or not inspect.isfunction(promised):
            continue
        arguments = list(inspect.signature(promised).parameters)[1:]
        try:
            inspect.signature(getattr(model, name)).bind(*arguments)
        except TypeError as error:
            yield f"{name}({', '.join(arguments)}) cannot be called: {error}"


def _check_units(model: Any, trial: _Trial) -> Iterator[str]:
    units = list(model.wrap_units())
    inside = set(model.modules())
    seen = set[nn.Parameter]()
    for unit in units:
        if unit not in inside or unit is model:
            yield f"wrap_units gives {type(unit).__name__}, which is not a part of the model"
        parameters = set(unit.parameters())
        if seen & parameters:
            yield f"units of wrap_units share parameters, one of them {type(unit).__name__}"
        seen |= parameters


def _check_product_parameters(model: Any, trial: _Trial) -> Iterator[str]:
    """Round the parameters as autocast does: where it casts every use anyway, no bit of the loss changes."""
    products = list(model.product_parameters())
    all_parameters = set(model.parameters())
    if not all(p in all_parameters for p in products):
        yield "product_parameters gives what is no parameter of the model"
        return
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        generator = torch.Generator().manual_seed(0)
        for p in products:  # first values such as 1 would not change by rounding
            p.mul_(1 + 0.01 * torch.rand(p.shape, generator=generator))
        before = trial.forward(model)
        for p in products:
            p.copy_(p.bfloat16())
        if not torch.equal(before, trial.forward(model)):
            yield "product_parameters gives parameters that autocast does not cast at every use"


def _check_buffers(model: Any, trial: _Trial) -> Iterator[str]:
    state = set(model.state_dict())
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in state}
    for name, buffer in model.named_buffers():
        if name in before:
            buffer.zero_()
    model.make_buffers()
    after = dict(model.named_buffers())
    for name, buffer in before.items():
        if not torch.equal(buffer, after[name]):
            yield f"make_buffers does not compute '{name}'"


def _check_tensor_plan(model: Any, trial: _Trial) -> Iterator[str]:
    from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput

    try:
        plan = model.tensor_plan(trial.workers)
    except ConfigError:  # so many workers cannot have equal parts
        return
    modules = [name for name, _ in model.named_modules()]
    cut = set[str]()
    for pattern, style in plan.items():
        matching = [name for name in modules if _matches(name, pattern)]
        if not matching:
            yield f"tensor_plan names '{pattern}', which is no module"
        if not isinstance(style, (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)):
            cut.update(matching)  # the others only move activations
    units = model.expert_units() if isinstance(model, declared.HasExperts) else None
    experts = {p for unit in units or () for p in unit.parameters()}  # which are shared otherwise
    for name, p in model.named_parameters():
        owners = {"", *(name[:end] for end, letter in enumerate(name) if letter == ".")}
        if p not in experts and not owners & cut:
            yield f"tensor_plan leaves out '{name}'"


def _matches(name: str, pattern: str) -> bool:
    atoms = name.split(".")
    patterns = pattern.split(".")
    return len(atoms) == len(patterns) and all(map(fnmatchcase, atoms, patterns))


def _check_positions(model: Any, trial: _Trial) -> Iterator[str]:
    """Share rows with no other worker: then the own positions are all of them."""
    if dist.is_initialized():  # a group of one worker would take part of all workers
        return
    whole = trial.forward(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        model.share_positions(dist.group.WORLD)
        alone = trial.forward(model)
    finally:
        dist.destroy_process_group()
    if not torch.allclose(whole, alone, rtol=1e-4):
        yield f"after share_positions with one worker the loss is {alone.item():.6g} instead of {whole.item():.6g}"


def _check_draws(model: Any, trial: _Trial) -> Iterator[str]:
    if not isinstance(model.draws_by_position, bool):
        yield f"draws_by_position is {model.draws_by_position!r}, neither True nor False"


def _check_stages(model: Any, trial: _Trial) -> Iterator[str]:
    """Give every stage to a worker of its own, and compare what they compute together with the whole model."""
    if list(model.shared_between_stages()):
        yield "shared_between_stages gives parameters of a model that is whole"
    if trial.stage_forward is None:
        return
    stages = trial.stages
    forward = trial.stage_forward
    state = model.state_dict()
    held = dict[str, list[int]]()
    x = None
    parts = [copy.deepcopy(model) for _ in stages]
    for number, (part, stage) in enumerate(zip(parts, stages, strict=True)):
        part.keep_stages([stage])
        for name, tensor in part.state_dict().items():
            held.setdefault(name, []).append(number)
            if name not in state or not torch.equal(tensor, state[name]):
                yield f"keep_stages changes '{name}' in stage {number}"
    missing = sorted(state.keys() - held.keys())
    if missing:
        yield f"no stage has '{missing[0]}'"
        return
    ends = {0, len(stages) - 1}
    for number, part in enumerate(parts):
        promised = {id(p) for p in part.shared_between_stages()}
        several = {id(p) for name, p in part.named_parameters() if len(held[name]) > 1}
        if promised != several or (several and number not in ends):
            yield f"shared_between_stages of stage {number} is not what it holds together with another one"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for number, (part, stage) in enumerate(zip(parts, stages, strict=True)):
            x = forward(part, trial.batch, x, stage)
            like = part.stage_output(trial.batch["ids"])
            if number < len(stages) - 1 and (x.shape, x.dtype) != (like.shape, like.dtype):
                yield f"stage_output promises {like.dtype} {tuple(like.shape)}, not {x.dtype} {tuple(x.shape)}"
    if x is None or not torch.allclose(x, trial.forward(model), rtol=1e-5):
        yield "the stages together do not compute the loss of the whole model"


def _check_experts(model: Any, trial: _Trial) -> Iterator[str]:
    inside = set(model.modules())
    before = trial.forward(model)
    for unit in model.expert_units() or ():
        if unit not in inside:
            yield f"expert_units gives {type(unit).__name__}, which is not a part of the model"
        if len({p.shape[:1] for p in unit.parameters()}) != 1:
            yield f"the parameters of {type(unit).__name__} are not all stacked by the same experts"
    model.share_experts(None, None)
    if not torch.equal(before, trial.forward(model)):
        yield "share_experts with no other worker changes the loss"


def _check_scaled_losses(model: Any, trial: _Trial) -> Iterator[str]:
    """Compare gradients at two scales; a power of two changes no bit of a number but its exponent."""
    plain = {name: gradient.clone() for name, gradient in trial.gradients(model).items()}
    model.scale_losses(2.0)
    for name, gradient in trial.gradients(model, 2.0).items():
        if not torch.allclose(gradient, 2 * plain[name], rtol=1e-4, atol=1e-8):
            yield f"with scale_losses(2) and twice the loss, the gradient of '{name}' is not twice as large"
            return


def _check_counts(model: Any, trial: _Trial) -> Iterator[str]:
    trial.gradients(model)
    once = model.take_counts()
    again = model.take_counts()
    if once is None:
        return
    if once.dtype != torch.int64 or once.device.type != "cpu":
        yield f"take_counts gives {once.dtype} on {once.device}, not int64 on the CPU"
        return
    if again is not None and bool(again.any()):
        yield "take_counts gives the same counts again"
    for _ in range(2):
        trial.gradients(model)
    if not torch.equal(model.take_counts(), 2 * once):
        yield "take_counts does not count twice as much in two passes"
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.after_step(once, False)
    if any(not torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items()):
        yield "after_step changes the state on a step that is skipped"
    metrics = model.after_step(once, True)
    if not all(isinstance(key, str) and isinstance(value, float) for key, value in metrics.items()):
        yield f"after_step gives {metrics!r}, not numbers by name"


def _check_projection(model: Any, trial: _Trial) -> Iterator[str]:
    output = model.output_projection()
    if output is None or output.ndim != 2 or not any(output is p for p in model.parameters()):
        yield "output_projection gives no matrix of the model's parameters"


def _check_kept_elsewhere(model: Any, trial: _Trial) -> Iterator[str]:
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    names = model.kept_elsewhere()
    if wrong := sorted(names - model.state_dict().keys()) + sorted(names & trained):
        yield f"kept_elsewhere names {wrong[0]}, which is trained or no part of the state"


def _check_rates(model: Any, trial: _Trial) -> Iterator[str]:
    trained = {p for p in model.parameters() if p.requires_grad}
    scales = model.rate_scales()
    if not scales.keys() <= trained:
        yield "rate_scales names a parameter that is not trained"
    if any(not 0 < scale < math.inf for scale in scales.values()):
        yield "rate_scales has a multiple that is not a positive number"


def _check_fusions(model: Any, trial: _Trial) -> Iterator[str]:
    names = {p: name for name, p in model.named_parameters()}
    for p, fusion in model.fusions().items():
        if p not in names or p.ndim not in (1, 2):
            yield "fusions names what is no matrix or vector of the model's parameters"
        elif fusion.groups * sum(fusion.sizes) != p.shape[1 if fusion.by_columns else 0]:
            yield f"the projections that fusions gives for '{names[p]}' do not add up to its size"


#: What is checked of each declaration, on a copy of the model.
_CHECKS: dict[type, Callable[[Any, _Trial], Iterator[str]]] = {
    declared.Shardable: _check_units,
    declared.HasProductParameters: _check_product_parameters,
    declared.MakesBuffers: _check_buffers,
    declared.TensorParallelizable: _check_tensor_plan,
    declared.ContextParallelizable: _check_positions,
    declared.DrawsByPosition: _check_draws,
    declared.Pipelineable: _check_stages,
    declared.HasExperts: _check_experts,
    declared.ScalesLosses: _check_scaled_losses,
    declared.TakesCounts: _check_counts,
    declared.ScalesRates: _check_rates,
    declared.FusesProjections: _check_fusions,
    declared.KeptElsewhere: _check_kept_elsewhere,
    declared.HasOutputProjection: _check_projection,
}
