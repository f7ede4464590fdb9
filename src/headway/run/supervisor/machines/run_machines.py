"""The machines of a run from its first attempt to its last: who takes part in each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from headway.config import Config, usable_machines
from headway.core.console import notice, warning
from headway.core.errors import ConfigError, HeadwayError, Preempted
from headway.core.format import format_seconds
from headway.core.process.signals import STOP_SIGNALS, handled
from headway.core.version import __version__
from headway.run.supervisor.machines.attempt_machines import AttemptMachines
from headway.run.supervisor.machines.differences import compare_machines, describe_machine, name_differences
from headway.run.supervisor.machines.ending import ANY_TIME, LOOK_AT_RUN_SECONDS, is_finished_in_tier, recorded_end
from headway.run.supervisor.machines.lead import Lead
from headway.run.supervisor.machines.machine_role import Membership
from headway.run.supervisor.machines.members import Expected, Members, choose_machines
from headway.run.supervisor.machines.messages import Refused, RunEnd, Spare
from headway.run.supervisor.machines.shared_disk import FolderSurvey

_POLL_SECONDS = 0.05
#: How long a machine that worked in the last attempt may take to come back before a run that may continues without it.
_BACK_SECONDS = 2.0


class RunMachines:
    """The machines of a run, as the supervisor of the first one sees them.

    Args:
        config: Resolved; it names the number of machines.
        membership: The role of this machine, which is the lead's.
        clock: Returns seconds that never decrease.
    """

    def __init__(
        self,
        config: Config,
        membership: Membership,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        parallel = config.parallel
        self._config = config
        self._membership = membership
        self._clock = clock
        compare = partial(
            compare_machines, describe_machine(), determinism=config.determinism, device=config.train.device
        )
        expected = Expected(
            parallel.machines,
            parallel.workers,
            __version__,
            membership.identity,
            compare,
            partial(name_differences, membership.computes),
        )
        self._lead = Lead(membership.role, Members(expected), config.supervise.lost_seconds)
        self._before: dict[int, str] = {}
        self._refused: dict[int, Refused] = {}
        self._received: Counter[tuple[str, int]] = Counter()
        self._has_begun = False
        self._folders = FolderSurvey(config, self._lead, clock)

    def hear(self, signals: list[int]) -> list[int]:
        """Add signals that other machines have received, and return all."""
        for name, number in self._lead.take_signals():
            if self.add_signal(signals, number, name):
                notice(f"{name} was asked to stop")
        return signals

    def add_signal(self, signals: list[int], number: int, receiver: str = "the lead") -> bool:
        """Add a signal that a machine has received to those of the run, and return whether it says anything new.

        A scheduler signals all machines, and that is one signal. Two Ctrl-C on one machine are two, and mean more.
        """
        self._received[receiver, number] += 1
        is_new = self._received[receiver, number] > signals.count(number)
        if is_new:
            signals.append(number)
        return is_new

    def assemble(self, look: Callable[[], object], starts_over: bool = False) -> AttemptMachines | None:
        """Wait until the machines that the run needs have joined, and return those that work in the next attempt.

        Args:
            look: Called several times a second; raises an error to give up.
            starts_over: Whether an earlier run of this name does not count.

        Returns:
            None if the run was finished before, so that other machines need not come.

        Raises:
            ConfigError: a machine that the run needs was started in another way than this one, and will not be again.
            Preempted: not enough have come in time, or will come at all.
        """
        begun = self._clock()
        told = False
        look_at = begun + self._config.supervise.lost_seconds
        while True:
            look()
            self._report_refusals()
            here = self._lead.here
            waited = self._clock() - begun
            ended = self._ended(here)
            most = self._config.parallel.machines - len(ended)
            usable = usable_machines(self._config, 1 + len(here))
            if usable and (len(here) == most - 1 or waited >= self._patience(here)):
                break
            if not usable_machines(self._config, most):
                raise self._missed(ended)
            if waited >= self._config.supervise.rejoin_seconds:
                raise Preempted(
                    f"{self._missing(here)} did not come within {format_seconds(waited)}",
                    where="supervise.rejoin_seconds",
                    fix="run the same command again on all machines",
                )
            if not (self._has_begun or starts_over or usable) and self._clock() >= look_at:
                look_at = self._clock() + LOOK_AT_RUN_SECONDS
                if self._is_finished():
                    return None
            if not told and waited > 1.0:
                told = True
                notice(f"waiting for {self._missing(here)}")
            time.sleep(_POLL_SECONDS)
        numbers = choose_machines(here, usable, self._before)
        members = [here[number] for number in numbers[1:]]
        own_disks = self._folders.ask(members, look)
        spares = sorted(set(here) - set(numbers))
        for number in spares:
            notice(f"{here[number]} is a hot spare: the run uses {usable} of {1 + len(here)} machines")
        self._lead.tell(spares, Spare())
        self._has_begun = True
        self._before = {member.number: member.host for member in members}
        workers = self._config.parallel.workers
        identity = self._membership.identity
        return AttemptMachines(self._lead, members, workers, own_disks=own_disks, identity=identity)

    def _is_finished(self) -> bool:
        """Return whether the run was finished before, so that machines that know it do not come; report it."""
        end = recorded_end(self._config, self._membership.identity, ANY_TIME)
        finished = is_finished_in_tier(self._config) if end is None else end.exit_code == 0
        if finished:
            notice(f"{self._config.run_directory} is finished: all its steps are done")
        return finished

    def _patience(self, here: dict[int, Any]) -> float:
        """Return how long to wait for more machines once there are enough."""
        if not self._has_begun:
            return self._config.supervise.lost_seconds
        return 0.0 if set(self._before) <= set(here) else _BACK_SECONDS

    def _ended(self, here: Mapping[int, Any]) -> list[int]:
        """Return the machines that will not come: their command has ended, and is not started again."""
        if self._membership.role.is_restarted:
            return []
        limit = self._config.supervise.lost_seconds
        left = {number for number, seconds in self._lead.closed.items() if seconds >= limit}
        return sorted((left | self._refused.keys()) - here.keys())

    def _missed(self, ended: Sequence[int]) -> HeadwayError:
        """Return the error for machines that the run needs and that will not come."""
        refused = next((self._refused[number] for number in ended if number in self._refused), None)
        if refused is not None:
            return ConfigError(refused.what, where="--machines, --node, --workers", fix=refused.fix)
        return Preempted(
            f"the command on {self._named(ended)} has ended, and nothing starts it again",
            where="--machines",
            fix="run the same command again on all machines",
        )

    def _missing(self, here: dict[int, Any]) -> str:
        return self._named([number for number in range(1, self._config.parallel.machines) if number not in here])

    def _named(self, numbers: Sequence[int]) -> str:
        names = [f"{number} ({self._before[number]})" if number in self._before else str(number) for number in numbers]
        return f"machine{'s' if len(names) > 1 else ''} {', '.join(names)}"

    def _report_refusals(self) -> None:
        """Report the machines that were refused. Only their commands end: this one may well be as it should be."""
        for number in self._lead.here:
            self._refused.pop(number, None)
        for refusal in self._lead.take_refusals():
            warning(f"a machine was not taken in: {refusal.what}")
            if refusal.machine is not None:
                self._refused[refusal.machine] = refusal

    def can_grow(self, machines: int) -> bool:
        """Return whether the run could use more machines than work now."""
        return usable_machines(self._config, 1 + len(self._lead.here)) > machines

    @classmethod
    @contextmanager
    def of(cls, config: Config, membership: Membership | None) -> Iterator[RunMachines | None]:
        """Lead the other machines for the length of a block, and tell them how it ends; None without any."""
        if membership is None:
            yield None
            return
        machines = cls(config, membership)
        ended = None
        try:
            yield machines
        except BaseException as error:
            ended = error
            raise
        finally:
            # A signal that comes now would end this command in another way than those of the other machines.
            with handled(STOP_SIGNALS, lambda number, frame: None):
                machines.close(ended)

    def close(self, error: BaseException | None) -> None:
        """Tell the other machines how the run has ended, so that their commands end alike."""
        self._lead.close(RunEnd.of(error))
