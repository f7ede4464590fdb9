"""What a user reads before the first step takes its time."""

from __future__ import annotations

from contextlib import suppress

from headway.checkpoint.store import CheckpointInfo
from headway.config import MeshShape, crossing_groups, ineffective_settings
from headway.config.checks.ineffective import repeated_data, unfit_vocabulary
from headway.core.console import notice, warning
from headway.core.errors import DataError
from headway.core.format import counted, format_count
from headway.data.feeding.token_feed import TokenFeed
from headway.data.store_manifest import read_manifest
from headway.run.session.spending import price_warnings
from headway.training.assembled import Assembled
from headway.training.setup.available import shortfalls


def _unusual_data(assembled: Assembled) -> list[str]:
    """Say what is unusual about the data of a language model: many passes, or a vocabulary of other text."""
    feed = assembled.task.feed
    found = list[str]()
    if isinstance(feed, TokenFeed):
        found += repeated_data(max(feed.plan.epochs(assembled.total_steps - 1)))
        with suppress(DataError):  # of a store behind a URL; one that is damaged is reported by what reads it
            found += unfit_vocabulary(read_manifest(assembled.config.data.store))
    return found


def report_start(assembled: Assembled, start: CheckpointInfo | None, parameters: int) -> None:
    """Report what is about to happen.

    Args:
        parameters: Of the whole model.
    """
    config = assembled.config
    world = assembled.world
    step = assembled.state.cursor.step
    if config.parallel.all_workers not in (1, world.size) and config.parallel.min_workers is None:
        started = counted(world.size, "worker")
        notice(f"parallel.workers={config.parallel.workers} is ignored: the agent has started {started}")
    sizes = list(dict.fromkeys(rows for _, _, rows in config.train.batches.stretches(0, assembled.total_steps)))
    batch = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    notice(
        f"{config.name}: {format_count(parameters)} parameters · {assembled.total_steps:,} steps of"
        f" {batch} rows · {counted(world.size, 'worker')} on"
        f" {world.device.type} · {config.train.precision} · determinism {config.determinism}"
    )
    if world.is_first:
        evaluates = assembled.task.evaluation is not None
        for line in (
            *shortfalls(config.train, world.device),
            *crossing_groups(config, world.size),
            *price_warnings(config, world.size),
            *ineffective_settings(config, evaluates),
        ):
            warning(line)
        for line in _unusual_data(assembled):
            notice(line)
    if start is None:
        return
    if step >= assembled.total_steps:
        notice(f"all {assembled.total_steps:,} steps of {config.run_directory} are done")  # an evaluation may be left
        return
    notice(f"resuming from {start.path} (state {start.state_sha256[:12]})")
    before = start.context.get("world_size")
    mesh = start.context.get("mesh")
    if config.determinism != "run":
        return
    if before != world.size:
        warning(
            f"{world.size} workers instead of {before}: the run continues, but not bit for bit"
            " (determinism=elastic promises that)"
        )
    elif mesh not in (None, world.mesh.arrangement):
        then = MeshShape(**mesh)
        warning(f"workers arranged as {world.mesh} instead of {then}: the run continues, but not bit for bit")
