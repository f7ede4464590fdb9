"""Training in Python: `headway.train` for language models, `headway.Trainer` for any module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headway.api.notebook import live_table
from headway.api.results import Run as Run
from headway.config import Config, identity, load_config, resolve
from headway.config.sections.task import TaskConfig
from headway.core.console import is_first_worker, notice, warning
from headway.core.coordination.launched import world_size_from_environment
from headway.core.errors import ConfigError
from headway.core.functions import name_of_function
from headway.core.process.variables import ONE_THREAD, with_variables
from headway.data.in_use import in_use
from headway.run.directory.ledger import Ledger
from headway.run.directory.run_directory import RunDirectory
from headway.run.supervisor.machines.machine_role import Membership, find_role
from headway.training.evaluation.benchmarks import benchmark_at_end
from headway.training.job import Callback

if TYPE_CHECKING:
    import torch
    from torch import nn

    from headway.config import LaneGrid, MeshShape
    from headway.run.session.attempt import RunOptions
    from headway.training.custom_loss import LogitsLoss
    from headway.training.own_task import Task
    from headway.training.task import Task as RunTask

#: (model, micro-batch) -> scalar tensor: the mean loss over the samples of the micro-batch.
MeanLoss = Callable[["nn.Module", Any], "torch.Tensor"]


def train(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    task: Callable[..., Task] | None = None,
    model: nn.Module | Mapping[str, Any] | None = None,
    dataset: Any = None,
    loss: MeanLoss | LogitsLoss | None = None,
    validation: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    restart: bool = False,
    accept_changes: bool = False,
    start_epoch: bool = False,
    begin_from: str | Path | None = None,
    own_process: bool = False,
    **keys: Any,
) -> Run:
    """Train a language model as `config` says, or continue a run that was interrupted.

        headway.train("my.yaml", steps=100)

    One worker trains in this process. With `parallel.workers` > 1 worker processes are started on this machine,
    watched, and started again when one dies or hangs (config section `supervise`); under torchrun this process is one.

    With `model` and `dataset` given, train that module on that dataset instead, as `Trainer` does.

    Args:
        config: A YAML file, the name of a preset, a mapping, or what `load_config` returns.
        task: The function of a task of your own, as the config's key `task`: a function of a module that worker
            processes can import too.
        model: A module of your own, as for `Trainer`; or a mapping with keys of the section `model`.
        dataset: What it is trained on, as for `Trainer`.
        loss: `(model, micro-batch) -> mean loss`, as for `Trainer`. Without `model` and `dataset`, the loss of the
            language model, as the config's key `loss`: `(logits, micro-batch) -> sum of losses`, a function of a module
            that worker processes can import too.
        validation: A second dataset, as for `Trainer`.
        collate: Makes a micro-batch from a list of samples, as for `Trainer`.
        callbacks: One or several, called between steps. Worker processes that Headway starts cannot get objects of this
            process: name the classes in the config there (`callbacks: [package.module:Class]`).
        restart: Move an earlier run of this name aside and start from step 0.
        accept_changes: Continue although the config, or the data, differ from the run's.
        start_epoch: Begin an epoch of all data where the run continues.
        begin_from: Another run, or a checkpoint of one, from which a run that is new begins. What its config changes
            must be accepted. A run that has begun so continues.
        own_process: This process does nothing else, as the command line's: one worker has a process of its own too, and
            all children of this process belong to the run.
        keys: Overrides as Python values, as for `load_config`: `steps=100`, `optimizer={"learning_rate": 1e-3}`.

    Raises:
        HeadwayError: with the reason; see its `exit_code`.
    """
    if isinstance(model, Mapping):
        keys["model"] = model
        model = None
    config = load_config(config, **keys) if keys or not isinstance(config, Config) else config
    if model is not None or dataset is not None:
        if model is None or dataset is None or loss is None:
            raise ConfigError("a model of your own needs a dataset and a loss", fix="give model=, dataset= and loss=")
        own = cast("MeanLoss", loss)
        trainer = Trainer(model, dataset, own, config, validation=validation, collate=collate, callbacks=callbacks)
        return trainer.fit(
            restart=restart, accept_changes=accept_changes, start_epoch=start_epoch, begin_from=begin_from
        )
    if validation is not None or collate is not None:
        raise ConfigError(
            "validation and collate belong to a dataset of your own", fix="give model=, dataset= and loss="
        )
    if loss is not None:
        config = config.model_copy(update={"loss": name_of_function(loss, "headway.train, loss")})
    if task is not None:
        given = {"function": name_of_function(task, "headway.train, task")}
        options_of_task = {} if config.task is None else {"options": config.task.options}
        config = config.model_copy(update={"task": TaskConfig.model_validate({**given, **options_of_task})})
    from headway.run.session.attempt import RunOptions

    options = RunOptions(restart, accept_changes, start_epoch, leave_finished=True)
    config = _in_steps(resolve(config), options, own_process)
    with live_table(config.run_directory):
        source = None if begin_from is None else Path(begin_from)
        return _train_language_model(config, options, _as_list(callbacks), source, own_process=own_process)


def _as_list(callbacks: Callback | Sequence[Callback]) -> list[Callback]:
    """Return one callback or several as a list.

    Raises:
        ConfigError: one is none.
    """
    found = [callbacks] if isinstance(callbacks, Callback | type) else list(callbacks)
    for one in found:
        if not isinstance(one, Callback):
            raise ConfigError(
                f"a callback is an object whose class derives from headway.Callback, not {one!r}",
                where="callbacks",
                fix=f"give {one.__name__}()" if isinstance(one, type) else "derive its class from headway.Callback",
            )
    return found


def _train_language_model(
    config: Config, options: RunOptions, callbacks: Sequence[Callback], source: Path | None, *, own_process: bool
) -> Run:
    from headway.run.session.attempt import preemptible

    several = config.parallel.all_workers > 1
    membership = _find_membership(config)
    alone = world_size_from_environment() is None
    if membership is not None and not membership.role.leads:
        from headway.run.supervisor.machines.node import run_node

        run_node(config, membership, options, own_process=own_process)
        return Run(config.run_directory)
    if source is not None:
        options = _begin_from(source, config, options)
    config = _with_precision(config, options.restart)
    if alone and several and not config.supervise.enabled:
        raise ConfigError(
            "several workers need a supervisor", where="supervise.enabled, parallel.workers", fix="parallel.workers=1"
        )
    supervised = alone and config.supervise.enabled and (several or own_process)
    if config.track and not supervised:
        notice(
            "no supervisor sends this run to its trackers:"
            f" `headway track {config.run_directory}` follows it from another process"
        )
    if supervised and callbacks:
        raise ConfigError(
            "worker processes cannot get callbacks that are objects of this process",
            where="callbacks, parallel.workers",
            fix="callbacks: [package.module:Class] in the config, or start your script with torchrun",
        )
    if supervised:
        _check_importable(config)
    if supervised:
        # Trackers get the report too, so it is written before the last of what they get is sent.
        report = partial(_finished, config) if config.track else None
        _supervise(config, options, membership, report, own_process=own_process)
        with preemptible():
            _tell_goodput(config)
            return Run(config.run_directory) if report is not None else _finished(config)
    if alone:
        _prepare(config, options, own_process)
    with preemptible():
        with in_use(config.data.store):
            _train(config, options, callbacks, own_process)
        return _finished(config)


def _in_steps(config: Config, options: RunOptions, own_process: bool) -> Config:
    """Return the config with `train.epochs` as steps; where this process prepares the data, that comes first."""
    if config.train.epochs is None:
        return config
    if world_size_from_environment() is None and config.parallel.machines == 1:
        # The checks before preparation need a length; nothing that is prepared depends on it.
        assumed = config.train.over(rows=10**6)
        _prepare(config.model_copy(update={"train": assumed}), options, own_process)
    from headway.data.epochs import in_steps

    with with_variables(ONE_THREAD):  # NumPy's threads would prevent copies of this process
        return in_steps(config)


def _check_importable(config: Config) -> None:
    """Check that worker processes can import the code that the config names.

    Raises:
        ConfigError: it is of this process's script, notebook or standard input.
    """
    named = {
        "loss": config.loss,
        "optimizer.name": config.optimizer.name,
        "parallel.strategy": config.parallel.strategy,
        "task": None if config.task is None else config.task.function,
    }
    named |= {f"callbacks.{number}": name for number, name in enumerate(config.callbacks)}
    here = [key for key, name in named.items() if (name or "").startswith("__main__:")]
    if here:
        raise ConfigError(
            f"worker processes cannot import {', '.join(map(str, (named[key] for key in here)))} from the script or"
            " notebook that starts them",
            where=", ".join([*here, "parallel.workers"]),
            fix="move it into a module of its own, or start your script with torchrun",
        )


def _begin_from(source: Path, config: Config, options: RunOptions) -> RunOptions:
    from headway.run.session.attempt import preemptible

    with preemptible(), with_variables(ONE_THREAD):  # NumPy's threads would prevent copies of this process
        from headway.run.session.begin_from import begin_from

        return begin_from(source, config, options)


def _supervise(
    config: Config,
    options: RunOptions,
    membership: Membership | None,
    report: Callable[[], object] | None,
    *,
    own_process: bool,
) -> None:
    from headway.run.supervisor.machines.run_machines import RunMachines
    from headway.run.supervisor.supervisor import supervise

    with RunMachines.of(config, membership) as machines:
        _prepare(config, options, own_process)
        with in_use(config.data.store):  # between attempts too
            supervise(config, options, own_process=own_process, finished=report, machines=machines)


def _prepare(config: Config, options: RunOptions, own_process: bool) -> None:
    from headway.api.start.preparing import prepare_if_needed
    from headway.run.session.attempt import preemptible

    with preemptible():
        prepare_if_needed(config, options, own_process)


def _find_membership(config: Config) -> Membership | None:
    """Return this machine's membership in a run on several machines; None for a run on one."""
    if config.parallel.machines == 1:
        return None

    role = find_role(config)
    return None if role is None else Membership(role, identity(config))


def _with_precision(config: Config, restart: bool) -> Config:
    """Choose the precision where the config leaves that open, and load PyTorch for nothing else."""
    if config.train.precision != "auto":
        return config
    with with_variables(ONE_THREAD):  # NumPy's threads would prevent copies of this process
        from headway.run.session.precision import with_precision
    return with_precision(config, restart=restart)


def _train(config: Config, options: RunOptions, callbacks: Sequence[Callback], own_process: bool) -> None:
    from headway.run.session.preflight import examine

    plan = examine(config, options, begins=world_size_from_environment() is None)
    from headway.run.session.process_state import restore_process_state
    from headway.run.session.session import run_in_this_process

    with nullcontext() if own_process else restore_process_state():
        run_in_this_process(plan, plan.make_task, callbacks, own_process=own_process)


class Trainer:
    """Trains any module on any map-style dataset with the loop, checkpoints and promises of a Headway run.

    Args:
        model: A module whose forward pass `loss` calls. Its first weights are the first worker's; seed them yourself
            (`torch.manual_seed`), so that a run killed before its first checkpoint starts again with the same ones.
        dataset: With `__len__` and `__getitem__`, which must be a pure function of the index: samples are drawn by a
            computed permutation of each epoch, and read ahead on a thread.
        loss: `(model, micro-batch) -> mean loss` over the samples of a micro-batch.
        config: `name`, `seed`, `train`, `optimizer`, `schedule`, `checkpoint` and so on; `data` and `model` are unused.
        validation: A second dataset, evaluated with the same loss.
        collate: Makes a micro-batch from a list of samples; PyTorch's default when not given.
        callbacks: Called between steps, on every worker.

    For several workers, start the script with `torchrun --nproc-per-node N script.py`.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Any,
        loss: MeanLoss,
        config: Config,
        *,
        validation: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        callbacks: Callback | Sequence[Callback] = (),
    ) -> None:
        from headway.training.own_task import Task

        self.task = Task(model, dataset, loss, validation, collate)
        resolved = resolve(config)
        self.config = resolved.model_copy(update={"train": resolved.train.over(len(dataset))})
        self.callbacks = _as_list(callbacks)

    def fit(
        self,
        *,
        restart: bool = False,
        accept_changes: bool = False,
        start_epoch: bool = False,
        begin_from: str | Path | None = None,
    ) -> Run:
        """Train to the last step, continuing from the newest checkpoint of the run directory if there is one.

        The options are those of `headway.train`.

        Raises:
            HeadwayError: with the reason; see its `exit_code`.
        """
        from headway.run.session.attempt import RunOptions, preemptible
        from headway.run.session.changes import DatasetData, settle_segments
        from headway.run.session.preflight import RunPlan
        from headway.run.session.process_state import restore_process_state
        from headway.run.session.session import run_in_this_process
        from headway.run.session.spending import check_cost
        from headway.training.own_task import code_of_objects, own_run_task, rows_fingerprint

        if world_size_from_environment() is None and self.config.parallel.workers > 1:
            raise ConfigError(
                "Trainer cannot start workers itself, since they need your script",
                where="parallel.workers",
                fix=f"torchrun --nproc-per-node {self.config.parallel.workers} your_script.py",
            )
        if (key := self.config.logits_key) is not None:
            raise ConfigError(
                f"{key} is for language models; a module of your own brings its loss",
                where=key,
                fix="leave it out, and compute it in the function loss",
            )
        if self.config.evaluation.benchmarks is not None:
            raise ConfigError(
                "benchmarks need a language model with a tokenizer; a module of your own has none",
                where="evaluation.benchmarks",
                fix="leave it out, and measure in a callback",
            )
        self.config = _with_precision(self.config, restart)
        options = RunOptions(restart, accept_changes, start_epoch)
        if begin_from is not None:
            options = _begin_from(Path(begin_from), self.config, options)
        ledger = Ledger(RunDirectory(self.config.run_directory).ledger_path)
        rows = len(self.task.dataset)
        data = DatasetData(rows, rows_fingerprint(rows), rows_fingerprint, ledger)
        with preemptible():
            config = settle_segments(self.config, data, options)
            check_cost(config, options)
            with restore_process_state(), live_table(self.config.run_directory):
                plan = RunPlan.of(config, options)
                code = code_of_objects(self.task)

                def make_task(config: Config, grid: LaneGrid, mesh: MeshShape, rank: int) -> RunTask:
                    return own_run_task(config, self.task, grid, mesh, rank, code=code)

                run_in_this_process(plan, make_task, self.callbacks)
            return _finished(self.config)


def _tell_goodput(config: Config) -> None:
    from headway.telemetry.goodput import goodput_of
    from headway.telemetry.record import open_run

    found = goodput_of(open_run(config.run_directory))
    if found is not None:
        notice(str(found))


def _finished(config: Config) -> Run:
    if config.evaluation.benchmarks is not None and is_first_worker():
        _benchmark(config)
    if config.telemetry.report and is_first_worker():
        leave_report(config.run_directory)
    return Run(config.run_directory)


def _benchmark(config: Config) -> None:
    """Run the benchmarks of the last step, and record them with the run."""
    import torch

    from headway.run.session.attempt import final_step
    from headway.telemetry.metrics import MetricsLog
    from headway.telemetry.record import open_run

    benchmarks = config.evaluation.benchmarks
    run = RunDirectory(config.run_directory)
    found = open_run(run.path)
    steps = final_step(config)
    assert benchmarks is not None, "checked"
    if steps is None or found.step != steps or not found.attempts:
        return
    # Training has ended, so its GPU is free.
    device = "cuda:0" if config.train.device != "cpu" and torch.cuda.is_available() else "cpu"
    if metrics := benchmark_at_end(run.path, steps, benchmarks, device):
        log = MetricsLog(run.metrics_path, found.attempts[-1].number)
        log.write(steps, metrics)
        log.close()


def leave_report(run: Path) -> None:
    """Write the report into the run directory; a problem with that is reported and costs the run nothing."""
    from headway.telemetry.report import write_report

    try:
        notice(f"report: {write_report(run)}")
    except OSError as error:
        warning(f"no report.html: {error.strerror or error} (headway report {run} writes it later)")
