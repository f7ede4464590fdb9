"""An attempt from outside, where something is in the way of it."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.checkpoint.save.writer_locks import WRITERS_FOLDER, is_marked_lost
from headway.config import Config, load_config
from headway.core.console import alert_with
from headway.core.coordination.heartbeat import Heartbeat, Phase
from headway.core.errors import INTERRUPTED, CheckpointError
from headway.core.process.table import DEAD, ProcessState, has_one_thread, process_state
from headway.core.process.waiting import wait_until
from headway.run.directory.run_directory import Attempt
from headway.run.session.attempt import RunOptions
from headway.run.supervisor import attempt_journal, attempt_monitor, log, supervisor, worker_control, worker_status
from headway.run.supervisor.attempt_monitor import AttemptMonitor, AttemptSurroundings
from headway.run.supervisor.error_report import ErrorReport
from headway.run.supervisor.machines.attempt_machines import AttemptMachines, MachineEnd
from headway.run.supervisor.machines.members import Member
from headway.run.supervisor.messages import AttemptMessage, Done
from headway.run.supervisor.restart_policy import AttemptOutcome, RestartPolicy
from headway.run.supervisor.watchdog import Finding
from headway.run.supervisor.worker_pool import WorkerPool
from support.waits import LONG


def monitor_of(config: Config, *signals: int, **around: Any) -> AttemptMonitor:
    surroundings = AttemptSurroundings(WorkerPool(config, None), list(signals), own_process=False, **around)
    return AttemptMonitor(config, RunOptions(), surroundings)


def begin(attempt: AttemptMonitor) -> Attempt:
    return attempt.journal.begin(attempt.config)


@pytest.fixture
def attempt(tiny: Callable[..., Path]) -> AttemptMonitor:
    return monitor_of(load_config(tiny()))


def test_a_disk_that_is_full_when_the_next_attempt_begins_is_told(
    attempt: AttemptMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/disk/config.yaml")

    monkeypatch.setattr(attempt_journal, "write_config", full)
    with pytest.raises(CheckpointError, match="No space left") as told:
        attempt.begin_again()
    assert told.value.where == "/disk/config.yaml"
    record = json.loads((attempt.config.run_directory / "attempts/001/attempt.json").read_text())
    assert record["outcome"].startswith("failed to start: ") and record["exit_code"] == 4


def test_a_record_of_the_surroundings_that_cannot_be_copied_is_left_out(
    attempt: AttemptMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = attempt.config.run_directory
    (run / "attempts").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    monkeypatch.setattr("shutil.copy", full)
    attempt.begin_again()
    assert attempt.journal.attempt is not None and (attempt.journal.attempt.directory / "config.yaml").exists()


def test_what_alerts_need_is_open_when_the_attempt_has_begun(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open it at the first alert would wait for the disk that is told of."""
    config, seen = load_config(tiny(telemetry={"alert": "true"})), []

    class Begun(AttemptMonitor):
        def run(self) -> AttemptOutcome:
            seen.append(begin(self).run.joinpath("alerts.log").exists())
            return AttemptOutcome("finished", "finished", 0)

    monkeypatch.setattr(supervisor, "AttemptMonitor", Begun)
    supervisor.supervise(config, RunOptions(), own_process=False)
    assert seen == [True]


@pytest.mark.parametrize("own", [False, True])
def test_the_stack_of_a_warning_is_not_that_of_a_later_death(attempt: AttemptMonitor, own: bool) -> None:
    """Two kills would have the same stack, and look like a bug."""
    record = begin(attempt)
    Heartbeat(record.directory / "heartbeat-0").beat(Phase.START, 0)
    attempt.look()
    stack = record.directory / "stack-0.txt"
    head = "Fatal Python error: Segmentation fault\n\nCurrent thread" if own else "Thread"
    stack.write_text(f'{head} 0x1 (most recent call first):\n  File "{Path.cwd()}/mine.py", line 7 in load\n')
    ending = attempt.evidence.blame(Finding("died", 0, "died (signal 9)", signal=9))
    assert bool(ending.frames) == own and (ending.where == str(stack)) == own
    attempt.journal.attempt = None


def test_a_log_whose_disk_hangs_keeps_no_signal_from_workers(
    attempt: AttemptMonitor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe that nobody reads waits when it is opened, as a file on such a disk does."""
    monkeypatch.setattr(log, "_SECONDS", 0.05)
    record = begin(attempt)
    path = record.directory / "supervisor.log"
    os.mkfifo(path)
    told: list[str] = []

    def say() -> None:
        for word in ("one", "two"):
            attempt.journal.say(f"warning: {word}")

    with alert_with(told.append):
        supervisor_thread = threading.Thread(target=say, daemon=True)
        supervisor_thread.start()
        supervisor_thread.join(LONG)
    assert not supervisor_thread.is_alive() and not has_one_thread()
    assert capsys.readouterr().err == "warning: one\nwarning: two\n" and told == ["one", "two"]
    monkeypatch.setattr(log, "_SECONDS", 10.0)
    pipe = os.open(path, os.O_RDWR)
    attempt.journal.say("three")
    assert os.read(pipe, 1000) == b"warning: one\nwarning: two\nthree\n"
    os.close(pipe)
    assert attempt.journal._log is not None and attempt.journal._log._thread is not None
    assert not attempt.journal._log._thread.is_alive(), "or no further attempt would be a copy of this process"


@pytest.mark.parametrize("phase", [Phase.DATA, Phase.CHECKPOINT, Phase.END])
def test_who_may_wait_for_its_disk_is_asked_for_no_stack(
    attempt: AttemptMonitor, monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    """It would wait for it in a signal handler, and give up no write that hangs."""
    asked: list[int] = []
    monkeypatch.setattr(worker_control, "ask_for_stacks", lambda files, *_: asked.extend(files))
    page = Heartbeat(begin(attempt).directory / "heartbeat-0")
    for step in (0, 1):
        page.beat(phase, step)
    attempt.look()
    assert attempt.judge(time.monotonic() + 60.0) is None
    assert len(attempt.journal.facts["warnings"]) == 1 and asked == ([os.getpid()] if phase == Phase.DATA else [])


def test_the_watchdog_knows_how_long_workers_wait_for_each_other(tiny: Callable[..., Path]) -> None:
    config = load_config(tiny(), ["parallel.timeout_seconds=50", "supervise.hang_seconds=7"])
    dog = monitor_of(config).watchdog
    assert (dog.timeout_seconds, dog.config.hang_seconds) == (50, 7)


def test_a_lead_that_works_alone_still_pauses_the_thread_that_listens(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its process could not be copied, and every attempt would load all libraries again."""
    paused = []

    @contextmanager
    def pausing() -> Iterator[None]:
        paused.append(True)
        yield
        paused.clear()

    def start(*_: Any) -> None:
        raise InterruptedError("while paused" if paused else "with a thread")

    monkeypatch.setattr(attempt_monitor, "AttemptProcess", start)
    config, lead = load_config(tiny()), SimpleNamespace(pausing=pausing)
    alone = AttemptMachines(lead, [])  # type: ignore[arg-type]
    with pytest.raises(InterruptedError, match="while paused"):
        monitor_of(config, machines=alone).run()


def test_writers_hear_that_a_machine_is_lost(attempt: AttemptMonitor) -> None:
    run = begin(attempt).run
    (run / WRITERS_FOLDER).mkdir()
    outcome = attempt.explain_loss(Member(1, "node-1", "p", 1, 0.0), "it has said nothing for 15 s", range(2, 4))
    assert outcome.what == "machine 1 (node-1) is lost: it has said nothing for 15 s" and outcome.rank == 2
    assert [is_marked_lost(run, rank) for rank in range(5)] == [False, False, True, True, False]


def test_a_heartbeat_that_cannot_be_opened_is_told(attempt: AttemptMonitor) -> None:
    folder = begin(attempt).directory
    assert attempt.workers.not_begun(900.0, folder).what == "worker 0 did not begin within 900 s"
    (folder / "heartbeat-0").symlink_to(folder / "nowhere")
    attempt.look()
    assert attempt.workers.not_begun(900.0, folder).what.startswith(
        "worker 0 did not begin within 900 s; its heartbeat cannot be opened (No such file or directory: "
    )


def test_who_outlives_a_death_leaves_its_stack_before_it_is_killed(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny(), ["parallel.workers=2"])
    attempt = monitor_of(config)
    folder = begin(attempt).directory
    script = (
        "import os, pathlib, sys, time\n"
        "from headway.run.supervisor.worker import report_to\n"
        "report_to(pathlib.Path(sys.argv[1]), int(sys.argv[2]))\n"
        "def waits_without_end(): pathlib.Path(sys.argv[1], 'waits').touch() or time.sleep(100)\n"
        "while sys.argv[2] == '1' and not pathlib.Path(sys.argv[1], 'die').exists(): time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9) if sys.argv[2] == '1' else waits_without_end()\n"
    )

    def has_written() -> bool:
        return "in waits_without_end" in (folder / "stack-0.txt").read_text()

    survivor, dead = (subprocess.Popen([sys.executable, "-c", script, str(folder), rank]) for rank in "01")
    try:
        assert wait_until(lambda: (folder / "waits").exists() and (folder / "heartbeat-1").exists(), LONG)
        attempt.look()
        (folder / "die").touch()
        assert wait_until(lambda: (state := process_state(dead.pid)) is not None and state.state == DEAD, LONG)
        process: Any = SimpleNamespace(
            pid=-1, code=1, poll=survivor.poll, listen=lambda seconds: time.sleep(seconds) or []
        )
        kill = attempt.control.kill
        # On a busy machine it takes longer than it is given.
        monkeypatch.setattr(attempt_monitor, "_REPORT_SECONDS", 100.0)
        monkeypatch.setattr(attempt.control, "kill", lambda folder: (wait_until(has_written, LONG), kill(folder)))
        ending = attempt.watch(process)
        assert survivor.poll() == -signal.SIGKILL
    finally:
        survivor.kill()
        survivor.wait()
        dead.wait()
    assert (ending.kind, ending.rank, ending.signal) == ("died", 1, 9)
    assert has_written()


@pytest.mark.parametrize("after", [0.0, 0.05, 0.15, 0.25, 0.35])
@pytest.mark.parametrize("stack_after", [0.1, 1.0, math.inf])
def test_a_death_is_said_within_a_second_and_its_attempt_over_within_two(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, after: float, stack_after: float
) -> None:
    """By a clock that goes on where the supervisor waits, and nowhere else: this is its own part, however busy the
    machine is. The other worker is killed when its stack is written, or does not come."""
    config = load_config(tiny(), ["parallel.workers=2"])
    attempt = monitor_of(config)
    folder, now, told, killed = begin(attempt).directory, time.monotonic(), list[float](), list[float]()
    died, stack = now + 10.0 + after, folder / "stack-0.txt"
    for rank in (0, 1):
        page = Heartbeat(folder / f"heartbeat-{rank}")
        page._pid = 1000 + rank
        page.beat(Phase.COMPUTE, 7)

    def listen(seconds: float) -> list[Any]:
        nonlocal now
        now += seconds
        if told and now > told[0] + stack_after:
            stack.write_text("its stack")
        return []

    def state(pid: int) -> ProcessState:
        dead = pid == 1001 and now >= died
        return ProcessState(1, DEAD if dead else "S", 1, pid, signal.SIGKILL if dead else None)

    monkeypatch.setattr(attempt_monitor, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(worker_status, "process_state", state)
    monkeypatch.setattr(worker_control, "ask_for_stacks", lambda *_: None)
    monkeypatch.setattr(attempt.journal, "say", lambda text: told.append(now))
    monkeypatch.setattr(attempt.control, "kill", lambda folder: killed.append(now))
    process: Any = SimpleNamespace(pid=-1, code=1, listen=listen, poll=lambda: 1 if killed else None)
    ending = attempt.watch(process)
    assert (ending.kind, ending.rank, ending.signal) == ("died", 1, signal.SIGKILL)
    assert 0.0 <= told[0] - died <= 1.0 and now - died <= 2.0
    assert killed[0] - told[0] >= attempt_monitor._HURRY_SECONDS, "or nobody would hear of it from the agent"
    assert stack.exists() == (stack_after < math.inf)
    assert killed[0] - told[0] <= max(1.0, stack_after + 0.5) or not stack.exists()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("other_reports", [True, False])
def test_of_two_machines_the_worker_that_died_first_is_named(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, victim: int, other_reports: bool
) -> None:
    """Both agents report a worker that SIGKILL has ended: one was killed from outside, one because of that."""
    config = load_config(tiny())
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"machines": 2})})
    machines = AttemptMachines()
    attempt = monitor_of(config, machines=machines)
    folder, now, killed = begin(attempt).directory, time.monotonic(), list[float]()
    for rank in (0, 1):
        page = Heartbeat(folder / f"heartbeat-{rank}")
        page._pid = 1000 + rank
        page.beat(Phase.COMPUTE, 7)
    dead = {1000 + victim}

    def reports(rank: int) -> ErrorReport:
        return ErrorReport(1, "died", rank=rank, signal=9)

    def kill(pid: int, number: int) -> None:
        if pid not in dead:
            killed.append(now)
            dead.add(pid)
        assert number == signal.SIGKILL

    def listen(seconds: float) -> list[Any]:
        nonlocal now
        now += seconds
        if len(dead) == 2 and (victim or other_reports):
            known = reports(1)
            machines.ends[1] = MachineEnd(1, False, known, 1, killed_here=() if victim else (1,))
        return [reports(0)] if len(dead) == 2 else []

    def state(pid: int) -> ProcessState:
        return ProcessState(pid, DEAD if pid in dead else "S", 1, pid, signal.SIGKILL if pid in dead else None)

    page_of_1 = worker_status.WorkerStatuses(2, range(1, 2))
    monkeypatch.setattr(worker_status, "process_state", state)
    monkeypatch.setattr(attempt_monitor, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(worker_control, "ask_for_stacks", lambda *_: None)
    monkeypatch.setattr("os.kill", kill)

    def look() -> None:
        page_of_1.look(folder)
        machines.statuses = page_of_1

    monkeypatch.setattr(machines, "look", look)
    monkeypatch.setattr(machines, "signal", lambda number: kill(1001, number))
    monkeypatch.setattr(AttemptMachines, "all_ended", property(lambda machines: 1 in machines.ends))
    process: Any = SimpleNamespace(pid=-1, code=1, listen=listen, poll=lambda: 1 if len(dead) == 2 else None)
    ending = attempt.watch(process)
    page_of_1.close()
    assert (ending.kind, ending.rank, ending.signal) == ("died", victim, signal.SIGKILL)
    assert len(killed) == 1, "the other one was killed here"


def test_workers_that_have_begun_since_the_last_look_hear_a_signal_too(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were taken for none, and killed with their agent: copies of it are at their steps within a look."""
    config = load_config(tiny(), ["parallel.workers=2"])
    attempt = monitor_of(config, signal.SIGTERM)
    folder = begin(attempt).directory
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *told: sent.append(told))
    agent: Any = SimpleNamespace(pid=12345, poll=lambda: None)
    Heartbeat(folder / "heartbeat-0").beat(Phase.COMPUTE, 1)
    attempt.pass_signals_on(agent)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    attempt.pass_signals_on(agent)
    assert len(sent) == 1, "once"


def test_an_agent_without_workers_has_nothing_to_save(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny(), ["parallel.workers=2"])
    attempt = monitor_of(config, signal.SIGTERM)
    begin(attempt)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *told: sent.append(told))
    agent: Any = SimpleNamespace(pid=12345, poll=lambda: None)
    attempt.pass_signals_on(agent)
    assert sent == [(12345, signal.SIGKILL)]


def test_an_agent_whose_workers_are_gone_tells_why(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They have saved for one signal when another comes."""
    config = load_config(tiny(), ["parallel.workers=2"])
    attempt = monitor_of(config, signal.SIGTERM)
    Heartbeat(begin(attempt).directory / "heartbeat-0").beat(Phase.END, 1)
    monkeypatch.setattr("headway.run.supervisor.worker_status.process_state", lambda _: None)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *told: sent.append(told))
    agent: Any = SimpleNamespace(pid=12345, poll=lambda: None)
    attempt.pass_signals_on(agent)
    assert sent == []


def test_a_second_ctrl_c_ends_workers_at_once(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the worker is in, and however it ends then."""
    monkeypatch.setattr(attempt_monitor, "_GIVE_UP_SECONDS", 0.2)
    attempt = monitor_of(load_config(tiny()), signal.SIGINT)
    worker = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))

    def wait(seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(seconds)

    process: Any = SimpleNamespace(pid=worker.pid, poll=worker.poll, wait=wait)
    try:
        attempt.pass_signals_on(process)
        with pytest.raises(subprocess.TimeoutExpired):  # it may save
            worker.wait(0.5)
        attempt.evidence.signals.append(signal.SIGINT)  # type: ignore[attr-defined]
        attempt.pass_signals_on(process)
        process.code = worker.wait(LONG)
    finally:
        worker.kill()
        worker.wait()
    assert process.code == -signal.SIGKILL
    ending = attempt.explain_end(process, None)
    assert (ending.kind, ending.exit_code) == ("error", INTERRUPTED)


@pytest.mark.parametrize("answer", ["warn", "restart"])
def test_a_slow_worker_is_answered_as_the_config_says(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    config = load_config(tiny(supervise={"slow_worker": answer}))
    attempt = monitor_of(config)
    Heartbeat(begin(attempt).directory / "heartbeat-0").beat(Phase.COMPUTE, 1)
    monkeypatch.setattr(worker_control, "ask_for_stacks", lambda *_, **__: None)
    findings = [Finding("slow", 0, "takes 3 s for its part of a step", suspects=(0,))]
    monkeypatch.setattr(attempt.watchdog, "look", lambda *_: findings.pop() if findings else None)
    finished: Any = SimpleNamespace(pid=-1, code=0, poll=lambda: None if findings else 0, listen=lambda _: [])
    attempt.take(Done(), finished)
    ending = attempt.watch(finished)
    if answer == "warn":
        assert ending.kind == "finished" and [told["rank"] for told in attempt.journal.facts["warnings"]] == [0]
    else:
        assert (ending.kind, ending.rank) == ("slow", 0)
        assert RestartPolicy(config.supervise).decide(ending, 1).why == "supervise.max_failures is 0", "a failure"


REPORT = ErrorReport(3, "no data", rank=0, type="DataError")


@pytest.mark.parametrize(
    ("messages", "kind", "code"),
    [
        ([Done()], "finished", 0),
        ([REPORT], "error", 3),
        ([replace(REPORT, exit_code=1, frames=["a.py:1 in b"])], "error", 1),
        ([], "died", 1),
    ],
)
def test_zero_alone_is_no_success(
    attempt: AttemptMonitor, messages: list[AttemptMessage], kind: str, code: int
) -> None:
    """It is what Python makes of any end of a child where SIGCHLD is ignored."""
    process: Any = SimpleNamespace(code=0)
    for message in messages:
        attempt.take(message, process)
    ending = attempt.explain_end(process, None)
    assert (ending.kind, ending.exit_code) == (kind, code)
    assert kind != "died" or "cause unknown" in ending.what


def test_a_caller_that_ignores_children_hears_of_an_error(tiny: Callable[..., Path]) -> None:
    script = (
        "import signal, sys, headway\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "try:\n"
        "    headway.train(headway.load_config(sys.argv[1], ['parallel.workers=2', 'model.vocab_size=10']))\n"
        "except headway.HeadwayError as error:\n"
        "    sys.exit(error.exit_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny())],
        capture_output=True,
        text=True,
        timeout=LONG,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_DFL),
    )
    assert done.returncode == 2, done.stderr
