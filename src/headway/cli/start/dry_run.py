"""`headway train --dry-run`: everything is checked, and what would run is printed. It loads PyTorch."""

from __future__ import annotations

from pathlib import Path

from headway.api.start.preview import preview
from headway.config import Config
from headway.core.console import print_line, print_lines
from headway.data.epochs import in_steps
from headway.run.session.attempt import RunOptions
from headway.run.session.begin_from import check_beginning


def show_run(config: Config, source: Path | None, *, restart: bool, accept_changes: bool, start_epoch: bool) -> None:
    """Check a run, and print what it would be.

    Args:
        config: Resolved.
        source: The run or the checkpoint from which it would begin.
    """
    options = RunOptions(restart, accept_changes, start_epoch)
    print_lines(preview(in_steps(config), options))
    if source is not None:
        parent = check_beginning(source, in_steps(config), options)
        print_line(f"the run would begin from step {parent.step:,}: {parent.folder}")
