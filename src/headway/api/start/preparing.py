"""The preparation of a run's token store, when the run begins."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

from headway.config import Config, dump_config
from headway.core.console import notice
from headway.core.files.scratch import scratch_folder
from headway.core.process.command import module_command
from headway.data.replacing import released
from headway.run.session.attempt import RunOptions
from headway.run.session.preparation import why_prepare
from headway.tracking.sinks import check_trackers


def prepare_if_needed(config: Config, options: RunOptions, own_process: bool) -> None:
    """Prepare the token store of a run if it is missing, or is not what the config says (`why_prepare`).

    Everything that can be checked without it is checked first, so that nothing is prepared for a mistake.

    Args:
        config: Resolved.
        options: What to do about an earlier run of this name.
        own_process: This process does nothing else; otherwise it prepares alone, since other processes would need a
            `__main__` guard in the user's script.

    Raises:
        HeadwayError: as `why_prepare` and `prepare`.
    """
    why = None if config.task is not None else why_prepare(config, options)
    if why is None:
        check_trackers(config.track)  # otherwise they are among what is checked before preparation
        return
    if own_process:
        _check_in_a_process(config, options)
    else:
        from headway.api.start.checks import examine_unprepared  # loads PyTorch

        examine_unprepared(config, options)
    paths = ", ".join(source.path for source in config.data.sources)
    notice(f"preparing {config.data.store} from {paths}: {why}")
    with released(config.data.store, config.run_directory) if options.restart else nullcontext():
        if own_process:
            _prepare_in_a_process(config)
            return
        from headway.text.preparing.prepare import prepare

        notice(prepare(config.data, workers=1, run=config.run_directory).describe())


def _prepare_in_a_process(config: Config) -> None:
    """Prepare in a separate process: the threads of tokenizers would stay, and attempts are copies of this process.

    Raises:
        SystemExit: it failed, with its exit code.
    """
    with scratch_folder("headway-prepare-") as folder:
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        command = module_command("headway", "data", "prepare", str(folder / "config.yaml"))
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if code:
        raise SystemExit(code)  # that process has reported the reason


def _check_in_a_process(config: Config, options: RunOptions) -> None:
    """Make a dry run in a separate process: the checks load PyTorch, and attempts are copies of this process.

    Raises:
        SystemExit: it found a problem, with its exit code.
    """
    flags = {
        "--restart": options.restart,
        "--accept-changes": options.accept_changes,
        "--start-epoch": options.start_epoch,
    }
    with scratch_folder("headway-check-") as folder:
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        wanted = [flag for flag, is_set in flags.items() if is_set]
        command = module_command("headway", "train", str(folder / "config.yaml"), "--dry-run", *wanted)
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(done.returncode)
