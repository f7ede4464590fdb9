"""Stopping a study: by a request to the process that works on it, or, without one, of the trials that still run."""

from __future__ import annotations

from headway.core.format import counted
from headway.lab.tune.study import STOP_FILE, Study
from headway.lab.tune.trial_run import TrialRun


def stop_study(study: Study) -> str:
    """Ask that a study stop, and return what was asked of whom.

    Raises:
        OSError: the request cannot be written.
    """
    if study.is_worked_on:
        (study.folder / STOP_FILE).touch()
        return f"{study.folder} was asked to stop; its trials are saved first"
    found = [
        TrialRun(one.number, study.run_of(one.number), study.settings.launcher)
        for one in study.open_journal().records
        if not one.has_ended
    ]
    running = [trial for trial in found if trial.command.runs]
    for trial in running:
        trial.pause("the study is stopped")
    return f"no process works on {study.folder}; {counted(len(running), 'trial')} asked to save and stop"
