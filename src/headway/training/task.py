"""The task of a run: a model, a feed, and a loss that adds up over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from headway.config import effective_strategy, find_strategy
from headway.config.derived.mesh import row_parts
from headway.core.code_identity import code_identity, combined
from headway.core.console import notice
from headway.core.functions import identify_function, load_attribute
from headway.core.model_protocol import Pipelineable
from headway.core.types import IGNORE_TARGET, Feed, MicroBatch
from headway.data.feeding.evaluation_feed import evaluation_feed
from headway.data.feeding.packing import total_figures
from headway.data.feeding.rows import packing_notice
from headway.data.feeding.token_feed import TokenFeed
from headway.data.pinned import open_run_store
from headway.models.build import build_model, build_without_memory, complete
from headway.models.facts import count_parameters, flops_per_token, part_costs
from headway.models.hub.folder import pretrained_fingerprints
from headway.models.hub.frozen import freeze_as_configured
from headway.models.hub.streaming import build_for_shards
from headway.models.hub.transformers_build import build_transformers_model
from headway.models.layers.attention import PackedDocuments
from headway.parallel.stages import plan_stages, stages_of_worker
from headway.training.custom_loss import logits_loss
from headway.training.figures import Figures

if TYPE_CHECKING:
    from headway.config import Config, LaneGrid, MeshShape, ModelConfig, ParallelConfig, TrainConfig
    from headway.data.store import TokenStore


class BatchList(Protocol):
    """Micro-batches by number, for evaluation."""

    def __len__(self) -> int: ...

    def batch(self, index: int) -> MicroBatch:
        """Micro-batch `index`."""
        ...


@runtime_checkable
class HasReplay(Protocol):
    """A list of micro-batches whose last ones are of replayed sources, which have a loss of their own."""

    @property
    def replay_from(self) -> int:
        """Number of the first of them."""
        ...


#: (model, micro-batch on the model's device) -> scalar tensor, the loss summed over the micro-batch's items.
SummedLoss = Callable[[nn.Module, MicroBatch], torch.Tensor]


@dataclass(frozen=True)
class StagedLoss:
    """A summed loss, computed one pipeline stage after the other."""

    forward: Callable[[nn.Module, MicroBatch, torch.Tensor | None, range], torch.Tensor]
    """(model, micro-batch, output of the previous stage, layers) -> input of the next stage, or the loss."""
    output: Callable[[nn.Module, MicroBatch, int], torch.Tensor]
    """(model, micro-batch, workers that share the positions of a row between layers) -> a tensor on the meta device,
    with the shape of what any stage but the last gives on one of these workers."""


@dataclass(frozen=True)
class Objective:
    """What training minimises: the sum of losses over the sum of items of the whole global batch.

    So micro-batches with different numbers of items have the right weight.
    """

    summed_loss: SummedLoss
    count_items: Callable[[MicroBatch], int]
    """Items (tokens, samples) in a micro-batch, counted before it leaves the CPU."""
    staged: StagedLoss | None = None
    """The loss by stages, for a model that can be cut into pipeline stages."""
    figures: Figures | None = None
    """What the passes count besides the loss."""


@dataclass
class Task:
    """The part of a run that differs between a language model and any other module."""

    model: nn.Module
    feed: Feed
    objective: Objective
    evaluation: BatchList | None = None
    evaluated: Objective | None = None
    """What an evaluation computes, if that is not the objective."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the data manifest and the tokenizer that a checkpoint of this task belongs to."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Identities of further code of the user, by its key in the config or its name in Python (`own_code`)."""
    flops_per_item: float | None = None
    """FLOPs to train on one item of the first step."""
    flops_at: Callable[[int], float] | None = None
    """Step, counted from 0 -> FLOPs per item, where the length of rows differs between steps."""
    recut: Callable[[LaneGrid], tuple[Feed, BatchList | None]] | None = None
    """Makes feed and evaluation for another number of rows per micro-batch; None if the number is fixed."""
    vocab_size: int | None = None
    parameters: int | None = None
    """Parameters of the whole model, where this worker has a part of it."""
    stages: Sequence[range] | None = None
    """The layers of every pipeline stage; the model has only those of this worker."""
    first_value: Callable[[str, Sequence[int]], torch.Tensor] | None = None
    """(name, size) -> first value of a tensor of the model's state, where the model is on the meta device until a
    strategy has cut it (`parallel.materialize`). Such a model `MakesBuffers` if it has some that are no state."""

    parameter_groups: Callable[[nn.Module], Sequence[Mapping[str, Any]]] | None = None
    """Groups of parameters with what they have of their own (`own_task.Task`)."""
    settle_data: Callable[[int, float, Callable[[], None]], bool] | None = None
    """(step, seconds, beat) -> whether all data used so far have been verified; waits for that at most so many seconds.
    Raises an error if the data are damaged. None if the task does not verify its data."""

    @property
    def is_language_model(self) -> bool:
        """Whether items are tokens, so that exp(loss) is a perplexity; otherwise they are samples."""
        return self.vocab_size is not None

    def item_flops(self, step: int) -> float | None:
        """Return the FLOPs to train on one item of a step, counted from 0; None if unknown."""
        return self.flops_per_item if self.flops_at is None else self.flops_at(step)

    def facts(self) -> dict[str, int]:
        """Return the facts about the model for the run's record."""
        facts = {"parameters": self.parameters or sum(p.numel() for p in self.model.parameters())}
        return facts if self.vocab_size is None else {**facts, "vocab_size": self.vocab_size}


def language_model_loss(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Return the cross-entropy summed over the micro-batch's targets.

    Where the micro-batch tells documents apart (`data.document_mask`), each document is computed by itself.
    """
    loss: torch.Tensor = model(batch["ids"], batch["targets"], **_documents(batch))
    return loss


def language_model_stage(
    model: nn.Module, batch: MicroBatch, x_BTD: torch.Tensor | None, layers: range
) -> torch.Tensor:
    """Compute one pipeline stage of `language_model_loss`."""
    y: torch.Tensor = model(batch["ids"], batch["targets"], stage=layers, x_BTD=x_BTD, **_documents(batch))
    return y


def _documents(batch: MicroBatch) -> dict[str, Any]:
    if "documents" not in batch:
        return {}

    return {"documents": PackedDocuments(batch["documents"], batch["positions"], batch["document_bounds"])}


def _stage_output(model: nn.Module, batch: MicroBatch, workers: int) -> torch.Tensor:
    assert isinstance(model, Pipelineable)
    return model.stage_output(batch["ids"], workers)


def language_model_logits(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Return the logits of a micro-batch, (B, T, V), with documents as in `language_model_loss`."""
    logits: torch.Tensor = model(batch["ids"], **_documents(batch))
    return logits


def count_targets(batch: MicroBatch) -> int:
    """Count the targets that take part in the loss."""
    return int(torch.count_nonzero(batch["targets"] != IGNORE_TARGET))


LANGUAGE_MODELLING = Objective(language_model_loss, count_targets, StagedLoss(language_model_stage, _stage_output))


def language_model_task(config: Config, grid: LaneGrid, mesh: MeshShape | None = None, rank: int = 0) -> Task:
    """Make the task of a language model on a token store, or of one worker's pipeline stages of it.

    The model is on the CPU, or on the meta device where its weights will be cut (`Task.first_value`).
    """
    assert config.train.steps is not None, "the config is resolved"
    # Give up before the supervisor would take a worker that waits for data for one that hangs.
    patience = 0.8 * config.supervise.data_seconds
    store = open_run_store(config.data, config.run_directory, config.segments, patience_seconds=patience)
    checker = store.check_on_first_use() if config.data.verify == "first_use" else None

    def cut(grid: LaneGrid) -> tuple[TokenFeed, BatchList | None]:
        evaluation: BatchList | None = None
        if "validation" in store.splits:
            evaluation = evaluation_feed(
                config.data,
                store,
                sequence_length=config.train.sequence_length,
                limit=config.evaluation.rows,
                micro_batch=grid.micro_batch,
                parts=row_parts(config),
            )
        return TokenFeed.of(config.row_settings, grid, store), evaluation

    feed, evaluation = cut(grid)
    feed.warn_of_short_sources()
    plan = feed.plan
    lengths = [plan.sequence_length(first) for first, _ in plan.stretches(0, config.train.steps)]
    attended = {length: length for length in lengths}
    if config.data.packing != "concat" or config.data.document_mask:
        figures = {length: feed.packing_figures(length) for length in attended}
        notice(packing_notice(figures[lengths[0]], config.data.packing))
        if config.data.document_mask:
            # Attention does not cross documents, so the FLOPs that it would take across them are not counted.
            attended = {length: round(total_figures(of.values()).attention_length) for length, of in figures.items()}
    for text in filter(None, map(feed.untrained_notice, attended)):
        notice(text)
    task = decoder_task(
        config.model,
        config.train,
        config.parallel,
        feed,
        store.vocab_size,
        seed=config.seed,
        attention_length=attended[lengths[0]],
        mesh=mesh,
        rank=rank,
    )
    shape = cast("ModelConfig", task.model.config)
    flops = {length: flops_per_token(shape, over) for length, over in attended.items()}
    task.flops_at = lambda step: flops[plan.sequence_length(step)]
    if any(store.has_mask("train", source) for source in store.sources("train")):
        # Tokens that a mask leaves out are no items, but they are computed, so the FLOPs per item are unknown.
        task.flops_per_item = task.flops_at = None
    task.evaluation = evaluation
    task.recut = cut
    loss = logits_loss(config.loss, config.distill, config.train.precision, language_model_logits)
    if loss is not None:
        # Evaluations stay comparable with those of other runs, and with `headway eval`.
        task.evaluated = task.objective
        task.objective = Objective(lambda model, batch: loss(language_model_logits(model, batch), batch), count_targets)
    task.settle_data = checker.wait_verified if checker is not None else None
    task.fingerprints = language_model_fingerprints(config, store)
    task.code = own_code(config.callbacks, config.optimizer.name, config.parallel.strategy)
    return task


def language_model_fingerprints(config: Config, store: TokenStore) -> dict[str, str]:
    """Return the fingerprints of the data of the run's last segment, of the tokenizer, and of what else it is made of:
    a pretrained model, a teacher, a loss of the user's own."""
    data = config.segments[-1].data if config.segments else store.fingerprint
    known = {
        "data": data,
        "tokenizer": store.tokenizer_fingerprint,
        **pretrained_fingerprints(config.model, config.distill, config.run_directory),
    }
    return known if config.loss is None else {**known, "loss": identify_function(config.loss, "loss")}


def own_code(callbacks: Sequence[str], optimizer: str, strategy: str) -> dict[str, str]:
    """Return the identities of the code that a config names besides its loss: an optimizer, a strategy, callbacks.

    Raises:
        ConfigError: it is not there.
    """
    named = {f"callbacks {name}": name for name in callbacks}
    specs = {"optimizer.name": optimizer, "parallel.strategy": strategy}
    named |= {key: name for key, name in specs.items() if ":" in name}
    found = {}
    for key, name in named.items():
        module, value = load_attribute(name, key, "attribute")
        # Builders of a spec may be in another module.
        builders = [getattr(value, trait, None) for trait in ("build", "build_elastic")]
        pieces = [identify_function(builder, key) for builder in builders if isinstance(builder, str)]
        found[key] = combined([code_identity(value, module, key), *pieces])
    return found


def decoder_task(
    model: ModelConfig,
    train: TrainConfig,
    parallel: ParallelConfig,
    feed: Feed,
    vocab_size: int,
    *,
    seed: int,
    attention_length: int,
    mesh: MeshShape | None = None,
    rank: int = 0,
) -> Task:
    """Make the task of the native decoder, or of a worker's stages of it, on batches of token ids; without evaluation.

    Args:
        vocab_size: Number of token ids that the feed may hold.
        attention_length: Positions that attention covers, for the count of FLOPs.
    """
    settings = complete(model, vocab_size)
    cut = mesh is not None and find_strategy(effective_strategy(parallel.strategy, mesh)).cuts_parameters
    # Tensor by tensor too where masters and weights are apart: neither side has room for a model that is neither.
    without_memory = cut or train.weights != "fp32"
    if settings.implementation == "transformers":
        return _transformers_task(
            settings,
            train,
            feed,
            seed=seed,
            vocab_size=vocab_size,
            attention_length=attention_length,
            without_memory=without_memory,
        )
    stages = mine = None
    if mesh is not None and mesh.pp > 1:
        costs = part_costs(settings, train.sequence_length)
        stages = plan_stages(parallel, train, costs.layers, costs.embedding, costs.head)
        mine = [stages[n] for n in stages_of_worker(mesh.coordinates(rank)["pp"], mesh.pp, len(stages))]
    first_value = None
    if without_memory:
        built, first_value = build_without_memory(model, vocab_size=vocab_size, seed=seed, stages=mine)
    else:
        built = build_model(model, vocab_size=vocab_size, seed=seed, stages=mine)
    built.set_activation_checkpointing(train.activation_checkpointing)
    return Task(
        model=built,
        feed=feed,
        objective=LANGUAGE_MODELLING,
        flops_per_item=flops_per_token(built.config, attention_length),
        vocab_size=vocab_size,
        parameters=count_parameters(built.config).total,
        stages=stages,
        first_value=first_value,
    )


def _transformers_task(
    settings: ModelConfig,
    train: TrainConfig,
    feed: Feed,
    *,
    seed: int,
    vocab_size: int,
    attention_length: int,
    without_memory: bool,
) -> Task:
    """Make the task of a pretrained model that transformers computes.

    Args:
        without_memory: The model is on the meta device, and read tensor by tensor later.
    """
    first_value = None
    if without_memory:
        model, first_value = build_for_shards(settings, seed=seed, precision=train.precision)
    else:
        model = build_transformers_model(settings, seed=seed)
        freeze_as_configured(model, train.precision)
    model.set_activation_checkpointing(train.activation_checkpointing)
    return Task(
        model=model,
        feed=feed,
        objective=Objective(language_model_loss, count_targets),
        flops_per_item=flops_per_token(settings, attention_length),
        vocab_size=vocab_size,
        parameters=count_parameters(settings).total,
        first_value=first_value,
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a nested batch to `device`. Other objects with a method `to` move themselves."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=device.type == "cuda")
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch
