"""What others see of a run and can ask of it: its lease, a request to end for good, and signals of the first moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.cli.runs import runs as verb
from headway.config import load_config
from headway.core.coordination import lease as leases
from headway.core.coordination.lease import read_lease
from headway.core.coordination.owner import read_owner
from headway.core.coordination.preemption_board import CANCEL_KEY, posted
from headway.core.errors import Cancelled, CheckpointError
from headway.core.files.atomic import write_json
from headway.core.process.waiting import wait_until
from headway.run.directory import ownership
from headway.run.directory.cancel import check_not_cancelled, forget_cancel, request_cancel
from headway.run.directory.run_directory import Attempt, RunDirectory
from headway.run.session.attempt import RunOptions
from headway.run.supervisor import supervisor
from headway.run.supervisor.attempt_monitor import AttemptMonitor
from headway.run.supervisor.restart_policy import AttemptOutcome, RestartPolicy
from headway.telemetry.record import open_run


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    attempt = RunDirectory(tmp_path / "run").begin_attempt("headway train")
    (attempt.run / "config.yaml").write_text("name: run\n")
    return attempt


def elsewhere(attempt: Attempt) -> str:
    """The state of a run whose newest attempt is on another host."""
    path = attempt.directory / "attempt.json"
    write_json(path, {**json.loads(path.read_text()), "host": "another-host"})
    return open_run(attempt.run).state


def test_a_lease_tells_every_host_whether_a_run_lives(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    assert elsewhere(attempt) == "running"
    monkeypatch.setattr(leases.time, "time", lambda now=time.time: now() + 61.0)
    assert elsewhere(attempt) == "died"


def test_a_lease_of_another_attempt_and_none_at_all_say_nothing(attempt: Attempt) -> None:
    owner_file = attempt.run / ".owner"
    leases.write_lease(owner_file, attempt.number + 1, 0.0)
    assert elsewhere(attempt) == "not ended"
    for rest in (b"", b"{", b"[]" * 20, b'{"attempt": 1}', b'{"attempt": "x", "until": []}'):
        owner_file.write_bytes(owner_file.read_bytes()[:512] + rest)
        assert read_lease(attempt.run) is None
    assert elsewhere(attempt) == "not ended"


def test_renewing_a_lease_leaves_the_owner_as_it_is(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, before = attempt._lock, read_lease(attempt.run)
    assert lock is not None and before is not None
    lock.renew()
    assert read_lease(attempt.run) == before, "it is not time yet"
    monkeypatch.setattr(ownership, "_RENEW_SECONDS", 0.0)
    time.sleep(0.002)
    lock.renew()
    assert wait_until(lambda: (read_lease(attempt.run) or before).until > before.until, 10.0)
    assert read_owner(attempt.run) == attempt.owner
    attempt.assert_current()


def test_a_request_to_cancel_reaches_the_board_and_the_command(attempt: Attempt) -> None:
    check_not_cancelled(attempt.run)
    request_cancel(attempt.run, "wrong data")
    (notice,) = posted(attempt.directory)
    assert (notice["key"], notice["wish"], notice["what"]) == (CANCEL_KEY, "stop", "cancelled: wrong data")
    with pytest.raises(Cancelled) as told:
        check_not_cancelled(attempt.run)
    assert told.value.exit_code == 7
    forget_cancel(attempt.run)
    check_not_cancelled(attempt.run)


def test_what_is_no_run_cannot_be_cancelled(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run directory"):
        request_cancel(tmp_path)


def test_a_cancelled_attempt_is_the_last_whatever_else_would_restart(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny(supervise={"restart_preempted": True}))

    class Stopped(AttemptMonitor):
        def run(self) -> AttemptOutcome:
            assert not self.journal.restarts
            self.journal.begin(self.config)
            return AttemptOutcome("cancelled", "stopped by cancelled; step 2 is saved", 7)

    monkeypatch.setattr(supervisor, "AttemptMonitor", Stopped)
    with pytest.raises(Cancelled) as told:
        supervisor.supervise(config, RunOptions(), own_process=False)
    assert told.value.exit_code == 7
    record = json.loads((config.run_directory / "attempts/001/attempt.json").read_text())
    assert (record["outcome"], record["exit_code"], record["kind"]) == ("cancelled", 7, "cancelled")


def test_a_lost_machine_counts_as_a_failure_only_without_progress(tiny: Callable[..., Path]) -> None:
    policy = RestartPolicy(load_config(tiny(supervise={"max_failures": 1})).supervise)
    lost = AttemptOutcome("lost", "m", 1)
    assert [policy.decide(lost, step).continues for step in (-1, 2, 4, 4, 4)] == [True, True, True, True, False]


@pytest.mark.parametrize(("options", "code"), [([], 75), (["--machines", "2"], None)])
def test_a_signal_in_the_first_moment_is_no_failure(options: list[str], code: int | None) -> None:
    """With several machines the process must live until the others know."""
    script = (
        f"import sys; sys.argv = ['headway', 'train', 'x.yaml', *{options!r}]\n"
        "import headway.cli, os, signal, time\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "from headway.core.startup.early_stop import take_early_signals\n"
        "print(take_early_signals(), take_early_signals())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    if code is not None:
        assert done.returncode == code and "stopped by SIGTERM while no attempt was running" in done.stderr
    else:
        assert done.stdout.strip() == f"[{int(signal.SIGTERM)}] []" and done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["data", "prepare"], ["bench"]])
def test_other_verbs_keep_the_default_action(words: list[str]) -> None:
    script = (
        f"import sys; sys.argv = ['headway', *{words!r}]\n"
        "import headway.cli, signal\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("preempted", 75), ("a worker failed", 1)])
def test_a_run_that_has_ended_is_not_asked_to(
    attempt: Attempt, outcome: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    attempt.finish(outcome, code)
    state = open_run(attempt.run).state
    verb.cancel(attempt.run)
    assert f"has ended already ({state}): there is nothing to cancel" in capfd.readouterr().err
    check_not_cancelled(attempt.run)
    assert not posted(attempt.directory)


def test_a_command_that_waits_before_its_next_attempt_can_be_cancelled(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its newest attempt has failed, but the command holds the lock, or on another machine the lease."""
    path = attempt.directory / "attempt.json"
    write_json(path, {**json.loads(path.read_text()), "outcome": "a worker failed", "exit_code": 1})
    assert request_cancel(attempt.run) is None
    forget_cancel(attempt.run)
    write_json(path, {**json.loads(path.read_text()), "outcome": "diverged", "exit_code": 5})
    assert request_cancel(attempt.run) == "failed", "no command tries that again"
    write_json(path, {**json.loads(path.read_text()), "outcome": "a worker failed", "exit_code": 1})
    assert attempt._lock is not None
    attempt._lock.release()
    assert request_cancel(attempt.run) == "failed"
    monkeypatch.setattr("headway.run.directory.cancel.host_name", lambda: "another-host")
    assert request_cancel(attempt.run) is None, "its lease is valid"
    forget_cancel(attempt.run)
    monkeypatch.setattr(leases.time, "time", lambda now=time.time: now() + 61.0)
    assert request_cancel(attempt.run) == "failed"
