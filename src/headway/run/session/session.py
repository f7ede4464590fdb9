"""One attempt inside one process: join the others, find where to start, train, and record why it ended.

The same code runs in a plain process, under the local launcher and under torchrun. They differ only in which process
owns the attempt. The owner, which began it, also ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from headway.config import Config, LaneGrid, MeshShape, load_config
from headway.core.alerts import alerting
from headway.core.code_identity import object_identity
from headway.core.console import is_first_worker, log_to, warning
from headway.models.layers.attention import choose_products
from headway.run.directory.run_directory import Attempt
from headway.run.session.assemble import assemble
from headway.run.session.attempt import RunOptions, attempt_scope
from headway.run.session.grid import choose_micro_batch, choose_threads, try_memory
from headway.run.session.join import join_workers
from headway.run.session.joined import Joined, join_attempt, nothing_to_do
from headway.run.session.measured_choices import decide_attention, decide_compile
from headway.run.session.preflight import RunPlan
from headway.run.session.records import (
    checkpoint_context,
    evaluation_history,
    make_failed_saves,
    make_recorders,
    make_rewinder,
    make_writer,
)
from headway.run.session.report import report_start
from headway.run.session.start import adopt_segments, check_rows, find_start, take_up
from headway.training.job import Callback, Job, load_callbacks, unknown_hooks
from headway.training.loop import train_loop
from headway.training.setup.compiling import compile_model
from headway.training.setup.model_proofs import prove_model
from headway.training.staged import check_model_is_cut
from headway.training.stop import NoticeReader
from headway.training.task import Task


def run_worker(config: Path) -> None:
    """Train as one of the workers that an agent has started.

    Args:
        config: The file with the config that the agent has examined.
    """
    plan = RunPlan.of(load_config(config), RunOptions())
    run_in_this_process(plan, plan.make_task, own_process=True)


def run_in_this_process(
    plan: RunPlan,
    make_task: Callable[[Config, LaneGrid, MeshShape, int], Task],
    callbacks: Sequence[Callback] = (),
    own: Callable[..., AbstractContextManager[Attempt]] = attempt_scope,
    *,
    own_process: bool = False,
) -> None:
    """Train as one worker: the only one, or one of those that torchrun or the local launcher started.

    Args:
        own: Begins an attempt if no other process has, and ends it.
        own_process: This process ends with the attempt.
    """
    config = plan.config
    options = plan.options
    of_callbacks = {f"callbacks {type(one).__name__}": object_identity([type(one)]) for one in callbacks}
    callbacks = [*load_callbacks(config.callbacks), *callbacks]
    for text in (text for callback in callbacks for text in unknown_hooks(callback)):
        if is_first_worker():
            warning(text)
    with join_workers(config, plan.mesh) as world:

        def remake(config: Config) -> Task:
            return make_task(config, plan.grid, world.mesh, world.rank)

        task = remake(config)
        check_model_is_cut(task, world)
        if nothing_to_do(config, task, world, options):
            return
        with (
            # Outside of the attempt: its record and the answer to a notice do not wait for an alert command.
            alerting(config.telemetry.alert, config.run_directory) as alerts,
            join_attempt(config, task, world, options, own) as attempt,
            # Other workers redirect all their output (`supervisor.worker`).
            log_to(attempt.worker_log(0), tolerate_hangs=True) if world.is_first else nullcontext(),
        ):
            if alerts is not None:
                alerts.open_file()
            joined = Joined(config, task, world, plan.grid, attempt, {**task.code, **of_callbacks}, own_process)
            # A later attempt of the supervisor accepts the config that the first one has checked, not other code.
            _train(joined, callbacks, remake, accept_code=options.accept_changes and not own_process)


def _train(
    joined: Joined, callbacks: Sequence[Callback], remake: Callable[[Config], Task], *, accept_code: bool
) -> None:
    """Find where the attempt starts, put together what it trains, and train to the end."""
    # Where it starts.
    start = find_start(joined)
    joined = adopt_segments(joined, start, remake)
    check_rows(joined.config.train.batches, joined.grid, start)

    # What it trains: the parts, and the checkpoint in them.
    threads = choose_threads(joined.config, joined.world, joined.grid, start.info)
    torch.set_num_threads(threads)
    parameters = joined.task.facts()["parameters"]  # counted now: a strategy may take them away
    fresh = start.info is None
    assembled = assemble(joined.config, joined.task, joined.world, joined.grid, threads, fresh=fresh)
    start, left_out = take_up(joined, start, assembled, accept_code=accept_code)

    # How this machine computes it.
    proofs = prove_model(assembled, start.info.context if start.info else None)
    assembled = choose_micro_batch(assembled, start.info)
    by_products = decide_attention(assembled, start.info)
    choose_products(by_products)
    compiled = decide_compile(assembled, start.info)
    if compiled:
        compile_model(joined.config.parallel, joined.task.model, joined.config.train.compile_mode)
    try_memory(assembled)

    # What it records.
    choices = {"threads": threads, "compiled": compiled, "attention_by_products": by_products}
    context = {**checkpoint_context(joined, assembled, start), **choices, **proofs, **left_out}
    evaluations = evaluation_history(joined, start, assembled.state.cursor.step, context)
    notices = NoticeReader(joined.attempt.directory)
    failed_saves = make_failed_saves(joined)
    # Recorders come last, to record what the others have added.
    callbacks = [*callbacks, notices, failed_saves, *make_recorders(joined, start)]

    job = Job(
        assembled,
        make_writer(joined, assembled.state, start),
        context,
        callbacks,
        make_rewinder(joined, start),
        evaluations,
        joined.own_process,
    )
    report_start(assembled, start.info, parameters)
    train_loop(job, notices, failed_saves)
