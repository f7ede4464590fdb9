"""The output of `headway train --dry-run`: what can be known before the first step."""

from __future__ import annotations

from headway.config import (
    Config,
    LaneGrid,
    MeshShape,
    ModelConfig,
    TrainConfig,
    crossing_groups,
    ineffective_settings,
    resolve_threads,
)
from headway.config.derived.pipeline import idle_share
from headway.core.console import warning
from headway.core.coordination.launched import most_threads
from headway.core.format import counted, format_count
from headway.core.machine.cores import usable_cores
from headway.data.feeding.plan import MixedPlan, RowPlan
from headway.data.feeding.segmented import SegmentedPlan
from headway.data.feeding.token_feed import TokenFeed
from headway.data.pinned import pinned
from headway.models.facts import count_parameters, flops_per_token, part_costs
from headway.parallel.stages import plan_stages
from headway.parallel.world import pick_device
from headway.run.session.attempt import RunOptions
from headway.run.session.checks import check_remote_usable, check_run
from headway.run.session.parts import check_apart
from headway.run.session.precision import with_precision
from headway.run.session.preflight import RunPlan, examine
from headway.telemetry.record import is_run, open_run
from headway.training.own_task import try_loss
from headway.training.setup.available import shortfalls

# Number of segments of a mixture that are listed.
_SEGMENTS = 8


def preview(config: Config, options: RunOptions | None = None) -> str:
    """Check a resolved config against this machine and its data, and describe the run in a few lines.

    Args:
        options: Options about the run directory; without them the directory is not checked, since no run is intended.

    Raises:
        HeadwayError: the error that would have stopped the run.
    """
    config = with_precision(config, restart=options is not None and options.restart)
    if config.task is not None:
        return _preview_task(examine(config, options), options)
    plan = examine(config, options)
    if options is not None:
        check_apart(plan.config, options)
    config = plan.config
    grid = plan.grid
    mesh = plan.mesh
    store = plan.store
    workers = mesh.size
    train = config.train
    model = config.model
    assert store is not None and train.steps is not None, "the examination opened the store of a resolved config"
    steps = train.steps
    store = pinned(store, config.run_directory, config.segments[-1].data) if config.segments else store
    warn_of_machine(config, workers)
    for line in ineffective_settings(config, "validation" in store.splits):
        warning(line)
    feed = TokenFeed.of(config.row_settings, grid, store)
    tokens = train.batches.tokens_before(steps)
    now = train.batches.begins
    # a stage may begin with shorter rows
    rows = sum(feed.plan.epoch_rows(now))
    length = feed.plan.sequence_length(now)
    epochs = _epochs(config.train, feed.plan)
    return "\n".join(
        [
            *_run(config, options, store.fingerprint),
            model_line(model, train),
            f"data       {config.data.store}: {format_count(rows)} rows of {length} tokens",
            *_mixture(feed.plan),
            f"training   {train.batches.sum_in_words(steps)}: {format_count(tokens)} tokens, {epochs:.2f} epochs",
            *workers_lines(config, mesh, grid),
        ]
    )


def warn_of_machine(config: Config, workers: int) -> None:
    """Warn of what a run would leave unused, do slowly, or send between machines."""
    for line in (*shortfalls(config.train, pick_device(config.train.device)), *crossing_groups(config, workers)):
        warning(line)


def _preview_task(plan: RunPlan, options: RunOptions | None) -> str:
    """Describe the run of a task of the user's own, after trying its loss on its first samples."""
    config = plan.config
    own = plan.own
    train = plan.config.train
    assert own is not None and config.task is not None and train.steps is not None, "it was examined"
    try_loss(own, config.seed, plan.grid.micro_batch)
    warn_of_machine(config, plan.mesh.size)
    samples = len(own.dataset)
    held_out = "none" if own.validation is None else f"{len(own.validation):,}"
    rows = train.batches.rows_before(train.steps)
    readers = f"{counted(config.data.processes, 'process')} per worker" if config.data.processes else "a thread"
    return "\n".join(
        [
            *_run(config, options, plan.fingerprints["data"]),
            f"task       {config.task.function}: {format_count(plan.facts()['parameters'])} parameters",
            f"data       {samples:,} samples, {held_out} for validation, read by {readers}",
            f"training   {train.batches.sum_in_words(train.steps, of_rows='samples')}: {rows / samples:.2f} epochs",
            *workers_lines(config, plan.mesh, plan.grid),
        ]
    )


def model_line(model: ModelConfig, train: TrainConfig) -> str:
    """Describe the size of a model."""
    parameters = count_parameters(model)
    active = f" ({format_count(parameters.active)} active)" if model.experts else ""
    flops = format_count(flops_per_token(model, train.sequence_length))
    return f"model      {format_count(parameters.total)} parameters{active}, {flops} FLOPs per token"


def workers_lines(config: Config, mesh: MeshShape, grid: LaneGrid) -> list[str]:
    """Describe how the steps are divided between workers."""
    train = config.train
    assumed = config.train.steps or 0
    device = pick_device(train.device)
    threads = resolve_threads(config, mesh.size, grid.lanes, usable_cores(), at_most=most_threads())
    layout = f": {mesh}" if mesh.ep > 1 or not mesh.is_data_parallel else ""
    return [
        *([f"batches    {train.batches.in_words(assumed)}"] if _has_several(train) else []),
        f"grid       {counted(grid.lanes, 'lane')} of {counted(grid.micro_batches, 'micro-batch')}"
        f" of {counted(grid.micro_batch, 'row')}",
        f"workers    {mesh.size} on {device.type}, {counted(threads, 'thread')} each{layout}",
        *_pipeline(config, config.model, grid.micro_batches),
        f"promise    determinism {config.determinism}",
    ]


def _epochs(train: TrainConfig, plan: RowPlan) -> float:
    """Return how often the run goes through all data, which may have grown with a change of the run."""
    batches = train.batches
    return sum(
        (batches.tokens_before(last) - batches.tokens_before(first))
        / (sum(plan.epoch_rows(first)) * plan.sequence_length(first))
        for first, last in plan.stretches(0, train.steps or 0)
    )


def _has_several(train: TrainConfig) -> bool:
    return len(list(train.batches.stretches(0, train.steps or 0))) > 1


def _run(config: Config, options: RunOptions | None, data: str) -> list[str]:
    """Describe the run directory and the state of the run; empty without options."""
    if options is None:
        return []
    check_run(config, options)
    check_remote_usable(config, options, data)
    return run_state(config, options)


def run_state(config: Config, options: RunOptions) -> list[str]:
    """Describe what is in the run directory."""
    where = config.run_directory
    if not is_run(where):
        state = "new"
    elif options.restart:
        state = "starts over, the earlier run is moved aside"
    else:
        run = open_run(where)
        step = run.step
        last = config.train.steps or 0
        state = f"{'continues: ' if step < last else ''}{run.outcome}, step {step:,}"
    return [f"run        {where} ({state})"]


def _pipeline(config: Config, model: ModelConfig, micro_batches: int) -> list[str]:
    """Describe the layers of every stage, counted from 0, and the idle share; empty without a pipeline.

    Raises:
        ConfigError: the layers cannot be cut that way.
    """
    if config.parallel.pipeline == 1:
        return []
    costs = part_costs(model, config.train.sequence_length)
    stages = plan_stages(config.parallel, config.train, costs.layers, costs.embedding, costs.head)
    layers = " | ".join(f"{stage.start}-{stage.stop - 1}" for stage in stages)
    idle = idle_share(config.parallel, micro_batches)
    return [f"pipeline   layers {layers}, {config.parallel.pipeline_schedule}: {idle:.0%} of the time idle at best"]


def _mixture(plan: RowPlan) -> list[str]:
    """Describe the shares at the start and after up to so many changes; empty without a mixture."""
    plan = plan.plans[-1] if isinstance(plan, SegmentedPlan) else plan
    if not isinstance(plan, MixedPlan):
        return []
    segments = plan.mixture.segments
    lines = []
    for segment in segments if len(segments) <= _SEGMENTS else [segments[0], segments[-1]]:
        shares = ", ".join(
            f"{name} {float(share):.1%}" for name, share in zip(plan.sources, segment.shares, strict=True)
        )
        lines.append(
            f"           step {segment.first_step:,}: {shares}, rows of {segment.phase.sequence_length} tokens"
        )
    between = len(segments) - len(lines)
    if between:
        lines.insert(1, f"           ... {between} changes of shares between ...")
    return [lines[0].replace("          ", "mixture   ", 1), *lines[1:]]
