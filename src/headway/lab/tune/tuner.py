"""A study at work: trials are started, judged at their steps, ended, and started again after a kill."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.core.console import notice, warning
from headway.core.errors import BudgetReached, ConfigError, HeadwayError, Preempted
from headway.core.format import format_usd
from headway.core.process.command import module_command
from headway.lab.tune.journal import INFEASIBLE, PAUSED, REASON, Journal, State, TrialRecord
from headway.lab.tune.scheduler import Scheduler, verdict_of
from headway.lab.tune.study import BASE_FILE, STOP_FILE, Study, record_line
from headway.lab.tune.trial_run import Ending, HeldCommand, TrialRun, error_in, remove_checkpoints
from headway.run.directory.account import account_of
from headway.telemetry.record import Run, is_run
from headway.telemetry.summary import loss_text

#: How often the trials are looked at.
_LOOK_SECONDS = 0.2
#: How often a run that was killed is started again without having done a step.
_MOST_RESTARTS = 3
#: How long machines are needed after a decision to stop: until the board is read, and for a save.
_RESERVE_SECONDS = 15.0
#: Trials in a row that end in an error, after which the study ends: something is wrong with all of them.
_MOST_FAILURES = 5
#: Trials that are infeasible, after which the study ends if there was no other one.
_MOST_INFEASIBLE = 10
#: Endings that the record of a run shows, whoever started it.
_ENDED = ("complete", "diverged", "budget", "failed", "cancelled")


@dataclass
class Progress:
    """How far a study is, for those who watch."""

    running: dict[int, TrialRun] = field(default_factory=dict)
    spent: dict[int, float] = field(default_factory=dict)
    """Dollars by trial that has ended."""
    seconds: dict[int, float] = field(default_factory=dict)
    """How long a trial ran that has ended here."""

    @property
    def spent_usd(self) -> float:
        """What all trials have spent."""
        return sum(self.spent.values()) + sum(one.spent_usd for one in self.running.values())

    @property
    def usd_per_hour(self) -> float:
        """The price of all machines that run trials now."""
        return sum(one.usd_per_hour for one in self.running.values())


class Tuner:
    """Works on a study until its trials are done.

    Args:
        study: The study, claimed.
        journal: Its journal.
        scheduler: Its decisions.
        watch: Called several times a second.
        device_count: GPUs of this machine that trials share; 0 if there are none, or trials are launched elsewhere.
    """

    def __init__(
        self,
        study: Study,
        journal: Journal,
        scheduler: Scheduler,
        *,
        watch: Callable[[Progress], None] = lambda _: None,
        device_count: int = 0,
    ) -> None:
        self._study = study
        self._journal = journal
        self._scheduler = scheduler
        self._watch = watch
        self._device_count = device_count
        self.progress = Progress()
        self._waiting: list[TrialRecord] = []
        self._preparing: tuple[TrialRecord, list[str], HeldCommand] | None = None
        self._prepared = set[str]()
        self._stop: HeadwayError | None = None

    def run(self) -> None:
        """Work until all trials have ended.

        Raises:
            BudgetReached: the study's budget is spent; trials are paused.
            Preempted: somebody asked to stop; trials are paused.
            HeadwayError: several trials in a row ended in an error.
        """
        self._resume()
        while True:
            if self._stop is None:
                self._stop = self._reason_to_stop()
            if self._stop is None:
                self._fill()
                if not (self.progress.running or self._preparing or self._stop):
                    return  # whatever has ended, nothing more is proposed
            elif not self.progress.running:
                if self._preparing is not None:
                    self._preparing[2].terminate()
                raise self._stop
            for trial in list(self.progress.running.values()):
                self._look(trial)
            self._watch(self.progress)
            time.sleep(_LOOK_SECONDS)

    def stop(self, why: str) -> None:
        """Have all trials paused; `run` then ends."""
        if self._stop is None:
            self._stop = Preempted(
                f"{why}; trials that ran are saved", where=str(self._study.folder), fix="run the same command again"
            )

    def _resume(self) -> None:
        """Take up the trials that have not ended; those whose command still runs are watched, the others continue."""
        (self._study.folder / STOP_FILE).unlink(missing_ok=True)  # a request that came after the end of a study
        self._journal.recover()
        for record in self._journal.records:
            run = self._study.run_of(record.number)
            if record.has_ended:
                self.progress.spent[record.number] = _spent(run)
                continue
            trial = self._trial(record.number)
            # What has ended while nothing watched is settled by its record, without being started again.
            if trial.command.runs or (is_run(run) and self._ending(trial, record).kind in _ENDED):
                self.progress.running[record.number] = trial
            else:
                self._waiting.append(record)
        self._remove_checkpoints()

    def _reason_to_stop(self) -> HeadwayError | None:
        request = self._study.folder / STOP_FILE
        if request.exists():
            request.unlink(missing_ok=True)
            self.stop("stopped by headway tune stop")
            return self._stop
        budget = self._study.settings.budget.usd
        spent = self.progress.spent_usd
        if budget is not None and spent + self.progress.usd_per_hour * _RESERVE_SECONDS / 3600 >= budget:
            return BudgetReached(
                f"the trials have spent {format_usd(spent)} of the study's budget of {format_usd(budget)}",
                where=str(self._study.folder),
                fix="run the same command again with a larger --budget",
            )
        return None

    # Starting ---------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start trials until as many run as may."""
        while self._stop is None and (self._preparing is None or not self._preparing[2].runs):
            if self._preparing is not None:
                self._finish_preparing(*self._preparing)
                continue
            if len(self.progress.running) >= self._study.settings.at_a_time:
                return
            record = self._waiting.pop(0) if self._waiting else self._scheduler.propose()
            if record is None:
                return
            self._begin(record)

    def _begin(self, record: TrialRecord) -> None:
        """Start a trial, after its store is prepared; what has been decided about it before a kill is carried out."""
        if verdict_of(record) is not None:
            self._settle(self._trial(record.number), Ending("interrupted"))
            return
        words = self._words_of(record)
        if words is None:
            return
        store = next((word for word in words if word.startswith("data.store=")), None)
        if store is None or store in self._prepared or is_run(self._study.run_of(record.number)):
            self._start(record, words)
            return
        command = HeldCommand(self._study.folder / ".prepare.lock")
        words_of_data = module_command("headway", "data", "prepare", str(self._base), *words)
        command.start(words_of_data, self._study.log_of(record.number), self._study.started_in, {})
        self._preparing = (record, words, command)

    def _words_of(self, record: TrialRecord) -> list[str] | None:
        """Return a trial's overrides; None if its config is refused, which ends it."""
        try:
            return self._study.words_of(record.values, record.number)
        except ConfigError as error:
            self._end(record, Ending("infeasible", error.what))
            return None

    def _finish_preparing(self, record: TrialRecord, words: list[str], command: HeldCommand) -> None:
        self._preparing = None
        if command.code in (0, None):  # of another process: the run itself prepares what is missing
            self._prepared.add(next(word for word in words if word.startswith("data.store=")))
            self._start(record, words)
            return
        why = error_in(self._study.log_of(record.number))
        self._end(record, Ending("infeasible" if command.code == ConfigError.exit_code else "failed", why))

    def _start(self, record: TrialRecord, words: Sequence[str]) -> None:
        trial = self._trial(record.number)
        if record.notes.get(PAUSED):
            self._journal.note(record.number, PAUSED, False)
        if not is_run(trial.path):
            notice(f"trial {record.number}: {record_line(record)}")
        else:
            notice(f"trial {record.number} continues")
        words = [*words, *self._scheduler.words(record)]
        log = self._study.log_of(record.number)
        trial.start(self._base, words, log, self._study.started_in, self._devices(record.number))
        self.progress.running[record.number] = trial

    def _devices(self, number: int) -> str | None:
        """Return the GPUs of a trial, those that no trial that runs has."""
        if not self._device_count:
            return None
        workers = self._study.base.parallel.workers
        kept = {one: self._journal.record(one).notes.get("devices") for one in (*self.progress.running, number)}
        taken = {device for one, devices in kept.items() if one != number for device in devices or ()}
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = given.split(",") if given else [str(index) for index in range(self._device_count)]
        chosen = [name for name in names if name not in taken][:workers]
        self._journal.note(number, "devices", chosen)
        return ",".join(chosen)

    def _trial(self, number: int) -> TrialRun:
        return TrialRun(number, self._study.run_of(number), self._study.settings.launcher)

    @property
    def _base(self) -> Path:
        return (self._study.folder / BASE_FILE).absolute()

    # Looking ----------------------------------------------------------------------------------------------------------

    def _look(self, trial: TrialRun) -> None:
        """Judge what a trial has recorded, and settle it if its command has ended."""
        runs = trial.command.runs  # first: what it has recorded is complete if it does not
        if trial.history.refresh():
            self._judge(trial)
        verdict = verdict_of(self._journal.record(trial.number))
        if not runs:
            self._settle(trial, self._ending(trial, self._journal.record(trial.number)))
        elif verdict is not None:
            trial.give_up(f"{verdict[0]} at step {verdict[1]:,}")
        elif self._stop is not None:
            if not self._journal.record(trial.number).notes.get(PAUSED):
                self._journal.note(trial.number, PAUSED, True)
            trial.pause("the study is stopped")

    def _ending(self, trial: TrialRun, record: TrialRecord) -> Ending:
        """Return how a trial's command has ended; a job that this study has cancelled was only interrupted."""
        found = trial.ending(self._study.log_of(trial.number))
        return Ending("interrupted") if found.kind == "cancelled" and record.notes.get(PAUSED) else found

    def _judge(self, trial: TrialRun) -> None:
        """Judge a trial at each threshold that it has passed, by its first value from there on: later ones, which
        depend on when this process looks, change nothing."""
        record = self._journal.record(trial.number)
        objectives = self._study.settings.objective
        if verdict_of(record) is not None or len(objectives) > 1:
            return
        steps, values = trial.history.metrics.series(objectives[0].metric)
        recorded = list(zip(steps.tolist(), values.tolist(), strict=True))
        for step, value in due(recorded, self._scheduler.thresholds(trial.total_steps), trial.total_steps):
            verdict = "continue" if step in record.reports else self._scheduler.judge(trial.number, step, value)
            if verdict != "continue":
                notice(f"trial {trial.number}: {verdict} at step {step:,} ({loss_text(value)})")
                return

    def _settle(self, trial: TrialRun, ending: Ending) -> None:
        """End a trial whose command has ended, or start it again."""
        self.progress.running.pop(trial.number, None)
        record = self._journal.record(trial.number)
        verdict = verdict_of(record)
        if verdict is None and ending.kind == "interrupted":
            self._again(trial, record, ending)
            return
        self.progress.spent[trial.number] = _spent(trial.path)
        self.progress.seconds[trial.number] = time.time() - trial.began
        if verdict is None:
            self._end(record, ending)
        elif verdict[0] == "prune":
            self._journal.end(trial.number, "pruned")
        else:
            self._journal.end(trial.number, "complete", [record.reports[verdict[1]]])
        self._remove_checkpoints()

    def _again(self, trial: TrialRun, record: TrialRecord, ending: Ending) -> None:
        """Continue a run that was killed or preempted, unless it does so again and again without a step."""
        if self._stop is not None:
            return
        is_new = trial.history.metrics.last_step > trial.step_at_start
        restarts = 0 if is_new else trial.restarts + 1
        if restarts > _MOST_RESTARTS:
            why = f"{ending.why or 'it was interrupted'}, {restarts} times without a step"
            self._end(record, Ending("failed", why))
            return
        words = self._words_of(record)
        if words is not None:
            self._start(record, words)
            self.progress.running[trial.number].restarts = restarts

    def _end(self, record: TrialRecord, ending: Ending) -> None:
        """Write the end of a trial that no verdict has stopped."""
        state, objectives = self._value(record.number, ending)
        if ending.why:
            self._journal.note(record.number, REASON, ending.why[:500])
        if ending.kind not in ("complete", "failed", "cancelled"):
            self._journal.note(record.number, INFEASIBLE if ending.kind == "infeasible" else "ended", ending.kind)
        ended = self._journal.end(record.number, state, objectives)
        self._report(ended, ending)

    def _value(self, number: int, ending: Ending) -> tuple[State, list[float] | None]:
        """Return state and objectives: the recorded ones, and the worst number of a run that diverged."""
        settings = self._study.settings
        if ending.kind == "infeasible":
            return "infeasible", None
        if ending.kind in ("failed", "cancelled"):
            return "failed", None
        if ending.kind == "diverged":
            return "complete", [one.worst for one in settings.objective]
        trial = self._trial(number)
        trial.history.refresh()
        found = [one.value_in(trial.history.metrics.series(one.metric)[1].tolist()) for one in settings.objective]
        if ending.kind == "budget":  # the run's own: its last value is its value
            return "complete", [
                one.worst if value is None else value for one, value in zip(settings.objective, found, strict=True)
            ]
        missing = [one.metric for one, value in zip(settings.objective, found, strict=True) if value is None]
        if missing:
            self._journal.note(number, REASON, f"it has not recorded {', '.join(missing)}")
            return "failed", None
        return "complete", [value for value in found if value is not None]

    def _report(self, record: TrialRecord, ending: Ending) -> None:
        if record.state == "complete":
            values = ", ".join(map(loss_text, record.objectives or ()))
            notice(f"trial {record.number}: {ending.kind}, {values}")
        elif record.state == "infeasible":
            notice(f"trial {record.number}: infeasible: {ending.why}")
        else:
            warning(f"trial {record.number} has failed: {record.notes.get(REASON, '')}")
        self._stop = self._stop or self._hopeless(record)

    def _hopeless(self, record: TrialRecord) -> HeadwayError | None:
        """Return the error of a study whose trials all end in the same way, without a value."""
        ended = [one.state for one in self._journal.records if one.has_ended]
        why = record.notes.get(REASON, "")
        log = str(self._study.log_of(record.number))
        fix = "correct the config or the space, and begin with another --dir"
        if ended[-_MOST_FAILURES:] == ["failed"] * _MOST_FAILURES:
            return HeadwayError(
                f"{_MOST_FAILURES} trials in a row have failed, the last one: {why}", where=log, fix=fix
            )
        if len(ended) == _MOST_INFEASIBLE and set(ended) == {"infeasible"}:
            what = f"the first {_MOST_INFEASIBLE} trials are infeasible, the last one: {why}"
            return ConfigError(what, where=log, fix=fix)
        return None

    def _remove_checkpoints(self) -> None:
        """Remove the checkpoints of trials that have ended and are not among those that are kept."""
        kept = self._scheduler.kept()
        for record in self._journal.records:
            if record.has_ended and record.number not in kept:
                remove_checkpoints(self._study.run_of(record.number))


def due(recorded: Sequence[tuple[int, float]], thresholds: Sequence[int], total: int) -> Iterator[tuple[int, float]]:
    """Yield the values by which a trial is judged, by rising step: the first one from each threshold on, each once.

    Args:
        recorded: Step and value of the objective, by rising step.
        thresholds: Steps, rising.
        total: Steps of the whole trial, after which nothing is left to judge.
    """
    last = 0
    for threshold in thresholds:
        found = next(((step, value) for step, value in recorded if step >= threshold), None)
        if found is not None and last < found[0] < total:
            last = found[0]
            yield found


def _spent(run: Path) -> float:
    """Return what a run has spent, as far as a price is known."""
    found = account_of(Run(run)) if is_run(run) else None
    return found.total_usd if found is not None else 0.0
