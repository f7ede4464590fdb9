"""The output of `headway train --dry-run`, also where the token store is still to be prepared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headway.api.start.checks import UnpreparedRun, examine_unprepared
from headway.config import Config
from headway.core.format import counted, format_bytes, format_count, printable
from headway.core.user_command import suggest
from headway.data.epochs import in_steps
from headway.run.session.attempt import RunOptions
from headway.run.session.begin_from import check_beginning
from headway.run.session.precision import with_precision
from headway.run.session.preview import model_line, run_state, warn_of_machine, workers_lines
from headway.run.session.preview import preview as preview_prepared
from headway.tracking.sinks import check_trackers


def describe_dry_run(
    config: Config,
    *,
    restart: bool = False,
    accept_changes: bool = False,
    start_epoch: bool = False,
    begin_from: Path | None = None,
) -> Iterator[str]:
    """Check what `headway.train` would do with the same arguments, and yield a description of the run in parts.

    Raises:
        HeadwayError: the error that would have stopped the run.
    """
    options = RunOptions(restart, accept_changes, start_epoch)
    yield preview(in_steps(config), options)
    if begin_from is not None:
        parent = check_beginning(begin_from, in_steps(config), options)
        yield f"the run would begin from step {parent.step:,}: {printable(str(parent.folder))}"


def preview(config: Config, options: RunOptions) -> str:
    """Check a resolved config against this machine and its data, and describe the run in a few lines.

    Args:
        config: Resolved.
        options: What to do about an earlier run of this name.

    Raises:
        HeadwayError: the error that would have stopped the run.
    """
    complete = with_precision(config, restart=options.restart)
    unprepared = examine_unprepared(complete, options) if config.task is None else None
    if unprepared is not None:
        return _preview_unprepared(unprepared, options)
    check_trackers(config.track)
    return preview_prepared(config, options)


def _preview_unprepared(run: UnpreparedRun, options: RunOptions) -> str:
    """Describe a run whose store would be prepared first; its number of rows is not known yet."""
    config = run.config
    train = run.config.train
    assert train.steps is not None, "the config is resolved"
    warn_of_machine(config, run.mesh.size)
    files = [file for source in run.sources for file in source.files]
    size = format_bytes(sum(file.bytes for file in files))
    read = f" from {counted(len(files), 'file')}, {size}" if files else ""
    tokens = format_count(train.batches.tokens_before(train.steps))
    return "\n".join(
        [
            *run_state(config, options),
            model_line(config.model, train),
            f"data       {config.data.store}: would be prepared{read}, since {run.why}",
            f"           {suggest('data prepare')} prepares it without training",
            f"training   {train.batches.sum_in_words(train.steps)}: {tokens} tokens",
            *workers_lines(config, run.mesh, run.grid),
        ]
    )
