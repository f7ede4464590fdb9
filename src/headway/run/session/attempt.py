"""The beginning and the end of an attempt, in the process that owns it."""

from __future__ import annotations

import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from headway.checkpoint.format.manifest import read_manifest
from headway.checkpoint.remote.acquire import is_sent
from headway.checkpoint.remote.ownership import RESTARTED_FILE
from headway.checkpoint.run_identity import CLAIM_FILE, RUN_ID, new_run_id, read_run_id, run_identity
from headway.checkpoint.store import CheckpointStore
from headway.checkpoint.verify import verify_checkpoint
from headway.config import Config, PreemptionConfig, changes, dump_config, identity, load_resolved
from headway.config.sections.early_stopping import reason_to_stop
from headway.core.console import notice, warning
from headway.core.coordination.launched import world_size_from_environment
from headway.core.coordination.outcomes import FINISHED, outcome_of
from headway.core.credentials.secrets import redact
from headway.core.errors import (
    INTERRUPTED,
    BudgetReached,
    CheckpointError,
    ConfigError,
    HeadwayError,
    Preempted,
    SavesFailed,
    explain_refusal,
    explaining_refusals,
)
from headway.core.files.atomic import atomic_write, write_json
from headway.core.files.hashes import fingerprint
from headway.core.process.signals import TERMINATION_SIGNALS, defer_signals, handled, pending_signals
from headway.cost.pricing import price_of
from headway.data.remote_store import tokenizer_folder
from headway.data.store_manifest import MANIFEST
from headway.data.tokenizing.tokenizer import keep_copy
from headway.data.used_by import keep_manifest, mark_use
from headway.run.directory.account import stopped_by_budget
from headway.run.directory.audit import move_log, record
from headway.run.directory.ledger import Ledger
from headway.run.directory.ownership import wait_for_dead_machine, wait_for_orphaned_writers
from headway.run.directory.run_directory import PRICE_KEY, Attempt, RunDirectory, command_line
from headway.run.notices import watching_for
from headway.run.notices.listening import deferring_stop_signals
from headway.telemetry.provenance import provenance
from headway.training.evaluation.early_stopping import recorded_evaluations
from headway.training.schedule import learning_rate

#: Set by the local launcher for its workers: the number of the attempt.
ATTEMPT_VARIABLE = "HEADWAY_ATTEMPT"
#: The flag that lets a run continue with a changed config or changed data.
ACCEPT = "--accept-changes"


@dataclass(frozen=True)
class RunOptions:
    """What to do about a run directory that already exists."""

    restart: bool = False
    """Move it aside and start from step 0."""
    accept_changes: bool = False
    """Continue although the config has changed in ways that affect results, or the data have changed."""
    start_epoch: bool = False
    """Begin an epoch of all data where the run continues."""
    leave_finished: bool = False
    """Make no attempt at a finished run: the caller wants the run, not a model in memory."""


def has_data(config: Config) -> bool:
    """Return whether there is a store to train on, as far as this machine knows.

    A task of the user's own has its data itself, and what is behind a URL is not asked for.
    """
    if config.task is not None:
        return True
    return config.data.remote is not None or (config.data.store / MANIFEST).exists()


def prepare_run_directory(config: Config, options: RunOptions) -> RunDirectory:
    """Check that an attempt can begin in the run directory, move an earlier run aside if requested, and return it.

    Raises:
        CheckpointError: an earlier run is in use and cannot be moved aside.
        ConfigError: the run there was made by another config.
    """
    run = RunDirectory(config.run_directory)
    # If torchrun starts its workers again, the restart has already been done.
    if options.restart and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        moved = run.archive()
        if moved:
            notice(f"the earlier run is kept in {moved}")
            move_log(moved, run.path)
            record(run.path, "restart", moved_to=str(moved))
    report_changes(run, config, options)
    return run


def without_done_restart(
    config: Config, options: RunOptions, gather: Callable[[list[float]], Sequence[Sequence[float]]]
) -> RunOptions:
    """Return the options without a restart that was done when torchrun first started its workers.

    All workers must call it. torchrun starts them again whenever a machine joins or leaves, without counting that, and
    the first worker may then be on a new machine. But the agent of some worker already ran before the run's newest
    attempt began.
    """
    if not options.restart or "TORCHELASTIC_RUN_ID" not in os.environ:
        return options
    oldest = min(worker[0] for worker in gather([_agent_start()]))
    records = RunDirectory(config.run_directory).attempt_records()
    started = records[-1].get("started") if records else None
    if not isinstance(started, int | float) or started < oldest:
        return options
    notice("this run was started over when torchrun began; now it continues")
    return replace(options, restart=False)


def _agent_start() -> float:
    """Return when the process that started this one began, in Unix seconds."""
    import psutil

    return float(psutil.Process(os.getppid()).create_time())


def note_restart(run: Path, config: Config, options: RunOptions) -> None:
    """Mark what is in the remote tier as the earlier run's if this run starts over; call it after the attempt has
    begun."""
    if options.restart and config.checkpoint.remote is not None and not (run / CLAIM_FILE).exists():
        (run / RESTARTED_FILE).touch()


def describe(attempt: Attempt, config: Config, fingerprints: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    """Record what is about to run, for the run and for the attempt."""
    record = provenance(
        command=sys.argv,
        config_fingerprint=fingerprint(identity(config)),
        fingerprints=fingerprints,
        model=facts,
        git_diff=config.telemetry.git_diff,
        keep=attempt.directory,
    )
    record[RUN_ID] = read_run_id(attempt.run) or new_run_id()
    write_config(config, attempt.run, attempt.directory)
    for folder in (attempt.run, attempt.directory):
        write_json(folder / "run.json", record)
    if "tokenizer" in fingerprints:
        # Keep copies: the store may change or vanish while the run's checkpoints are still to be exported.

        keep_copy(tokenizer_folder(config.data), attempt.run / "tokenizer", fingerprints["tokenizer"])
        keep_manifest(attempt.run, config.data.store, fingerprints["data"])
        if config.data.remote is None:
            mark_use(config.data.store, attempt.run, fingerprints["data"], attempt.owner.pid)


def write_config(config: Config, *folders: Path) -> None:
    """Write the resolved config as `config.yaml` into each of the folders."""
    text = dump_config(config)
    for folder in folders:
        with atomic_write(folder / "config.yaml", "w") as file:
            file.write(text)


def _begin(config: Config, fingerprints: Mapping[str, str], facts: Mapping[str, Any], options: RunOptions) -> Attempt:
    """Take ownership of the run directory and record what is about to run."""
    attempt = prepare_run_directory(config, options).begin_attempt(command_line(), None, None, **price_facts(config))
    try:
        note_restart(attempt.run, config, options)
        describe(attempt, config, fingerprints, facts)
    except BaseException as error:
        attempt.finish(f"failed to start: {error}", getattr(error, "exit_code", 1))
        raise
    return attempt


def price_facts(config: Config) -> dict[str, Any]:
    """Return the price of the machines for an attempt's record. A later attempt may have other machines.

    Raises:
        ConfigError: the offer that the config names is not known.
    """
    price = price_of(config.cost, config.usd_per_hour, world_size_from_environment() or config.parallel.all_workers)
    if price is None:
        return {PRICE_KEY: None}
    if price.offer is None:
        return {PRICE_KEY: price.usd_per_hour}
    day = price.offer.as_of
    return {
        PRICE_KEY: price.usd_per_hour,
        "offer": price.offer.key,
        "offer_date": None if day is None else day.isoformat(),
    }


class _Stop(BaseException):
    """A stop signal. Not an `Exception`, since compilers wrap or swallow those."""


@contextmanager
def record_preemption() -> Iterator[None]:
    """Turn a signal that came within `preemptible` into `Preempted`."""
    try:
        yield
    except _Stop as stop:
        pending_signals.clear()
        what = f"stopped by {stop} while no step was running"
        raise Preempted(what, fix="run the same command again") from None


@contextmanager
def preempted_by_notices(attempt: Path, config: PreemptionConfig) -> Iterator[None]:
    """Listen for notices around an attempt's only worker, and turn a signal that came meanwhile into `Preempted`.

    Args:
        attempt: The attempt's folder.
        config: The config's `preemption`.
    """
    with watching_for(attempt, config), record_preemption():
        yield


@contextmanager
def preemptible() -> Iterator[None]:
    """Turn a stop signal that comes outside the training loop into `Preempted`; the loop has its own handlers.

    One of several workers keeps the default handler, which also ends it while it waits for the others.
    """
    if world_size_from_environment() is not None:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        pending_signals.append(number)
        raise _Stop(signal.Signals(number).name)

    with record_preemption(), handled(TERMINATION_SIGNALS, stop):
        yield


@contextmanager
def attempt_scope(
    config: Config, fingerprints: Mapping[str, str], facts: Mapping[str, Any], options: RunOptions
) -> Iterator[Attempt]:
    """Begin an attempt, and record why it ended, however it ended.

    Args:
        fingerprints: Fingerprints of the data and the tokenizer.
        facts: Parameters and vocabulary of the model.

    Raises:
        CheckpointError: the directory is in use, or is not a run.
        ConfigError: the run there was made by another config.
    """
    wait_for_dead_machine(config.run_directory)
    if not options.restart:
        wait_for_orphaned_writers(config.run_directory)
    with ExitStack() as stack:
        with defer_signals():  # a signal amid these lines would leave an attempt without an outcome
            with explaining_refusals(CheckpointError, str(config.run_directory)):
                attempt = _begin(config, fingerprints, facts, options)
            begin_deferring = stack.enter_context(deferring_stop_signals())
            # Ends after the attempt's record is complete: after an answer to a notice the machine may be taken away at
            # once.
            stack.enter_context(watching_for(attempt.directory, config.preemption))
            stack.enter_context(_record_outcome(attempt, config))
            stack.enter_context(attempt.renewing_lease())
            stack.enter_context(record_preemption())
            stack.callback(begin_deferring)
        yield attempt


@contextmanager
def _record_outcome(attempt: Attempt, config: Config) -> Iterator[None]:
    try:
        yield
    except HeadwayError as error:
        is_failure = isinstance(error, SavesFailed)  # with the code of a state that is saved, which it is not
        outcome = error.what if is_failure else outcome_of(error.exit_code, error.what)
        attempt.finish(outcome, error.exit_code, error=type(error).__name__)
        if isinstance(error, BudgetReached):
            raise stopped_by_budget(config, error.what) from error
        raise
    except KeyboardInterrupt:
        attempt.finish("interrupted", INTERRUPTED)
        raise
    except BaseException as error:
        if (explained := explain_refusal(error, CheckpointError, str(attempt.run))) is not None:
            attempt.finish(explained.what, explained.exit_code)
            raise explained from error
        with suppress(OSError):  # a full disk must not hide what went wrong
            (attempt.directory / "traceback.txt").write_text(redact(traceback.format_exc()), encoding="utf-8")
        attempt.finish(f"crashed: {type(error).__name__}: {error}", 1)
        raise
    attempt.finish(FINISHED, 0)


def final_step(config: Config, newest: tuple[int, Mapping[str, Any]] | None = None) -> int | None:
    """Return the step at which a run ends: the last one, or the newest saved one if early stopping ends it there.

    Args:
        config: Resolved.
        newest: Step and context of the newest checkpoint; that of the run directory if None.
    """
    run = RunDirectory(config.run_directory)
    wanted = config.train.early_stopping
    if wanted is not None and (newest := newest or newest_manifest(run)) is not None:
        step, context = newest
        if reason_to_stop(wanted, recorded_evaluations(context, run.path, step, wanted.metric)) is not None:
            return step
    return config.train.steps


def are_steps_done(config: Config) -> bool:
    """Return whether the newest attempt of a run has finished, with all its steps committed."""
    run = RunDirectory(config.run_directory)
    records = run.attempt_records()
    finished = bool(records) and records[-1].get("outcome") == FINISHED
    return finished and Ledger(run.ledger_path).committed_step == final_step(config)


def is_finished(config: Config, fingerprints: Mapping[str, str], options: RunOptions) -> bool:
    """Return whether a run has all its steps, in a checkpoint that verifies, by this config and data; report it.

    If the remote tier does not have the checkpoint yet, one more attempt uploads it.
    """
    run = RunDirectory(config.run_directory)
    if options.restart or not run.config_path.exists() or changes(load_resolved(run.config_path), config):
        return False
    if not are_steps_done(config):
        return False
    # Verify only the last one: if it is damaged, an attempt recreates it from the one before.
    steps = final_step(config)
    last = [f for f in CheckpointStore(run.checkpoints).folders() if f.name == f"step-{steps:08d}"]
    found = verify_checkpoint(last[0]) if last else None
    if found is None or not found.good or found.manifest is None:
        return False
    if any(found.manifest.context.get(kind) != value for kind, value in fingerprints.items()):
        return False
    is_early = steps != config.train.steps
    notice(
        f"{run.path} is finished: "
        + (f"it stopped early at step {steps:,}" if is_early else f"all {steps:,} steps are done")
    )
    remote = config.checkpoint.remote
    if remote is not None and not is_sent(remote, run_identity(config), found.manifest, patience_seconds=5.0):
        notice(f"its last checkpoint is not known to be at {remote.url}; uploading it")
        return False
    return True


def check_changes(run: RunDirectory, config: Config, options: RunOptions) -> list[str]:
    """Describe the differences between a run's config and the one that it is to continue with.

    Raises:
        ConfigError: there is a difference, the run has begun, and it was not accepted; or the run has done more steps.
    """
    if not run.config_path.exists() or not run.has_begun():
        return []
    old = load_resolved(run.config_path)
    newest = newest_manifest(run)
    done = newest[0] if newest else 0
    config = counted_for(config, old, done)
    differences = changes(old, config)
    check_accepted(differences, options, run.config_path)
    back = f"go back first: headway checkpoints restore {run.path} --step {config.train.steps}"
    check_steps(config, done, run.config_path, back)
    return differences


def check_accepted(differences: Sequence[str], options: RunOptions, where: Path) -> None:
    """Check that the user accepts what has changed in a config.

    Args:
        differences: Descriptions of the changes.
        options: What the user accepts.
        where: Place of the old config, for a message.

    Raises:
        ConfigError: there is a difference that was not accepted.
    """
    if differences and not options.accept_changes:
        raise ConfigError(
            "the config differs from the one this run was made with: " + "; ".join(differences),
            where=str(where),
            fix=f"choose another name=..., or continue with the new values: {ACCEPT}",
        )


def check_steps(config: Config, done: int, where: Path, back: str) -> None:
    """Check that a config wants no fewer steps than were done.

    Args:
        config: Resolved.
        done: Finished steps.
        where: Place of the old config, for a message.
        back: How to continue from an earlier step, for a message.

    Raises:
        ConfigError: it does.
    """
    last = config.train.steps or 0
    if last < done:
        raise ConfigError(
            f"the run has done {done:,} steps; train.steps={last:,} is fewer",
            where=str(where),
            fix=f"train.steps={done} or more; or {back}",
        )


def counted_for(config: Config, old: Config, step: int) -> Config:
    """Return the config as a run that has done some steps continues with it.

    Amounts in tokens count the tokens of the finished steps, with the batches that these had.

    Args:
        config: Resolved.
        old: The config in the run directory.
        step: Step of the newest checkpoint.
    """
    same = config.with_segments(old.segments)
    batches = [(one.train.global_batch_rows, one.train.batch_ramp, one.train.sequence_length) for one in (same, old)]
    if not step or batches[0] == batches[1]:
        return same
    return config.model_copy(update={"train": config.train.after((old.train.batches, step))})


def newest_manifest(run: RunDirectory) -> tuple[int, Mapping[str, Any]] | None:
    """Return step and context of the newest local checkpoint whose manifest can be read."""
    for folder in reversed(CheckpointStore(run.checkpoints).folders()):
        with suppress(CheckpointError):  # the attempt itself reports checkpoints that cannot be read
            manifest = read_manifest(folder)
            return manifest.step, manifest.context
    return None


def report_changes(run: RunDirectory, config: Config, options: RunOptions) -> None:
    """Report what a run continues with that differs from before, and how the learning rate jumps.

    Raises:
        ConfigError: as `check_changes`.
    """
    differences = check_changes(run, config, options)
    if not differences:
        if run.config_path.exists() and changes(load_resolved(run.config_path), config):
            notice(f"{run.path} has no step yet: its config is replaced by this one")
        return
    for difference in differences:
        warning(f"the run continues with a changed config: {difference}")
    record(run.path, "accept changes", changes=differences)
    newest = newest_manifest(run)
    old = load_resolved(run.config_path)
    done = newest[0] if newest else 0
    if 0 < done < (config.train.steps or 0):
        before = _learning_rate(old, done - 1)
        after = _learning_rate(config, done)
        if not math.isclose(_learning_rate(old, done), after, rel_tol=1e-6):
            warning(f"the learning rate was {before:.3g} in step {done:,} and is {after:.3g} in step {done + 1:,}")


def _learning_rate(config: Config, step: int) -> float:
    return learning_rate(config.schedule, config.optimizer.learning_rate, config.train, step)
