"""What the machines of a run see of the lead's disk, found out before an attempt begins.

The lead puts a file with a random name beside the run directories, and asks the others whether they see it. One that
does not has a disk of its own. Then every machine but the lead's works in a folder of its own, and checkpoints go
through the remote tier.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from headway.config import Config
from headway.core.console import notice
from headway.core.errors import CheckpointError, ConfigError, fix_for
from headway.core.files.paths import is_there
from headway.core.process.waiting import VISIBILITY_TIMEOUT, wait_until
from headway.core.user_command import suggest
from headway.run.session.attempt import has_data
from headway.run.supervisor.machines.lead import Lead
from headway.run.supervisor.machines.machine_role import MachineRole
from headway.run.supervisor.machines.members import Member
from headway.run.supervisor.machines.messages import FileSeen, LookForFile

#: How long a machine looks for the file if the run can do without a common disk. A network file system may show it
#: later; the run then goes through the remote tier for no need.
_LOOK_SECONDS = 5.0
_POLL_SECONDS = 0.05


def own_folder(config: Config, role: MachineRole) -> Path:
    """Return the folder for the run directories of a machine that does not see the lead's."""
    return config.runs / f".machine-{role.number}"


def patience_seconds(config: Config) -> float:
    """Return how long a machine looks for the lead's file."""
    return _LOOK_SECONDS if config.checkpoint.remote is not None else VISIBILITY_TIMEOUT


@contextmanager
def marker_file(config: Config) -> Iterator[str]:
    """Have a file beside the run directories for the length of a block, and return its path.

    Raises:
        CheckpointError: it cannot be made.
    """
    path = config.runs / f".headway-seen-{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
    except OSError as error:
        raise CheckpointError(
            f"the folder of run directories cannot be used: {error.strerror or error}",
            where=str(path.parent),
            fix=fix_for(error, "make room there, or choose a place that you may write to with runs=..."),
        ) from error
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


def look_for_file(message: LookForFile, config: Config, is_over: Callable[[], bool]) -> FileSeen:
    """Answer the lead: whether this machine sees its file and has the data to train on."""
    path = Path(message.path)
    store = Path(message.store)
    wait_until(lambda: is_there(path, folders=2) or is_over(), patience_seconds(config), 0.1)
    is_there(store / "manifest.json", folders=2)  # a network file system may still know that it was absent
    data = config.data.model_copy(update={"store": store})
    return FileSeen(message.path, path.exists(), has_data(config.model_copy(update={"data": data})))


class FolderSurvey:
    """What the machines of a run see of the lead's disk; each is asked once, when it has joined.

    Args:
        config: Resolved.
        lead: Speaks with them.
        clock: Returns seconds that never decrease.
    """

    def __init__(self, config: Config, lead: Lead, clock: Callable[[], float]) -> None:
        self._config = config
        self._lead = lead
        self._clock = clock
        self._answers: dict[int, FileSeen] = {}
        """By the session of the machine."""
        self._own_disks = False

    def ask(self, members: Sequence[Member], look: Callable[[], object]) -> bool:
        """Return whether some machine has a disk of its own.

        Args:
            members: The machines that are to work.
            look: Called several times a second; raises an error to give up.

        Raises:
            ConfigError: a machine lacks what the run needs.
        """
        for session in set(self._answers) - {member.session for member in members}:
            del self._answers[session]
        asked = [member for member in members if member.session not in self._answers]
        if asked:
            with marker_file(self._config) as path:
                self._lead.tell([member.number for member in asked], LookForFile(path, str(self._config.data.store)))
                self._wait(asked, path, look)
        answers = {str(member): self._answers[member.session] for member in members if member.session in self._answers}
        own_disks = check_answers(self._config, answers)
        if own_disks and not self._own_disks:
            notice("machines share no folder: checkpoints go through the remote tier, and logs stay on each machine")
        self._own_disks = own_disks
        return own_disks

    def _wait(self, asked: Sequence[Member], path: str, look: Callable[[], object]) -> None:
        """Wait for the answers, and drop a machine that gives none."""
        # A machine that has just been started loads libraries first.
        until = self._clock() + patience_seconds(self._config) + self._config.supervise.start_seconds
        while left := [member for member in asked if self._is_silent(member)]:
            look()
            for member in left:
                for message in self._lead.take_messages(member.number):
                    if isinstance(message, FileSeen) and message.path == path:
                        self._answers[member.session] = message
            if self._clock() > until:
                for member in filter(self._is_silent, left):
                    self._lead.drop(member.number, "it does not say what it sees of the lead's disk")
            time.sleep(_POLL_SECONDS)

    def _is_silent(self, member: Member) -> bool:
        """Return whether a machine that is there has not said what it sees."""
        return member.session not in self._answers and self._lead.here.get(member.number) is member


def check_answers(config: Config, answers: Mapping[str, FileSeen]) -> bool:
    """Return whether some machine has a disk of its own.

    Args:
        config: Resolved.
        answers: By the name of the machine.

    Raises:
        ConfigError: the run needs something that a machine does not have.
    """
    apart = [name for name, answer in answers.items() if not answer.file]
    without_data = [name for name, answer in answers.items() if not answer.data]
    if apart and config.checkpoint.remote is None:
        raise ConfigError(
            f"{_listed(apart)} not see the folder of the run, and there is no remote tier for checkpoints",
            where=f"{config.runs.absolute()}, checkpoint.remote",
            fix="choose a place on a file system that all machines of the run share (runs=...), or set"
            " checkpoint.remote.url to an object store that all of them reach",
        )
    if apart and config.checkpoint.memory_every is not None:
        raise ConfigError(
            f"{_listed(apart)} not see the folder of the run; copies in host memory could not be brought together",
            where="checkpoint.memory_every",
            fix="checkpoint.memory_every=null, or a place that all machines of the run share (runs=...)",
        )
    if without_data:
        raise ConfigError(
            f"{_listed(without_data)} not have the token store to train on",
            where=str(config.data.store.absolute()),
            fix="set data.remote to a store that all machines read, copy the store there, or run there:"
            f" {suggest('data prepare')}, which makes the same bytes of the same sources",
        )
    return bool(apart)


def _listed(names: Collection[str]) -> str:
    return f"{', '.join(names)} {'do' if len(names) > 1 else 'does'}"
