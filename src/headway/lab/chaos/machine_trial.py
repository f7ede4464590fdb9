"""Carrying out a campaign with several machines, whose commands are started again as by a scheduler."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from headway.core.coordination.launch_variables import SECRET
from headway.core.coordination.train_command import place, stoppable, train_command
from headway.core.errors import Preempted
from headway.core.files.atomic import append_json_line
from headway.core.files.foreign import read_json_lines
from headway.core.format import format_seconds
from headway.lab.chaos.campaign import Stage
from headway.lab.chaos.machine_plan import MachineFault, MachineTrial
from headway.lab.chaos.machines import Machine
from headway.lab.chaos.trial import LEG_SECONDS, Runs, TrialResult, faults_log, recorded_steps
from headway.telemetry.metrics import read_metrics

_LOOK_SECONDS = 0.1


class MachineRuns(Runs):
    """Runs of one config on several machines.

    Args:
        config: The config file.
        overrides: `key=value` for all runs.
        folder: Folder for runs and logs.
        stages: Stages of every run.
        machines: The machines, the lead first.
        workers: Workers of each.
    """

    def __init__(
        self,
        config: Path,
        overrides: Sequence[str],
        folder: Path,
        stages: Sequence[Stage],
        *,
        machines: Sequence[Machine],
        workers: int,
    ) -> None:
        super().__init__(config, overrides, folder, stages)
        self._machines = machines
        self._workers = workers
        self._variables = {SECRET: secrets.token_hex(32)}

    def carry_out_on_machines(self, trial: MachineTrial, expected: str) -> TrialResult:
        """Run, let things happen to the machines, and compare the result with the undisturbed run.

        Raises:
            HeadwayError: the run does not start.
        """
        name = f"trial-{trial.number:03d}"
        start = time.monotonic()
        run = self._folder / name
        result = TrialResult(trial.number, (len(self._machines) * self._workers,))
        try:
            with stoppable():
                problem = self._disturb(run, trial)
        finally:
            for machine in self._machines:
                machine.end()
                machine.plug()
        if problem:
            result.problems.append(problem)
        self._count_faults(run, result)
        self._judge(run, result, expected)
        result.seconds = time.monotonic() - start
        return result

    def _disturb(self, run: Path, trial: MachineTrial) -> str | None:
        """Carry out the faults of a trial; return a problem with the ends of its commands."""
        planned = deque(trial.faults)
        present = list[tuple[float, MachineFault]]()
        step = -1
        until = time.monotonic() + LEG_SECONDS
        for machine in self._machines:
            self._start(machine, run)
        while time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            for at, fault in list(present):
                if time.monotonic() >= at:
                    present.remove((at, fault))
                    self._undo(fault, run)
            step = max(step, read_metrics(run, newest=True).last_step)
            if planned and step >= planned[0].step and self._can_happen(planned[0], [fault for _, fault in present]):
                fault = planned.popleft()
                append_json_line(
                    faults_log(run), {"time": time.time(), "order": fault.order, "machines": fault.machines}
                )
                self._strike(fault)
                if fault.kind != "stop":
                    present.append((time.monotonic() + fault.seconds, fault))
            codes = [machine.code for machine in self._machines]
            if present or None in codes:
                continue
            if wrong := [code for code in codes if code not in (0, Preempted.exit_code)]:
                return f"a machine's command ended with exit code {wrong[0]}"
            if not any(codes):
                return None
            for machine in self._machines:  # as a scheduler does
                self._start(machine, run)
        return f"was stuck: no end after {format_seconds(LEG_SECONDS)}"

    def _start(self, machine: Machine, run: Path) -> None:
        options = ("--machines", str(len(self._machines)), "--node", str(machine.number), "--lead", machine.lead)
        where = (*place(run.name, self._folder), f"parallel.workers={self._workers}")
        command = train_command(self._config, *self._overrides, *where, *options)
        machine.start(command, self._folder / f"{run.name}.machine-{machine.number}.log", self._variables)

    def _can_happen(self, fault: MachineFault, present: Sequence[MachineFault]) -> bool:
        """Return whether a fault would strike: one that all machines feel is left until all are well again."""
        struck = [self._machines[number] for number in fault.machines]
        if present and (fault.kind == "stop" or len(struck) > 1):
            return False
        if any(number in other.machines for other in present for number in fault.machines):
            return False
        if any(machine.code is not None for machine in struck):
            return False
        return fault.kind != "stop" or struck[0].answers_signals

    def _strike(self, fault: MachineFault) -> None:
        for machine in (self._machines[number] for number in fault.machines):
            if fault.kind == "kill":
                machine.kill()
            elif fault.kind == "freeze":
                machine.freeze()
            elif fault.kind == "stop":
                machine.terminate()
            else:
                machine.cut(fault.kind)

    def _undo(self, fault: MachineFault, run: Path) -> None:
        for machine in (self._machines[number] for number in fault.machines):
            if fault.kind == "kill":
                self._start(machine, run)
            elif fault.kind == "freeze":
                machine.thaw()
            else:
                machine.plug()

    def _count_faults(self, run: Path, result: TrialResult) -> None:
        """Count the faults, and measure how long it took from each to a step of a later attempt."""
        steps = recorded_steps(run)
        faults = list(read_json_lines(faults_log(run)))
        ends = [*(float(fault["time"]) for fault in faults[1:]), float("inf")]
        for fault, end in zip(faults, ends, strict=True):
            moment = float(fault["time"])
            result.kills[fault["order"]] += 1
            before = max((record["attempt"] for record in steps if record["time"] <= moment), default=0)
            later = (record["time"] for record in steps if moment < record["time"] < end and record["attempt"] > before)
            if (after := next(later, None)) is not None:
                result.recovery_seconds.append(after - moment)
                result.recoveries_by_kind.setdefault(fault["order"], []).append(after - moment)
