"""Assembly of what is trained: the model under its strategy, and its optimizer, on this worker's device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from headway.config import Config, LaneGrid, OptimizerConfig, effective_strategy, find_strategy
from headway.core.errors import ConfigError
from headway.core.model_protocol import KeptElsewhere
from headway.parallel.host_weights.place import place_on_both_sides
from headway.parallel.materialize import materialize
from headway.parallel.strategy import Engine, Strategy, make_strategy
from headway.parallel.world import World
from headway.training.assembled import Assembled
from headway.training.average import WeightAverage
from headway.training.optimizer import build_optimizer
from headway.training.optimizer.groups import OwnGroup, limits_of, own_groups
from headway.training.setup.precision import apply_precision, muon_products
from headway.training.setup.shard_invariance import check_shard_invariance
from headway.training.staged import make_pipeline
from headway.training.state import TrainState
from headway.training.task import Task


def assemble(
    config: Config, task: Task, world: World, grid: LaneGrid, threads: int, *, fresh: bool = True
) -> Assembled:
    """Put together what is trained: the strategy around a task's model, the optimizer, the pipeline.

    All workers must call it.

    Args:
        threads: CPU threads of this worker.
        fresh: Whether training starts from the initial weights; otherwise weights are about to be loaded.
    """
    apply_precision(config.train, task.model.train(), world.device)
    own = {} if task.parameter_groups is None else own_groups(task.model, task.parameter_groups)  # before it is cut
    strategy = _cut(config, task, world, fresh)
    elastic = config.determinism == "elastic"
    settings, updates_on = _updates(config.optimizer, config.parallel.strategy, world)
    products = muon_products(config.train.precision)
    optimizer = build_optimizer(
        settings, task.model, updates_on, strategy.owns_for_update, elastic=elastic, products=products, own=own
    )
    if elastic and find_strategy(config.parallel.strategy).cuts_parameters:
        check_shard_invariance(partial(build_optimizer, settings, elastic=True), updates_on, threads)
    engine = strategy if isinstance(strategy, Engine) else None
    if engine is not None:
        engine.take_over(optimizer)
        _check_engine(config, own)
    average = None if config.train.ema is None else WeightAverage(task.model, config.train.ema)
    state = TrainState(task.model, optimizer, engine=engine, average=average, clip_limits=limits_of(own))
    pipeline = make_pipeline(config.parallel, config.train.precision, task, world)
    return Assembled(config, task, state, strategy, world, grid, pipeline)


def _check_engine(config: Config, own: Mapping[str, OwnGroup]) -> None:
    """Check that nothing is asked for that an engine, which keeps weights and moments itself, does not do.

    Raises:
        ConfigError: it is.
    """
    if limits_of(own) and config.train.weights != "fp32":
        raise ConfigError(
            "gradients in host memory have one norm, so a limit for a group of parameters is not possible",
            where="train.weights, parameter_groups",
            fix="train.weights=fp32, or leave out the limits of groups",
        )
    if config.train.ema is not None or limits_of(own):
        asked = "a limit for a group of parameters" if config.train.ema is None else "train.ema"
        raise ConfigError(
            f"DeepSpeed keeps weights and gradients to itself, so {asked} is not possible",
            where="parallel.strategy, train.ema, parameter_groups",
            fix=f"parallel.strategy={find_strategy(config.parallel.strategy).counterpart}",
        )


def _cut(config: Config, task: Task, world: World, fresh: bool) -> Strategy:
    """Make the strategy around a model, and give the model its weights: equal on every worker if they are the initial
    ones."""
    if config.train.weights != "fp32":
        made = place_on_both_sides(
            task.model,
            world,
            partial(make_strategy, config, task.model, world),
            task.first_value if fresh else None,
            cuts=find_strategy(effective_strategy(config.parallel.strategy, world.mesh)).cuts_parameters,
            fresh=fresh,
        )
        task.first_value = None
        return made
    if task.first_value is None:
        task.model.to(world.device)
        if fresh:
            world.broadcast_(task.model.parameters())
        return make_strategy(config, task.model, world)
    strategy = make_strategy(config, task.model, world)
    # A checkpoint does not hold the weights below an adapter.
    needs_values = fresh or (isinstance(task.model, KeptElsewhere) and bool(task.model.kept_elsewhere()))
    first_value = task.first_value if needs_values else None
    materialize(task.model, world, first_value, in_host_memory=config.optimizer.offload)
    task.first_value = None  # it may hold the whole model
    return strategy


def _updates(settings: OptimizerConfig, strategy_name: str, world: World) -> tuple[OptimizerConfig, torch.device]:
    """Return the optimizer's settings and its device. Some strategies keep moments in host memory themselves."""
    configured = find_strategy(strategy_name)
    strategy = find_strategy(effective_strategy(strategy_name, world.mesh))
    # A run that shards on a CPU may shrink to one worker, whose moments are in host memory already.
    on_host = world.device.type == "cpu" and configured.cuts_parameters
    if settings.offload and (on_host or strategy.offloads_itself):
        return settings.model_copy(update={"offload": False}), torch.device("cpu")
    return settings, world.device
