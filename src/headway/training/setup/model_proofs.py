"""What a model of others does, of transformers or of the user's own, found out by running it before its first step.

There are too many models, and they change too often, to go by their names. Each proof is about the very model and
config of the run. Results that training depends on are kept in its checkpoints, so a resumed run trains as it began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from headway.config import ModelConfig
from headway.config.derived.experts import balance_in_words
from headway.core.console import notice, warning, write_log
from headway.core.errors import ConfigError, in_one_line
from headway.core.types import IGNORE_TARGET, MicroBatch
from headway.models.hub.small import small_instance
from headway.models.hub.transformers_model import TransformersModel
from headway.training.assembled import Assembled
from headway.training.health.replay import own_gradients
from headway.training.setup.precision import autocast
from headway.training.setup.trial import compute_gradients
from headway.training.state import kept_buffers
from headway.training.task import to_device

#: Key of a manifest's context.
PROOFS = "model_proofs"

#: Largest relative difference between two ways to compute the same: by fp32 products, and by others.
_TOLERANCE = 1e-5
_ROUNDED_TOLERANCE = 2e-2
#: Largest relative difference of logits in fp32 between two packed documents and each alone.
_LEAK = 1e-3
#: Positions of the row that is packed from two documents.
_PACKED = 64


def prove_model(assembled: Assembled, kept: Mapping[str, Any] | None) -> dict[str, Any]:
    """Find out what a model of transformers does, set it up accordingly, and return the results for checkpoints.

    All workers must call it. Weights are in place, and no weight, moment or random state changes.

    Args:
        kept: The context of the checkpoint that the run continues from.

    Raises:
        ConfigError: the model cannot be trained as the config says.
    """
    config = assembled.config
    task = assembled.task
    device = assembled.world.device
    model = task.model
    if kept is None and config.task is not None and config.determinism != "off":
        _prove_own(assembled)
    if not isinstance(model, TransformersModel):
        if kept is None and config.model.from_pretrained is not None and config.model.experts is not None:
            notice(balance_in_words(config.model))
        return {}
    known = None if kept is None else kept.get(PROOFS)
    if isinstance(known, dict):
        model.loss_from_hidden = bool(known.get("loss_from_hidden"))
        before = known.get("kernels")
        now = model.kernels()
        if isinstance(before, dict) and before != now and config.determinism != "off":
            warning(
                f"transformers now computes with {_in_words(now)} instead of {_in_words(before)}: the run continues,"
                " but not bit for bit"
            )
        return {PROOFS: known}
    batches = task.feed.batch(0, 0)
    # A loss mask can leave out all of a micro-batch, and then its gradients would prove nothing.
    batch = to_device(next((b for b in batches if task.objective.count_items(b)), batches[0]), device)
    cuda = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), kept_buffers(model):
            found = _passes(assembled, model, batch)
            if config.determinism != "off":
                _check_repeats(assembled, batch)
    except NotImplementedError as error:
        raise ConfigError(
            f"{type(model.causal).__name__} cannot be trained here: {in_one_line(error, 200)}",
            where="model.from_pretrained",
            fix="another train.device, or another model",
        ) from error
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise ConfigError(
            f"{type(model.causal).__name__} has an operation without a deterministic kernel:"
            f" {str(error).splitlines()[0]}",
            where="determinism",
            fix="determinism=off",
        ) from error
    return {PROOFS: {**found, "kernels": model.kernels()}}


def _prove_own(assembled: Assembled) -> None:
    """Check that a task of the user's own has a loss to differentiate, and gives equal bits when computed twice.

    Raises:
        ConfigError: it does not.
    """
    device = assembled.world.device
    batch = to_device(assembled.task.feed.batch(0, 0)[0], device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        _check_repeats(assembled, batch)


def _passes(assembled: Assembled, model: TransformersModel, batch: MicroBatch) -> dict[str, Any]:
    """Compare forward passes that must agree, in evaluation mode: dropout would differ."""
    config = assembled.config
    world = assembled.world
    ids = batch["ids"][:1]
    targets = batch["targets"][:1].clone()
    if not (targets != IGNORE_TARGET).any():
        targets[:, :-1] = ids[:, 1:]
    targets[:, -1] = IGNORE_TARGET  # the loss of transformers has no target for the last position
    trained = assembled.state.trained
    rounded = config.train.precision not in ("fp32", "tf32")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast(config.train.precision, world.device):

            def probe(function: Any, *arguments: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = trained(ids, probe=partial(function, *arguments))
                return result

            def projected() -> torch.Tensor:
                return torch.tensor(float(model.logits_are_projected(ids)), device=ids.device)

            is_projected = all(worker[0] for worker in world.gather([float(bool(probe(projected)))]))
            model.loss_from_hidden = is_projected
            ours = float(trained(ids, targets))
            theirs = float(probe(model.reference_loss, ids, targets))
            leak = _leak(model, probe, ids) if config.data.document_mask else None
            bits_differ = leak is not None and not model.has_experts and _bits_differ(model, probe, ids)
        reaches = leak is not None and _gradient_reaches(assembled, model, ids)
    finally:
        model.train(was_training)
    items = max(1, int((targets != IGNORE_TARGET).sum()))
    name = type(model.causal).__name__
    if not abs(ours - theirs) <= (_ROUNDED_TOLERANCE if rounded else _TOLERANCE) * max(items, abs(theirs)):
        raise ConfigError(
            f"the loss of {name} is {ours / items:.6f} a token, and {theirs / items:.6f} by transformers on the same"
            " row, so the model does not compute what was expected",
            where="model.from_pretrained",
            fix="another version of transformers; or another train.precision",
        )
    if leak is not None:
        signs = [not leak <= (_ROUNDED_TOLERANCE if rounded else _LEAK), bits_differ, reaches]
        _check_apart(name, leak, [any(found) for found in zip(*world.gather([float(s) for s in signs]), strict=True)])
    how = "from hidden states, a chunk of rows at a time" if is_projected else "from the logits of a whole micro-batch"
    notice(f"{name} by transformers ({_in_words(model.kernels())}): the loss is computed {how}")
    if weight := config.model.router_aux_weight:
        notice(f"the router's auxiliary loss is added with weight {weight:g}, computed for each row")
    elif getattr(model.causal.config, "router_aux_loss_coef", 0):
        notice("the router's auxiliary loss is left out: transformers computes it for each micro-batch by itself")
    return {"loss_from_hidden": is_projected, "first_loss": ours / items, "leak": leak}


def _two_documents(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a row that is packed from two documents of the same length, its positions, and that length."""
    half = min(_PACKED, ids.shape[1]) // 2
    positions = torch.arange(half, device=ids.device).repeat(2).unsqueeze(0)
    return ids[:, : 2 * half], positions, half


def _leak(model: TransformersModel, probe: Any, ids: torch.Tensor) -> float:
    """Return the largest difference of a packed document's logits from its own alone, relative to the largest logit."""
    packed, positions, half = _two_documents(ids)
    together = probe(model.packed_logits, packed, positions)
    alone = [probe(model.packed_logits, part, positions[:, :half]) for part in packed.split(half, dim=1)]
    difference = (together - torch.cat(alone, dim=1)).abs().max()
    return float(difference / together.abs().max().clamp_min(1e-30))


def _bits_differ(model: TransformersModel, probe: Any, ids: torch.Tensor) -> bool:
    """Return whether other ids in the first of two packed documents change any bit of the second one's logits.

    Experts multiply the tokens of both together, and their number may change how the products are rounded.
    """
    packed, positions, half = _two_documents(ids)
    other = packed.clone()
    other[:, :half] = (other[:, :half] + 1) % model.causal.get_input_embeddings().num_embeddings
    first, second = (probe(model.packed_logits, given, positions)[:, half:] for given in (packed, other))
    return not torch.equal(first, second)


def _gradient_reaches(assembled: Assembled, model: TransformersModel, ids: torch.Tensor) -> bool:
    """Return whether the second of two packed documents has a gradient with respect to the first one's embeddings."""
    state = assembled.state
    strategy = assembled.strategy
    engine = state.engine
    strategy.begin()

    def probe(function: Any, *arguments: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = state.trained(arguments[0], probe=partial(function, *arguments))
        return result

    with strategy.micro_batch(True, last=engine is not None), model.embeddings_of_pass() as leaves, torch.enable_grad():
        with autocast(assembled.config.train.precision, assembled.world.device):
            loss = _of_second(model, probe, ids)
        if engine is None:
            (gradient,) = torch.autograd.grad(loss, leaves[:1])
        else:
            engine.backward(loss)
            gradient = cast(torch.Tensor, leaves[0].grad)
    if engine is not None:
        strategy.end_lane()
        strategy.reduce()
        engine.skip()
    strategy.begin()
    return _has_first(gradient)


def _of_second(model: TransformersModel, probe: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on the logits of the second of two packed documents alone."""
    packed, positions, half = _two_documents(ids)
    # Squares, since a sum of logits could have no gradient by itself. Without a loss scale: zero times infinity would
    # be no zero.
    of_second: torch.Tensor = probe(model.packed_logits, packed, positions)[:, half:].float().square().sum()
    return of_second


def _has_first(gradient: torch.Tensor) -> bool:
    """Return whether the gradient of two packed documents, (1, T, D), has anything of the first one."""
    return bool(gradient[:, : gradient.shape[1] // 2].count_nonzero())


def prove_class(config: ModelConfig, device: torch.device) -> None:
    """Find out by a small model of the same class, with random weights, whether it tells packed documents apart.

    Nothing of the weights is read, so this can be asked before data are prepared. What no small model shows, or none
    can be made for, `prove_model` finds with the weights in place.

    Args:
        config: Complete, of a model of transformers.
        device: Where the run computes, whose kernels may tell documents apart where others do not.

    Raises:
        ConfigError: it does not; or transformers cannot make the model.
    """
    model = small_instance(config)
    if model is None:
        return

    def probe(function: Any, *arguments: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(*arguments)
        return result

    try:
        model.to(device)
        ids = torch.arange(_PACKED, device=device).unsqueeze(0)
        with torch.no_grad():
            leak = _leak(model, probe, ids)
            bits_differ = not model.has_experts and _bits_differ(model, probe, ids)
        with model.embeddings_of_pass() as leaves, torch.enable_grad():
            (gradient,) = torch.autograd.grad(_of_second(model, probe, ids), leaves[:1])
    except Exception as error:  # of kernels that need other sizes, or a GPU without room
        write_log(f"a small {type(model.causal).__name__} could not be tried: {error}")
        return
    shown = f"{type(model.causal).__name__}, tried with random weights,"
    _check_apart(shown, leak, [not leak <= _LEAK, bits_differ, _has_first(gradient)])


def _check_apart(name: str, leak: float, signs: Sequence[bool]) -> None:
    """Check that none of three proofs, on any worker, has found that one document reaches the next.

    Raises:
        ConfigError: one has.
    """
    words = (
        f"the one before changes logits by {leak:.1%} of the largest",
        "other ids in the one before change bits of the logits",
        "gradients of its logits reach the one before",
    )
    found = [text for text, sign in zip(words, signs, strict=True) if sign]
    if found:
        raise ConfigError(
            f"{name} does not tell packed documents apart: {'; '.join(found)}",
            where="data.document_mask",
            fix="data.document_mask=false; with data.packing=pad a row has one document",
        )


def _check_repeats(assembled: Assembled, batch: MicroBatch) -> None:
    """Check that two backward passes give equal bits.

    Raises:
        ConfigError: they do not, so `determinism` could not be kept.
    """
    checksums = []
    for _ in range(2):
        with kept_buffers(assembled.task.model):  # a pass may change them
            checksums.append(_checksums_of_pass(assembled, batch))
    first, second = checksums
    differing = [name for name in first if first[name] != second.get(name)]
    if any(worker[0] for worker in assembled.world.gather([float(len(differing))])):
        where = differing[0] if differing else "another worker's part"
        trained = assembled.task.model
        name = type(trained.causal if isinstance(trained, TransformersModel) else trained).__name__
        raise ConfigError(
            f"two backward passes of {name} on the same rows differ (in the gradient of {where}), so no run could"
            " repeat its bits",
            where="determinism",
            fix="determinism=off",
        )


def _checksums_of_pass(assembled: Assembled, batch: MicroBatch) -> dict[str, int]:
    engine = assembled.state.engine
    assembled.world.seed(0)
    try:
        compute_gradients(assembled, batch)
        if engine is None:
            return own_gradients(assembled.state.model)
        norm = sum(engine.norm_parts())
        engine.skip()
        return {"all": hash(norm)}
    finally:
        assembled.strategy.begin()


def _in_words(kernels: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {name}" for kind, name in kernels.items()) or "one implementation"
