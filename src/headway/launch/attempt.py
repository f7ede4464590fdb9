"""The beginning and the end of an attempt, in the process that owns it."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from headway.config import Config, changes, dump_config, identity, load_resolved
from headway.core.console import notice, warning
from headway.core.errors import ConfigError, HeadwayError, Preempted
from headway.core.files import atomic_write, fingerprint, write_json
from headway.core.signals import handled, held
from headway.supervise.run_directory import Attempt, RunDirectory
from headway.telemetry.provenance import provenance

#: Set by the local launcher for its workers: the number of the attempt that it owns.
ATTEMPT_VARIABLE = "HEADWAY_ATTEMPT"


@dataclass(frozen=True)
class Wishes:
    """What to do about a run directory that is already there."""

    restart: bool = False
    """Move it aside and start from step 0."""
    accept_changes: bool = False
    """Go on although the config now says something else about the mathematics."""


def _begin(config: Config, fingerprints: Mapping[str, str], facts: Mapping[str, Any], wishes: Wishes) -> Attempt:
    """Take ownership of the run directory and write down what is about to run."""
    run = RunDirectory(config.run_directory)
    # When torchrun starts its workers once more, the wish has been granted before.
    if wishes.restart and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        moved = run.archive()
        if moved:
            notice(f"the earlier run is kept in {moved}")
    _refuse_changes(run, config, wishes)
    attempt = run.begin_attempt(" ".join(sys.argv))
    try:
        record = provenance(
            command=sys.argv,
            config_fingerprint=fingerprint(identity(config)),
            fingerprints=fingerprints,
            model=facts,
        )
        for folder in (run.path, attempt.directory):
            with atomic_write(folder / "config.yaml", "w") as file:
                file.write(dump_config(config))
            write_json(folder / "run.json", record)
    except BaseException as error:
        attempt.finish(f"failed to start: {error}", getattr(error, "exit_code", 1))
        raise
    return attempt


@contextmanager
def preemptible() -> Iterator[None]:
    """Turn a signal to stop that comes outside the training loop into `Preempted`; the loop has handlers of its own.

    A worker among others keeps the default, which also ends it while it waits for them.
    """
    if "WORLD_SIZE" in os.environ:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise Preempted(f"stopped by {name} while no step was under way", fix="run the same command again")

    with handled((signal.SIGTERM, signal.SIGUSR1), stop):
        yield


@contextmanager
def own_attempt(
    config: Config, fingerprints: Mapping[str, str], facts: Mapping[str, Any], wishes: Wishes
) -> Iterator[Attempt]:
    """Begin an attempt, and record why it ended, whatever the way it ended.

    Args:
        fingerprints: Of the data and the tokenizer.
        facts: On the model: its parameters and vocabulary.

    Raises:
        CheckpointError: the directory is in use, or is not a run.
        ConfigError: the run there was made by another config.
    """
    with ExitStack() as stack:
        with held():  # a signal between the two would end an attempt that nobody concludes
            attempt = _begin(config, fingerprints, facts, wishes)
            stack.enter_context(_concluding(attempt))
        yield attempt


@contextmanager
def _concluding(attempt: Attempt) -> Iterator[None]:
    try:
        yield
    except HeadwayError as error:
        attempt.finish("preempted" if error.exit_code == 75 else error.what, error.exit_code)
        raise
    except BaseException as error:
        with suppress(OSError):  # a full disk must not hide what went wrong
            (attempt.directory / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
        attempt.finish(f"crashed: {type(error).__name__}: {error}", 1)
        raise
    attempt.finish("finished", 0)


def _refuse_changes(run: RunDirectory, config: Config, wishes: Wishes) -> None:
    """A run goes on with the mathematics it began with, unless its owner says otherwise."""
    if not run.config_path.exists():
        return
    differences = changes(load_resolved(run.config_path), config)
    if differences and not wishes.accept_changes:
        raise ConfigError(
            "the config differs from the one this run was made with: " + "; ".join(differences),
            where=str(run.config_path),
            fix="choose another name=..., or go on with the new values with --accept-changes",
        )
    for difference in differences:
        warning(f"the run goes on with a changed config: {difference}")
