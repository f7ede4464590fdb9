"""Stopping a study: by a request to the process that works on it, or, without one, of the trials that still run."""

from __future__ import annotations

from headway.core.format import counted
from headway.lab.tune.journal import PAUSED
from headway.lab.tune.study import STOP_FILE, Study
from headway.lab.tune.trial_run import TrialRun


def stop_study(study: Study) -> str:
    """Ask that a study stop, and return what was asked of whom.

    Raises:
        OSError: the request cannot be written.
        CheckpointError: another process has begun to work on it meanwhile.
    """
    if study.is_worked_on:
        (study.folder / STOP_FILE).touch()
        return f"{study.folder} was asked to stop; its trials are saved first"
    paused = 0
    with study.claimed():
        journal = study.open_journal()
        for record in journal.records:
            trial = TrialRun(record.number, study.run_of(record.number), study.settings.launcher)
            if not record.has_ended and trial.command.runs:
                journal.note(record.number, PAUSED, True)
                trial.pause("the study is stopped")
                paused += 1
    return f"no process works on {study.folder}; {counted(paused, 'trial')} asked to save and stop"
