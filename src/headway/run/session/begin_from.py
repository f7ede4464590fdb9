"""`headway train --from`: a run that begins from a checkpoint of another run, perhaps with other values in its config.

What may differ, and what has to be accepted, is as in a run that continues with a changed config.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headway.checkpoint.format.manifest import step_of
from headway.checkpoint.run_identity import in_words, read_run_id, run_record
from headway.config import Config, identity
from headway.config.derived.identity import changed_values
from headway.core.console import notice
from headway.core.coordination.launched import world_size_from_environment
from headway.core.errors import ConfigError
from headway.run.directory.beginning import ParentCheckpoint, begin, find_parent, parent_run
from headway.run.directory.ledger import Ledger
from headway.run.directory.ledger_beginning import Beginning
from headway.run.directory.run_directory import RunDirectory, command_line
from headway.run.session.attempt import RunOptions, check_accepted, check_steps, counted_for


def begin_from(source: Path, config: Config, options: RunOptions) -> RunOptions:
    """Make the run begin from another run's checkpoint, unless it has begun from it already.

    Args:
        source: The other run, whose newest checkpoint counts, or a checkpoint of it.
        config: Resolved config of the run that begins.
        options: What to do about a run directory that exists, and what the user accepts.

    Returns:
        The options for the attempt that follows: a restart has been done.

    Raises:
        ConfigError: The config differs in ways that were not accepted, the run has begun otherwise, or a launcher has
            started several workers, none of which can begin the run alone.
        CheckpointError: There is no such checkpoint, or the run directory cannot be written.
    """
    run = RunDirectory(config.run_directory)
    if world_size_from_environment() is not None:
        raise ConfigError(
            "a run begins from another one before its workers start, and a launcher has started them already",
            where="--from",
            fix=f"headway checkpoints restore {run.path} --from {source}, then the same command without --from",
        )
    if run.has_begun() and not options.restart:
        _check_same(run, source)
        return options
    parent = check_beginning(source, config, options)
    if options.restart and (moved := run.archive()) is not None:
        notice(f"the earlier run is kept in {moved}")
    begun = begin(run, parent, command_line())
    notice(f"{run.path} begins from step {begun.step:,} of {_named(begun)}")
    return replace(options, restart=False)


def check_beginning(source: Path, config: Config, options: RunOptions) -> ParentCheckpoint:
    """Return the checkpoint from which a run would begin, after the checks that need nothing but the two configs.

    Raises:
        ConfigError: The config differs in ways that were not accepted, or the checkpoint has more steps than it wants.
        CheckpointError: There is no such checkpoint.
    """
    parent = find_parent(source)
    config = counted_for(config, parent.config, parent.step)
    before = identity(parent.config)
    after = identity(config)
    # What a config leaves open is filled in later, and compared again then.
    left_open = {key: before[key] for key, value in after.items() if value in (None, "auto") and key in before}
    check_accepted(changed_values(before, {**after, **left_open}), options, parent.folder)
    check_steps(config, parent.step, parent.folder, "begin from an earlier step")
    return parent


def _check_same(run: RunDirectory, source: Path) -> None:
    """Check that a run that has begun did so from the checkpoint that the user names.

    Raises:
        ConfigError: It did not.
    """
    begun = Ledger(run.ledger_path).beginnings()
    if begun and _is_of(begun[-1], source):
        return
    how = f"from step {begun[-1].step:,} of {_named(begun[-1])}" if begun else "at step 0"
    raise ConfigError(
        f"this run has begun {how}, not from {source}",
        where=str(run.path),
        fix="choose another name=..., leave out --from to continue it, or move it aside with --restart",
    )


def _is_of(begun: Beginning, source: Path) -> bool:
    """Return whether a source names the run, and the checkpoint if it names one, of a beginning.

    The other run may be gone by now; then its place counts.
    """
    place = source.absolute()
    step = step_of(place.name)
    other = place if step is None else place.parent.parent
    if step not in (None, begun.step):
        return False
    there = parent_run(other)
    known = None if there is None else read_run_id(there.path)
    return begun.place == str(other) if known is None else known == begun.run.get("id")


def _named(begun: Beginning) -> str:
    record = run_record(begun.run)
    return begun.place if record is None else in_words(record)
