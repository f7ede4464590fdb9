"""How a run has ended, for a machine that misses the others: by its launch, its directory or its remote tier.

A machine that comes late, as after an eviction, waits for a lead that has ended. The lead of a finished run that is
started again waits for machines that know that it is finished. Both ask here.
"""

from __future__ import annotations

import math
import time

from headway.checkpoint.remote.acquire import find_tier, resolve_identity
from headway.checkpoint.run_identity import run_identity
from headway.checkpoint.store import CheckpointStore
from headway.checkpoint.verify import verify_checkpoint
from headway.config import Config
from headway.core.coordination.launch_code import left_code
from headway.core.coordination.outcomes import FINAL_CODES
from headway.core.errors import INTERRUPTED, HeadwayError, error_with
from headway.core.files.foreign import as_number
from headway.core.process.variables import ONE_THREAD, with_variables
from headway.run.directory.run_directory import IDENTITY_KEY, RunDirectory
from headway.run.session.attempt import are_steps_done, final_step, has_data
from headway.run.supervisor.error_report import WorkerDied
from headway.run.supervisor.machines.messages import RunEnd

#: Of `recorded_end`: errors of any time count, since no lead has come to remove their causes.
ANY_TIME = -math.inf
#: Time between two looks of a machine that waits.
LOOK_AT_RUN_SECONDS = 15.0
#: How long a machine tries to reach the lead before it looks at the run, and at the run's remote tier.
_FIRST_LOOK_SECONDS = 3.0
_TIER_SECONDS = 60.0
#: How long a store may take to answer.
_STORE_SECONDS = 5.0


def recorded_end(config: Config, identity: str, since: float) -> RunEnd | None:
    """Return how a run has ended for good, as its launch or its directory shows it; None if it has not, or is unknown.

    Args:
        config: Resolved, with the values that the user gave.
        identity: Fingerprint of what it says about the mathematics of the run: attempts with another one do not count.
        since: Unix seconds. An earlier error is not final: a later start may have removed its cause.
    """
    if (code := left_code()) is not None:
        return RunEnd(code, f"the lead has ended with exit code {code}", fix="see what it printed")
    try:
        return _end_in_directory(config, identity, since)
    except (OSError, HeadwayError):  # whoever trains reports it
        return None


def _end_in_directory(config: Config, identity: str, since: float) -> RunEnd | None:
    run = RunDirectory(config.run_directory)
    records = run.attempt_records()
    record = records[-1] if records else {}
    if record.get(IDENTITY_KEY) != identity:
        return None
    if are_steps_done(config):
        return RunEnd(0) if _is_last_checkpoint_there(config, run) else None
    code = record.get("exit_code")
    ended = as_number(record.get("ended"))
    if code not in FINAL_CODES or ended is None or ended < since:
        return None
    where, fix = (str(record[key]) if record.get(key) else None for key in ("where", "fix"))
    return RunEnd(code, str(record.get("outcome")), where, fix)


def _is_last_checkpoint_there(config: Config, run: RunDirectory) -> bool:
    folders = CheckpointStore(run.checkpoints).folders()
    return bool(folders) and verify_checkpoint(folders[-1], hashes=False).good


def is_finished_in_tier(config: Config) -> bool:
    """Return whether the last checkpoint of a run is in its remote tier; for a machine that sees no run directory.

    It loads libraries that start threads, so afterwards this process may have to start programs instead of copies.
    """
    remote = config.checkpoint.remote
    if remote is None or RunDirectory(config.run_directory).attempt_records() or not has_data(config):
        return False
    with with_variables(ONE_THREAD):
        from headway.run.session.completed import completed
    try:
        if config.task is None:
            config, _ = completed(config)  # checkpoints know their run by its complete config
        identity = run_identity(config)
        tier = find_tier(remote, identity, patience_seconds=_STORE_SECONDS)
        identity = resolve_identity(tier, identity)
        steps = tier.steps()
        newest = tier.manifest(steps[-1]) if steps else None
    except HeadwayError:  # whoever trains reports it
        return False
    if newest is None or identity.relation(newest) != "own":
        return False
    return newest.step == final_step(config, (newest.step, newest.context))


class EndWithoutLead:
    """Looks for the end of a run whose lead may have left long ago, and never answer.

    Args:
        config: Resolved.
        identity: Fingerprint of what it says about the mathematics of the run.
    """

    def __init__(self, config: Config, identity: str) -> None:
        self._config = config
        self._identity = identity
        self._since = time.time()
        self._look_at = time.monotonic() + _FIRST_LOOK_SECONDS

    def find(self, gone_seconds: float, gives_up: bool) -> RunEnd | None:
        """Return how the run has ended; None if it has not, or if it is too early to look again.

        Args:
            gone_seconds: How long the lead has been gone.
            gives_up: Whether this is the last look, for which an error of any time counts.
        """
        now = time.monotonic()
        if now < self._look_at and not gives_up:
            return None
        self._look_at = now + LOOK_AT_RUN_SECONDS
        end = recorded_end(self._config, self._identity, ANY_TIME if gives_up else self._since)
        if end is None and (gives_up or gone_seconds >= _TIER_SECONDS) and is_finished_in_tier(self._config):
            return RunEnd(0)
        return end


def raise_end(end: RunEnd) -> None:
    """End this command as the lead says that the run has ended.

    Raises:
        HeadwayError: the run ended with an error.
        KeyboardInterrupt: it was interrupted.
    """
    if end.exit_code == 0:
        return
    if end.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    kind = error_with(end.exit_code) or WorkerDied
    error = kind(end.what, where=end.where, fix=end.fix)
    error.exit_code = end.exit_code
    raise error
