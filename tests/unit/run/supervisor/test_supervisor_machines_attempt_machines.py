"""The other machines of an attempt, and those of a run, with machines that are only messages."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from headway.config import Config, load_config
from headway.core.coordination.heartbeat import Exchange, Phase, Reading
from headway.core.errors import Cancelled, ConfigError, Preempted
from headway.core.process.table import ProcessState
from headway.run.directory.run_directory import RunDirectory
from headway.run.supervisor.error_report import ErrorReport
from headway.run.supervisor.machines import run_machines
from headway.run.supervisor.machines.attempt_machines import AttemptMachines, MachineEnd, most_telling
from headway.run.supervisor.machines.ending import raise_end
from headway.run.supervisor.machines.machine_role import MachineRole, Membership
from headway.run.supervisor.machines.members import Member
from headway.run.supervisor.machines.messages import (
    MACHINE,
    AttemptEnded,
    BeginAttempt,
    EndAttempt,
    FileSeen,
    FromLead,
    LookForFile,
    MachineMessage,
    Refused,
    RunEnd,
    Spare,
    WorkerReadings,
    WorkersEnded,
)
from headway.run.supervisor.machines.run_machines import RunMachines
from headway.run.supervisor.watchdog import Finding

READING = Reading(
    41,
    Phase.COMPUTE,
    7,
    100.5,
    100.25,
    12,
    "sum of gradients",
    3.5,
    0.25,
    4,
    99.5,
    Exchange(12, "a"),
    Exchange(11, "b"),
)


class Played:
    """A lead whose machines are as the test says."""

    address = "127.0.0.1"

    def __init__(self, *_: Any) -> None:
        self.here: dict[int, Member] = {}
        self.gone: dict[int, str] = {}
        self.closed: dict[int, float] = {}
        self.told: list[tuple[list[int], FromLead]] = []
        self.signals: list[tuple[str, int]] = []
        self.refusals: list[Refused] = []
        self.over: RunEnd | None = None
        self.answers: dict[int, dict[str, bool]] = {}
        self.mute: set[int] = set()
        self.times = 1
        self.pausing = nullcontext

    def join(self, number: int) -> Member:
        self.here[number] = Member(number, f"host-{number}", "p", len(self.gone) + 10 * number, 0.0)
        return self.here[number]

    def lose(self, number: int, why: str) -> None:
        self.gone[self.here.pop(number).session] = why

    def why_gone(self, session: int) -> str | None:
        return self.gone.get(session)

    def newest_readings(self, number: int) -> WorkerReadings | None:
        return self.here[number].readings

    def take_messages(self, number: int) -> list[MachineMessage]:
        found = list(self.here[number].inbox)
        self.here[number].inbox.clear()
        return found

    def take_signals(self) -> list[tuple[str, int]]:
        found, self.signals = self.signals, []
        return found

    def take_refusals(self) -> list[Refused]:
        found, self.refusals = self.refusals, []
        return found

    def tell(self, numbers: Any, message: FromLead) -> None:
        self.told.append((list(numbers), message))
        for number in set(numbers) - self.mute if isinstance(message, LookForFile) else ():
            assert isinstance(message, LookForFile)
            answer = replace(FileSeen(message.path, file=True, data=True), **self.answers.get(number, {}))
            self.here[number].inbox.extend([answer] * self.times)

    @property
    def looks(self) -> list[LookForFile]:
        return [message for _, message in self.told if isinstance(message, LookForFile)]

    def drop(self, number: int, why: str) -> None:
        self.lose(number, why)

    def close(self, end: RunEnd) -> None:
        self.over = end


@pytest.fixture
def lead(monkeypatch: pytest.MonkeyPatch) -> Played:
    lead = Played()
    monkeypatch.setattr(run_machines, "Lead", lambda *_: lead)
    return lead


@pytest.fixture
def of(lead: Played, tiny: Callable[..., Path]) -> Callable[..., RunMachines]:
    def make(
        machines: str, determinism: str = "elastic", *, is_restarted: bool = True, **supervise: float
    ) -> RunMachines:
        config = load_config(tiny(parallel={"machines": machines}, determinism=determinism, supervise=supervise))
        now = iter(range(100_000))  # every look takes a second
        place = MachineRole(0, "h", 1, b"s" * 16, is_restarted)
        return RunMachines(config, Membership(place, {}), lambda: float(next(now)))

    return make


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_machines, "_POLL_SECONDS", 0.0)


def numbers(team: AttemptMachines | None) -> list[int]:
    assert team is not None
    return [member.number for member in team.members]


def test_an_elastic_run_uses_the_machines_that_share_its_lanes_and_names_the_spares(
    lead: Played, of: Callable[..., RunMachines], capsys: pytest.CaptureFixture[str]
) -> None:
    machines = of("3")
    lead.join(1), lead.join(2)
    team = machines.assemble(lambda: None)
    assert team is not None
    assert numbers(team) == [1] and team.world_size == 2
    assert "machine 2 (host-2) is a hot spare: the run uses 2 of 3 machines" in capsys.readouterr().err
    assert ([2], Spare()) in lead.told
    assert not machines.can_grow(2)
    lead.lose(1, "silent")
    assert numbers(machines.assemble(lambda: None)) == [2], "the spare takes its place"
    lead.lose(2, "silent")
    assert numbers(machines.assemble(lambda: None)) == []
    lead.join(1)
    assert machines.can_grow(1)


def test_a_run_of_one_number_waits_for_a_lost_machine_and_gives_up_in_time(
    lead: Played, of: Callable[..., RunMachines]
) -> None:
    lead.join(1)
    machines = of("2", "run", rejoin_seconds=50.0)
    machines.assemble(lambda: None)
    lead.lose(1, "silent")
    looks: list[int] = []
    with pytest.raises(Preempted, match=r"machine 1 \(host-1\) did not come within 50 s"):
        machines.assemble(lambda: looks.append(1))
    assert 50 <= len(looks) <= 52
    lead.join(1)
    assert numbers(machines.assemble(lambda: None)) == [1]


@pytest.mark.parametrize(
    ("machines", "determinism", "gives_up"),
    [("2", "run", True), ("2", "elastic", False), ("4", "run", True), ("2:4", "elastic", False)],
)
def test_a_machine_that_nothing_starts_again_is_not_waited_for(
    lead: Played, of: Callable[..., RunMachines], machines: str, determinism: str, gives_up: bool
) -> None:
    """As a task of a step of Slurm that was killed; another one of these may still come."""
    run = of(machines, determinism, is_restarted=False, rejoin_seconds=500.0, lost_seconds=15.0)
    for number in range(1, int(machines[-1])):
        lead.join(number)
    run.assemble(lambda: None)
    lead.lose(1, "the connection was closed")
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        lead.closed = {1: float(len(looks))}

    if gives_up:
        with pytest.raises(Preempted, match=r"the command on machine 1 \(host-1\) has ended, and nothing starts it"):
            run.assemble(look)
        assert 14 <= len(looks) <= 17, "it may come back as long as a machine may be silent"
    else:
        assert 1 not in numbers(run.assemble(look))


def test_a_machine_that_is_silent_or_may_be_started_again_is_waited_for(
    lead: Played, of: Callable[..., RunMachines]
) -> None:
    for restarted, closed in ((True, {1: 400.0}), (False, {})):
        lead.join(1)
        lead.closed = {}
        machines = of("2", "run", is_restarted=restarted, rejoin_seconds=50.0)
        machines.assemble(lambda: None)
        lead.lose(1, "silent")
        lead.closed = dict(closed)
        with pytest.raises(Preempted, match="did not come within 50 s"):
            machines.assemble(lambda: None)


@pytest.mark.parametrize("starts_over", [False, True])
def test_the_lead_of_a_finished_run_does_not_wait_for_machines_that_know_it(
    lead: Played, of: Callable[..., RunMachines], monkeypatch: pytest.MonkeyPatch, starts_over: bool
) -> None:
    monkeypatch.setattr(run_machines, "recorded_end", lambda *_: RunEnd(0))
    machines, looks = of("2", "run", lost_seconds=15.0, rejoin_seconds=50.0), list[int]()
    if starts_over:
        with pytest.raises(Preempted, match="did not come"):
            machines.assemble(lambda: None, starts_over=True)
        return
    assert machines.assemble(lambda: looks.append(1)) is None
    assert 6 <= len(looks) <= 17, "a machine that is only late is taken in"
    lead.join(1)
    assert numbers(machines.assemble(lambda: None)) == [1], "it is not asked while it has all machines"


def test_the_first_attempt_waits_for_all_machines_for_as_long_as_one_may_be_silent(
    lead: Played, of: Callable[..., RunMachines]
) -> None:
    looks: list[int] = []
    machines = of("1:2", lost_seconds=15.0)
    assert numbers(machines.assemble(lambda: looks.append(1))) == []
    assert 14 <= len(looks) <= 17


def test_machines_are_asked_once_whether_they_see_the_folder_and_work_apart_if_one_does_not(
    lead: Played, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = {"url": f"file://{tmp_path}"}
    config = load_config(tiny(parallel={"machines": "2"}, checkpoint={"remote": remote}))
    machines = RunMachines(config, Membership(MachineRole(0, "h", 1, b"s" * 16), {}), lambda: 0.0)
    lead.answers = {1: {"file": False}}
    lead.join(1)
    team = machines.assemble(lambda: None)
    assert team is not None
    assert "machines share no folder: checkpoints go through the remote tier" in capsys.readouterr().err
    assert "own_disks" in str(team.variables()) and '"own_disks": true' in str(team.variables())
    (asked,) = lead.looks
    assert not Path(asked.path).exists() and Path(asked.path).parent == config.runs, "nothing is left"
    machines.assemble(lambda: None)
    assert len(lead.looks) == 1
    lead.lose(1, "silent")
    lead.answers = {}
    lead.join(1)
    team = machines.assemble(lambda: None)
    assert team is not None and '"own_disks": false' in str(team.variables()), "a new one is asked"
    assert len(lead.looks) == 2


def test_a_machine_may_say_twice_what_it_sees(lead: Played, of: Callable[..., RunMachines]) -> None:
    lead.times = 2
    lead.join(1)
    assert numbers(of("2").assemble(lambda: None)) == [1]


def test_a_machine_that_does_not_say_what_it_sees_is_dropped(lead: Played, of: Callable[..., RunMachines]) -> None:
    machines = of("2", start_seconds=30.0)
    lead.mute = {1}
    member = lead.join(1)
    team = machines.assemble(lambda: None)
    assert team is not None
    assert "does not say what it sees" in str(lead.why_gone(member.session)) and team.lost() is not None


REFUSAL = Refused("machine 1 (b) was started with 3 workers", "start alike", 1)


def test_a_machine_that_does_not_fit_is_named_and_waited_for(
    lead: Played, of: Callable[..., RunMachines], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own command ends. Started as the others are, it is taken in."""
    machines, looks = of("2"), list[int]()
    lead.refusals.append(REFUSAL)

    def look() -> None:
        looks.append(1)
        if len(looks) == 5:
            lead.join(1)

    assert numbers(machines.assemble(look)) == [1] and len(looks) == 6
    assert "was not taken in: machine 1 (b) was started with 3 workers" in capsys.readouterr().err


def test_a_machine_that_does_not_fit_and_is_not_started_again_ends_a_run_that_needs_it(
    lead: Played, of: Callable[..., RunMachines]
) -> None:
    lead.refusals.append(REFUSAL)
    with pytest.raises(ConfigError, match="3 workers"):
        of("2", "run", is_restarted=False).assemble(lambda: None)
    lead.refusals.append(REFUSAL)
    assert numbers(of("1:2", is_restarted=False).assemble(lambda: None)) == []
    machines = of("2", "run", is_restarted=False)
    lead.refusals.append(REFUSAL)
    lead.join(1)
    assert numbers(machines.assemble(lambda: None)) == [1], "another process of that number was refused"


def test_signals_count_as_often_as_one_machine_has_received_them(lead: Played, of: Callable[..., RunMachines]) -> None:
    machines, signals = of("3"), list[int]()
    lead.signals = [("machine 1 (b)", signal.SIGINT), ("machine 2 (c)", signal.SIGINT)]
    assert machines.hear(signals) is signals
    assert signals == [signal.SIGINT], "a scheduler signals all machines; two would end all at once"
    machines.add_signal(signals, signal.SIGINT)
    assert signals == [signal.SIGINT], "the lead's own is the same one, even if it comes last"
    lead.signals = [("machine 2 (c)", signal.SIGINT)]
    assert machines.hear(signals) == [signal.SIGINT] * 2, "two on one machine are two"
    lead.signals = [("machine 1 (b)", signal.SIGTERM), ("machine 1 (b)", signal.SIGINT)]
    assert machines.hear(signals) == [signal.SIGINT, signal.SIGINT, signal.SIGTERM]


def test_a_signal_while_the_others_hear_of_the_end_changes_no_code(
    lead: Played, of: Callable[..., RunMachines], monkeypatch: pytest.MonkeyPatch, config: Config
) -> None:
    def close(end: RunEnd) -> None:
        signal.raise_signal(signal.SIGINT)
        lead.over = end

    monkeypatch.setattr(lead, "close", close)
    membership = Membership(MachineRole(0, "h", 1, b"s" * 16), {})
    with pytest.raises(Preempted), RunMachines.of(config, membership):
        raise Preempted("stopped")
    assert lead.over is not None and lead.over.exit_code == 75


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (Preempted("p"), 75), (Cancelled("c"), 7), (KeyboardInterrupt(), 130),
                        (ValueError("v"), 1), (SystemExit(3), 3)],
)  # fmt: skip
def test_all_machines_end_as_the_lead_does(
    lead: Played, of: Callable[..., RunMachines], error: BaseException | None, code: int
) -> None:
    of("2").close(error)
    assert lead.over is not None and lead.over.exit_code == code
    if code == 0:
        raise_end(lead.over)
        return
    with pytest.raises(BaseException) as told:
        raise_end(lead.over)
    assert getattr(told.value, "exit_code", 130) == code
    assert isinstance(told.value, KeyboardInterrupt) == (code == 130)


@pytest.fixture
def begun(lead: Played, config: Config) -> AttemptMachines:
    team = AttemptMachines(lead, [lead.join(1), lead.join(2)], 2)  # type: ignore[arg-type]
    team.begin(config, RunDirectory(config.run_directory).begin_attempt("x"), 3)
    return team


@pytest.fixture
def config(tiny: Callable[..., Path]) -> Config:
    return load_config(tiny())


def test_machines_get_their_ranks_and_one_place_to_meet(lead: Played, begun: AttemptMachines) -> None:
    orders = [(told, message) for told, message in lead.told if isinstance(message, BeginAttempt)]
    parts = [message.part for _, message in orders]
    assert [told for told, _ in orders] == [[1], [2]]
    assert [(part.first_rank, part.world_size) for part in parts] == [(2, 6), (4, 6)]
    own = json.loads(begun.variables()["HEADWAY_MACHINE_PART"])
    assert own["port"] > 0 and {(part.address, part.port) for part in parts} == {("127.0.0.1", own["port"])}
    assert orders[0][1].attempt == 1 and orders[0][1].restarts == 3
    assert [begun.host_of(rank) for rank in range(6)] == [None, None, "host-1", "host-1", "host-2", "host-2"]


def test_readings_of_other_machines_get_times_of_this_clock_and_only_their_own_ranks(
    lead: Played, begun: AttemptMachines
) -> None:
    states = {2: ProcessState(41, "R", 1, 1), 3: None}
    sent = MACHINE.decode(MACHINE.encode(WorkerReadings(1, 0.0, dict.fromkeys((1, 2, 3), READING), states)))
    assert isinstance(sent, WorkerReadings)
    lead.here[1].readings = sent.with_times_of_here(1000.0)
    lead.here[2].readings = replace(sent, attempt=9)
    begun.look()
    assert list(begun.statuses.readings) == [2, 3], "rank 1 is not the sender's, and attempt 9 is another one"
    assert begun.statuses.readings[2].beat_seconds == 1100.5 and begun.statuses.readings[2].steps_seconds == 1099.5
    assert begun.statuses.readings[2].begun == READING.begun and begun.statuses.readings[2].own_seconds == 3.5
    state = begun.statuses.states[2]
    assert state is not None and state.state == "R" and begun.statuses.states[3] is None


def test_a_lost_machine_is_found_unless_its_workers_are_done(lead: Played, begun: AttemptMachines) -> None:
    assert begun.lost() is None
    lead.here[1].inbox.append(WorkersEnded(1, 0, is_done=True))
    begun.look()
    lead.lose(1, "closed")
    assert begun.lost() is None and begun.ends[1].is_good
    lead.lose(2, "it has said nothing for 15 s")
    found = begun.lost()
    assert found is not None and (found[0].number, found[1], found[2]) == (
        2,
        "it has said nothing for 15 s",
        range(4, 6),
    )


def test_the_end_waits_for_the_machines_that_are_there(lead: Played, begun: AttemptMachines) -> None:
    begun.end()
    assert lead.told[-1] == ([1, 2], EndAttempt(1))
    lead.lose(2, "closed")
    looks = 0

    def look() -> None:  # as the lead renews its lease: a machine may take longer than that lasts
        nonlocal looks
        looks += 1
        if looks == 2:
            lead.here[1].inbox.append(AttemptEnded(1))

    begun.wait_for_end(look)
    assert looks == 2


def killed_worker(rank: int, killed_here: tuple[int, ...] = ()) -> MachineEnd:
    """The end of a machine one of whose workers was killed by SIGKILL."""
    reported = ErrorReport(1, "died", rank=rank, signal=9)
    return MachineEnd(1, False, reported, killed_here=killed_here)


def test_the_end_that_says_most_decides() -> None:
    crashed = MachineEnd(1, False, ErrorReport(1, "connection closed"))
    killed, ended_here = killed_worker(1), killed_worker(0, killed_here=(0,))
    saved = MachineEnd(75, False, ErrorReport(75, "stopped"))
    cancelled = MachineEnd(7, False, ErrorReport(7, "cancelled"))
    full = MachineEnd(4, False, ErrorReport(4, "disk"))
    good, gone = MachineEnd(0, True), MachineEnd(-9)
    order = [full, saved, killed, crashed, ended_here, good]
    for place, end in enumerate(order):
        assert most_telling(list(reversed(order[place:])), None) is end
    assert most_telling([saved, cancelled], None) is cancelled
    assert most_telling([crashed, gone], None) is gone
    assert not MachineEnd(0, False).is_good, "without its word that is no success"


@pytest.mark.parametrize("victim", range(4))
def test_a_kill_by_the_supervisor_is_never_taken_for_the_first(victim: int) -> None:
    """Of four machines one loses its worker; the supervisor then kills the other three by the same signal."""
    found = Finding("died", victim, "died", suspects=(victim,))
    ends = [killed_worker(rank, killed_here=() if rank == victim else (rank,)) for rank in range(4)]
    for order in permutations(ends):
        assert most_telling(order, found).rank == most_telling(order, None).rank == victim


def test_of_two_kills_the_one_that_was_found_first_counts() -> None:
    found = Finding("died", 2, "died", suspects=(2,))
    assert most_telling([killed_worker(1), killed_worker(2)], found).rank == 2


def test_an_attempt_process_that_is_killed_stands_for_its_first_worker() -> None:
    gone = MachineEnd(-9, first_rank=4)
    assert (gone.rank, gone.signal, gone.is_consequence) == (4, 9, False)
    assert MachineEnd(-9, first_rank=4, killed_here=[4, 5]).is_consequence


@pytest.mark.parametrize("killed", [[1], []])
def test_a_machine_tells_which_workers_the_supervisor_killed(
    lead: Played, of: Callable[..., RunMachines], killed: list[int]
) -> None:
    lead.join(1)
    team = of("2").assemble(lambda: None)
    assert team is not None
    team._attempt = 1
    reported = ErrorReport(1, "died", rank=1, signal=9)
    lead.here[1].inbox.append(WorkersEnded(1, 1, reported=reported, killed=tuple(killed)))
    team.look()
    assert team.ends[1].rank == 1 and team.ends[1].is_consequence == (killed == [1])
