"""An attempt in the run directory: its beginning, what is reported meanwhile, and its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.core.console import alert, clear_line, notice
from headway.core.coordination.outcomes import BUDGET_REACHED, CANCELLED, FINISHED, PREEMPTED
from headway.core.errors import INTERRUPTED, CheckpointError, fix_for
from headway.core.machine.system import host_name
from headway.run.directory.ownership import OwnerLock
from headway.run.directory.run_directory import IDENTITY_KEY, RESTARTS_KEY, Attempt, RunDirectory, command_line
from headway.run.session.attempt import (
    RunOptions,
    note_restart,
    prepare_run_directory,
    price_facts,
    write_config,
)
from headway.run.supervisor.log import SupervisorLog
from headway.run.supervisor.machines.attempt_machines import AttemptMachines
from headway.run.supervisor.restart_policy import AttemptOutcome, Decision

#: Kinds of outcomes whose record is a word that `telemetry.record` knows; others are recorded by what happened.
_OUTCOMES = {"finished": FINISHED, "preempted": PREEMPTED, "budget": BUDGET_REACHED, "cancelled": CANCELLED}


class AttemptJournal:
    """Takes the run directory for an attempt, and records what becomes of the attempt.

    Args:
        options: What to do about a run directory that exists.
        machines: The other machines that take part.
        lock: That of the attempt before, by which this command owns the run directory; None before the first.
        restarts: Earlier attempts of this command.
        on_begin: Called when the attempt's folder exists.
    """

    def __init__(
        self,
        options: RunOptions,
        machines: AttemptMachines,
        *,
        lock: OwnerLock | None = None,
        restarts: int = 0,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._machines = machines
        self._on_begin = on_begin
        self.lock = lock
        self.restarts = restarts
        self.attempt: Attempt | None = None
        """None until it has begun."""
        self.facts: dict[str, Any] = {}
        """More for the attempt's record."""
        self._log: SupervisorLog | None = None

    def begin(self, config: Config, started: float | None = None) -> Attempt:
        """Take the run directory: from here on, processes of earlier attempts cannot publish anything."""
        if self.lock is None:
            run = prepare_run_directory(config, self._options)
            self.lock = run.claim()
        else:
            run = RunDirectory(config.run_directory)
        facts: dict[str, Any] = {
            "workers": config.parallel.all_workers,
            RESTARTS_KEY: self.restarts,
            **price_facts(config),
        }
        if config.parallel.machines > 1:
            facts["machines"] = [host_name(), *(member.host for member in self._machines.members)]
        if self._machines.identity is not None:
            facts[IDENTITY_KEY] = self._machines.identity
        self.attempt = run.begin_attempt(command_line(), self.lock, started, **facts)
        self._log = SupervisorLog(self.attempt.directory / "supervisor.log")
        self._on_begin()
        note_restart(run.path, config, self._options)
        return self.attempt

    def begin_again(self, config: Config) -> None:
        """Begin a further attempt, whose record repeats what the one before has established."""
        attempt = self.begin(config)
        has_config = (attempt.run / "config.yaml").exists()
        try:
            write_config(config, attempt.directory, *(() if has_config else (attempt.run,)))
        except OSError as error:
            why = f"the config cannot be written: {error.strerror or error}"
            attempt.finish(f"failed to start: {why}", CheckpointError.exit_code)
            where = str(error.filename or attempt.directory)
            fix = fix_for(error, "make room there; then run the same command again")
            raise CheckpointError(why, where=where, fix=fix) from error
        with suppress(OSError):  # absent if the attempt before ended while it began; informative only
            shutil.copy(attempt.run / "run.json", attempt.directory)

    def say(self, text: str) -> None:
        """Report something to people, and in the supervisor's log."""
        clear_line()
        notice(text)  # first, because an alert may follow it
        if self._log is not None:
            self._log.write(text)

    def warn(self, rank: int, what: str, text: str) -> None:
        """Report something about a worker, and record it.

        Args:
            rank: The worker.
            what: What is recorded.
            text: What is reported.
        """
        self.say(f"warning: {text}")
        self.facts.setdefault("warnings", []).append({"rank": rank, "what": what})

    def renew_lease(self) -> None:
        """Show that this run lives."""
        if self.lock is not None:
            self.lock.renew()

    def finish(self, outcome: AttemptOutcome, decision: Decision, more: Mapping[str, Any]) -> None:
        """Record why the attempt ended, and report it when the run continues.

        Args:
            outcome: Why it ended.
            decision: What follows.
            more: Further facts for the record.
        """
        if self.attempt is None:
            return
        if decision.continues:
            after = f" in {decision.delay_seconds:.0f} s" if decision.delay_seconds else ""
            self.say(
                f"attempt {self.attempt.number} ended: {outcome.what} ({decision.why});"
                f" the next one begins{after}, from the newest checkpoint"
            )
        if outcome.kind not in _OUTCOMES and outcome.exit_code != INTERRUPTED:
            alert(f"attempt {self.attempt.number} ended: {outcome.what} ({decision.why})")
        with suppress(OSError):  # on a broken disk the files stay
            _remove_leftovers(self.attempt.directory)
        facts = {**outcome.record(), **self.facts, "decision": decision.why, **more}
        self.attempt.finish(_OUTCOMES.get(outcome.kind, outcome.what), outcome.exit_code, **facts)


def _remove_leftovers(folder: Path) -> None:
    """Remove files without a further use: links to heartbeat pages, and empty stacks."""
    for path in folder.glob("heartbeat-*"):
        path.unlink()
    for path in folder.glob("stack-*.txt"):
        if not path.stat().st_size:
            path.unlink()
